"""A cache that grows in place holds what concatenating gives, and changes nothing that others hold."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import llamoe
from llamoe.modeling.kernels import cache_room

HEADS, SIZE = 3, 6


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"], autouse=True)
def draw(request, monkeypatch):
    """Keys or values of so many tokens; a cache has room from seven tokens on, for two more."""
    monkeypatch.setattr(cache_room, "_LEAST", 7)
    generator = torch.Generator().manual_seed(3)

    def draw(tokens: int = 1, heads: int = HEADS, batch: int = 1) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, SIZE, generator=generator).to(request.param)

    return draw


def appended(cache, draw, tokens: int, layers: int = 2, change=lambda number: None):
    """The same tokens in the cache and in one that concatenates, which must be equal after each."""
    other = copy.deepcopy(cache)
    for number in range(tokens):
        for layer in range(layers):
            key, value = draw(), draw()
            expected = other.update(key.clone(), value.clone(), layer)
            found = cache_room.append(cache, layer, key, value)
            for one, two in zip(found, expected, strict=True):
                assert torch.equal(one, two)
            its = cache.layers[layer]
            # A window may hold less than is attended to.
            assert its.is_sliding or (found[0] is its.keys and found[1] is its.values)
        change(number)
    return other


@pytest.mark.parametrize("tokens", [0, 1, 6, 7, 30])
@pytest.mark.parametrize("is_known", [True, False])
def test_it_holds_what_concatenating_gives(tokens, is_known, draw):
    config = llamoe.LlamoeDenseConfig(num_hidden_layers=2)
    cache = DynamicCache(config=config) if is_known else DynamicCache()
    for layer in range(2 if tokens else 0):
        cache.update(draw(tokens), draw(tokens), layer)
    other = appended(cache, draw, 40)
    assert cache.get_seq_length() == other.get_seq_length() == tokens + 40


@pytest.mark.parametrize("window", [12, 20, 200])
def test_a_window_is_followed_until_it_is_full(window, draw):
    layers = ["sliding_attention", "full_attention"]
    cache = DynamicCache(
        config=llamoe.LlamoeDenseConfig(num_hidden_layers=2, sliding_window=window, layer_types=layers)
    )
    in_place = []

    def look(number):
        room = cache_room._ROOMS.get(cache.layers[0])
        in_place.append(room is not None and room.views[0] is cache.layers[0].keys)

    other = appended(cache, draw, 40, change=look)
    assert cache.layers[0].get_mask_sizes(1) == other.layers[0].get_mask_sizes(1)
    assert cache.get_seq_length() == 40
    # From seven tokens to the last but one of the window.
    assert in_place == [7 < number < window for number in range(1, 41)]


def test_memory_is_taken_seldom_and_little_more_than_needed(draw, monkeypatch):
    made, with_room = [], cache_room._with_room

    def count(cached):
        made.append(with_room(cached))
        return made[-1]

    monkeypatch.setattr(cache_room, "_with_room", count)
    cache = DynamicCache()
    cache.update(draw(160), draw(160), 0)
    appended(cache, draw, 100, layers=1)
    # Keys and values: 160, 180, 202, 227 and 255 tokens had no room for one more.
    assert [each.shape[2] for each in made[::2]] == [180, 202, 227, 255, 286]
    assert len(made) == 10


def test_what_somebody_holds_never_changes(draw):
    cache = DynamicCache()
    cache.update(draw(9), draw(9), 0)
    held = []

    def hold(_):
        held.extend((each, each.clone()) for each in (cache.layers[0].keys, cache.layers[0].values))

    appended(cache, draw, 25, layers=1, change=hold)
    cache.crop(-11)
    appended(cache, draw, 25, layers=1, change=hold)
    assert len(held) == 100 and all(torch.equal(one, two) for one, two in held)


CHANGES = {
    "crop": lambda cache: cache.crop(-3),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "deep copy": copy.deepcopy,
    "other tensors": lambda cache: setattr(cache.layers[0], "keys", cache.layers[0].keys.clone()),
    "numbers in place": lambda cache: cache.layers[0].values.mul_(2),
    "a view of it": lambda cache: setattr(cache.layers[0], "values", cache.layers[0].values[:]),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_done_to_a_cache_between_is_seen(change, draw):
    cache = DynamicCache()
    cache.update(draw(9), draw(9), 0)
    appended(cache, draw, 5, layers=1)
    changed = CHANGES[change](cache)
    cache = changed if isinstance(changed, DynamicCache) else cache
    appended(cache, draw, 25, layers=1)


def test_two_caches_of_the_same_tensors_go_apart(draw):
    first = DynamicCache()
    first.update(draw(9), draw(9), 0)
    appended(first, draw, 3, layers=1)
    second = DynamicCache()
    second.update(draw(1), draw(1), 0)
    second.layers[0].keys, second.layers[0].values = first.layers[0].keys, first.layers[0].values
    before = [copy.deepcopy(cache) for cache in (first, second)]
    for number, cache in enumerate((first, second, first, second)):
        key, value = draw(), draw()
        expected = before[number % 2].update(key, value, 0)
        cache_room.append(cache, 0, key, value)
        for other, its in ((cache, expected),):
            assert torch.equal(other.layers[0].keys, its[0]) and torch.equal(other.layers[0].values, its[1])
    for cache, its in zip((first, second), before, strict=True):
        assert torch.equal(cache.layers[0].keys, its.layers[0].keys)


def test_inference_mode_may_come_and_go(draw):
    cache = DynamicCache()
    cache.update(draw(9), draw(9), 0)
    for modes in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        with modes():
            appended(cache, draw, 3, layers=1)


@pytest.mark.parametrize("kind", ["static", "sliding", "subclass", "other layers", "other heads"])
def test_other_caches_update_themselves(kind, draw, monkeypatch):
    sizes = dict(num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=SIZE)
    config = llamoe.LlamoeDenseConfig(hidden_size=18, **sizes)
    if kind == "sliding":
        config.layer_types, config.sliding_window = ["sliding_attention"], 6
    cache = {
        "static": lambda: StaticCache(config=config, max_cache_len=40),
        "subclass": lambda: type("Own", (DynamicCache,), {})(),
    }.get(kind, lambda: DynamicCache(config=config))()
    monkeypatch.setattr(cache_room, "_with_room", None)
    if kind == "other heads":
        cache.update(draw(9), draw(9), 0)
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            cache_room.append(cache, 0, draw(heads=2), draw(heads=2))
        return
    if kind == "other layers":
        own = type("Own", (type(cache.layers[0]),), {})
        cache.layers[0] = own()
    other = copy.deepcopy(cache)
    for tokens in (9, *[1] * 12):
        key, value = draw(tokens), draw(tokens)
        expected = other.update(key, value, 0)
        found = cache_room.append(cache, 0, key, value) if tokens == 1 else cache.update(key, value, 0)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_a_layer_that_is_gone_leaves_no_memory(draw):
    cache = DynamicCache()
    cache.update(draw(9), draw(9), 0)
    appended(cache, draw, 3, layers=1)
    layer = cache.layers[0]
    assert layer in cache_room._ROOMS
    before = len(cache_room._ROOMS)
    del cache, layer
    assert len(cache_room._ROOMS) == before - 1
