"""A cache that grows in place has the same keys and values as with concatenation, and never changes earlier tensors."""

import copy
import pickle

import pytest
import torch
from support.models import draw as draw_model
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import llamoe
from llamoe.modeling.attention import growing_cache
from llamoe.modeling.attention.growing_cache import append_to_cache
from llamoe.modeling.kernels import SHORTCUTS_ARE_ON

pytestmark = pytest.mark.skipif(not SHORTCUTS_ARE_ON, reason="LLAMOE_CPU_SHORTCUTS=0")
HEADS, SIZE = 3, 6
LAYERS = ["sliding_attention", "full_attention"]


@pytest.fixture(autouse=True)
def without_gradients(monkeypatch):
    """Turn gradients off, and let new memory have two spare places."""
    monkeypatch.setattr(growing_cache, "_MIN_SPARE", 2)
    with torch.no_grad():
        yield


@pytest.fixture(params=[(torch.float32, 1), (torch.bfloat16, 2)], ids=["float32", "two rows in bfloat16"])
def draw(request):
    """A function that draws keys or values of a number of tokens."""
    dtype, batch = request.param
    generator = torch.Generator().manual_seed(3)

    def draw(tokens: int = 1, heads: int = HEADS) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, SIZE, generator=generator).to(dtype)

    return draw


def memory_of(layer):
    """Return the memory with spare places that a layer's tensors are views of; None if they are not."""
    memory = vars(layer).get("llamoe_memory")
    is_used = memory is not None and memory.tensors[0].data_ptr() == layer.keys.data_ptr()
    return memory if is_used else None


def check_appended(cache, draw, tokens: int, layers: int = 2, change=lambda number: None, together: int = 1):
    """Append the same tokens to the cache and to a copy that concatenates; check after each step that both are equal.

    A step appends `together` tokens to each of `layers` layers, and then calls `change`. Return the copy.
    """
    other = copy.deepcopy(cache)
    for number in range(tokens):
        for layer in range(layers):
            key, value = draw(together), draw(together)
            expected = other.update(key.clone(), value.clone(), layer)
            states = append_to_cache(cache, key, value, layer)
            grown, concatenated = cache.layers[layer], other.layers[layer]
            for one, two in zip(
                (*states, grown.keys, grown.values),
                (*expected, concatenated.keys, concatenated.values),
                strict=True,
            ):
                assert torch.equal(one, two)
        change(number)
    return other


@pytest.mark.parametrize("tokens", [0, 1, 6, 7, 30])
@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("together", [1, 3])
def test_tensors_equal_concatenated_ones(tokens, has_config, together, draw):
    config = llamoe.LlamoeDenseConfig(num_hidden_layers=2)
    cache = DynamicCache(config=config) if has_config else DynamicCache()
    for layer in range(2 if tokens else 0):
        append_to_cache(cache, draw(tokens), draw(tokens), layer)
    other = check_appended(cache, draw, 40, together=together)
    assert all(memory_of(layer) for layer in cache.layers)
    assert cache.get_seq_length() == other.get_seq_length() == tokens + 40 * together


@pytest.mark.parametrize("window", [2, 12, 20, 200])
def test_a_window_grows_in_place_until_it_is_full(window, draw):
    config = llamoe.LlamoeDenseConfig(num_hidden_layers=2, sliding_window=window, layer_types=LAYERS)
    cache, in_place = DynamicCache(config=config), []
    layer = cache.layers[0]
    other = check_appended(cache, draw, 40, change=lambda _: in_place.append(memory_of(layer) is not None))
    assert type(layer) is DynamicSlidingWindowLayer
    assert layer.get_mask_sizes(1) == other.layers[0].get_mask_sizes(1) and cache.get_seq_length() == 40
    # The first token is written by `update`; when the window is full, its memory is freed.
    assert in_place == [1 < number < window for number in range(1, 41)]
    assert "llamoe_memory" not in vars(layer) or window > 40


def test_a_window_that_records_the_past_is_left_to_update(draw):
    config = llamoe.LlamoeDenseConfig(num_hidden_layers=1, sliding_window=8, layer_types=LAYERS[:1])
    cache = DynamicCache(config=config)
    check_appended(cache, draw, 5, layers=1)
    cache.layers[0].activate_past_recording()
    check_appended(cache, draw, 6, layers=1)
    cache.crop(-5)
    check_appended(cache, draw, 6, layers=1)


def test_memory_is_allocated_seldom_and_with_an_eighth_to_spare(draw):
    cache, memories = DynamicCache(), []
    append_to_cache(cache, draw(160), draw(160), 0)
    layer = cache.layers[0]

    def look(_):
        if not memories or memory_of(layer) is not memories[-1]:
            memories.append(memory_of(layer))

    check_appended(cache, draw, 100, layers=1, change=look)
    # With 160, 181, 204, 230 and 259 tokens there was no place for the next token.
    assert [memory.tensors[0].shape[2] for memory in memories] == [181, 204, 230, 259, 292]


def test_tensors_that_were_returned_never_change(draw):
    cache, held = DynamicCache(), []
    append_to_cache(cache, draw(9), draw(9), 0)

    def hold(_):
        held.extend((states, states.clone()) for states in (cache.layers[0].keys, cache.layers[0].values))

    check_appended(cache, draw, 25, layers=1, change=hold)
    cache.crop(-11)
    check_appended(cache, draw, 25, layers=1, change=hold)
    assert len(held) == 100 and all(torch.equal(one, two) for one, two in held)


CHANGES = {
    "crop": lambda cache: cache.crop(-3),
    "reorder": lambda cache: cache.reorder_cache(torch.arange(len(cache.layers[0].keys))),
    "deep copy": copy.deepcopy,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),
    "other tensors": lambda cache: setattr(cache.layers[0], "keys", cache.layers[0].keys.clone()),
    "other memory": lambda cache: setattr(
        cache.layers[0].keys, "data", cache.layers[0].keys.data.flip(2).clone()
    ),
    "numbers in place": lambda cache: cache.layers[0].values.mul_(2),
    "a view of it": lambda cache: setattr(cache.layers[0], "values", cache.layers[0].values[:]),
    "reset": lambda cache: cache.reset(),
    "concatenated": lambda cache: (
        cache.update(*torch.ones(2, *cache.layers[0].keys[:, :, :2].shape), 0) and None
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_may_be_changed_between_tokens(change, draw):
    cache = DynamicCache()
    append_to_cache(cache, draw(9), draw(9), 0)
    check_appended(cache, draw, 5, layers=1)
    changed = CHANGES[change](cache)
    cache = changed if isinstance(changed, DynamicCache) else cache
    check_appended(cache, draw, 25, layers=1)


@pytest.mark.parametrize("is_shallow", [True, False])
def test_two_caches_of_the_same_tensors_grow_apart(is_shallow, draw):
    first = DynamicCache()
    append_to_cache(first, draw(9), draw(9), 0)
    check_appended(first, draw, 3, layers=1)
    if is_shallow:
        second = copy.copy(first)
        second.layers = [copy.copy(first.layers[0])]
    else:
        second = DynamicCache()
        append_to_cache(second, draw(1), draw(1), 0)
        second.layers[0].keys, second.layers[0].values = first.layers[0].keys, first.layers[0].values
    before = [copy.deepcopy(cache) for cache in (first, second)]
    for number, cache in enumerate((first, second, first, second)):
        key, value = draw(), draw()
        expected = before[number % 2].update(key, value, 0)
        append_to_cache(cache, key, value, 0)
        assert torch.equal(cache.layers[0].keys, expected[0])
        assert torch.equal(cache.layers[0].values, expected[1])
    for cache, its in zip((first, second), before, strict=True):
        assert torch.equal(cache.layers[0].keys, its.layers[0].keys)


def test_inference_mode_and_gradients_may_change_between_tokens(draw):
    cache = DynamicCache()
    append_to_cache(cache, draw(9), draw(9), 0)
    modes = torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad
    for mode in modes:
        with mode():
            check_appended(cache, draw, 3, layers=1)


def own_update(self, key_states, value_states, *_):
    """Return other keys and values: a stand-in for code that replaces `update`."""
    return key_states * 2, value_states * 3


@pytest.mark.parametrize("kind", ["static", "subclass", "class", "object", "cache's class", "cache's object"])
def test_a_replaced_update_is_called(kind, monkeypatch):
    sizes = dict(num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=SIZE)
    config = llamoe.LlamoeDenseConfig(hidden_size=18, **sizes)
    cache = StaticCache(config=config, max_cache_len=40) if kind == "static" else DynamicCache(config=config)
    key, value = torch.ones(2, 1, HEADS, 1, SIZE)
    if kind != "static":
        for _ in range(2):
            append_to_cache(cache, key, value, 0)
    if kind == "subclass":
        cache.layers[0].__class__ = type("Own", (DynamicLayer,), {"update": own_update})
    elif "object" in kind:
        owner = cache if "cache" in kind else cache.layers[0]
        owner.update = own_update.__get__(owner)
    elif "class" in kind:
        monkeypatch.setattr(Cache if "cache" in kind else DynamicLayer, "update", own_update)
    states = append_to_cache(cache, key, value, 0)
    if kind == "static":
        assert states[0].shape[2] == 40
    else:
        assert torch.equal(states[0], key * 2) and torch.equal(states[1], value * 3)


def test_a_models_own_cache_grows():
    """`test_judged.py` compares the model's logits."""
    config = llamoe.LlamoeDenseConfig(
        vocab_size=99, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6
    )
    model, cache = draw_model(llamoe.LlamoeDenseForCausalLM, config), DynamicCache(config=config)
    for tokens in (torch.arange(3, 23), torch.tensor([7]), torch.tensor([8])):
        model(tokens[None], past_key_values=cache)
    assert all(memory_of(layer) for layer in cache.layers)
