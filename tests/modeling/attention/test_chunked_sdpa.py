"""Under SDPA the chunks of a row are folded into the batch: the same numbers as masks give, without large masks.

The truth is `eager`, which takes masks, and transformers' own Llama 4 where that is right: single rows without padding.
"""

import random

import pytest
import torch
from accelerate.utils import send_to_device
from support.models import (
    MODELS,
    main_output,
    make_asymmetric,
    max_abs,
    run,
    stock_model,
    stock_text_config,
    text_config,
)
from support.tables import in_turn
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Llama4ForCausalLM, StaticCache

import llamoe
from llamoe.modeling.attention import MaskInputs, attention_masks, chunked_sdpa, forms
from llamoe.modeling.attention.chunked_sdpa import Fold, fold
from llamoe.modeling.attention.forms import attend_in_form
from llamoe.modeling.attention.layer import ALL_ATTENTION_FUNCTIONS
from llamoe.modeling.attention.varlen import sequences_of_groups
from llamoe.modeling.attention.visibility import EqualRows, cut_equal_rows

CHUNK = 16
HEADS = {case.name: case for case in MODELS if case.is_head}
# Sums in another order, of logits with a deviation of about one.
TOLERANCE = 1e-5


def pair(**overrides):
    """`eager` and `sdpa`: a chunked, a full and another chunked layer, if not told otherwise."""
    overrides = {
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "interleave_moe_layer_step": 3,
        **overrides,
    }
    models = []
    for implementation in ("eager", "sdpa"):
        models.append(make_asymmetric(llamoe.LlamoeForCausalLM(text_config(**overrides))))
        models[-1].set_attn_implementation(implementation)
    return models


@pytest.fixture(scope="module")
def models():
    return pair()


def tokens(rows, length, seed=0):
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding_mask(padding, length, side="left"):
    index = torch.arange(length)
    index = index if side == "left" else index.flip(0)
    return (index >= torch.tensor(padding)[:, None]).long()


def masks_of(*inputs):
    return attention_masks(MaskInputs(*inputs))


def chunked_mask(model, rows, length, attention_mask=None, past_key_values=None, position_ids=None):
    embeds = torch.empty(rows, length, 0)
    masks = masks_of(model.config, embeds, attention_mask, past_key_values, position_ids)
    return masks["chunked_attention"]


# The same numbers


PACKED = torch.cat([torch.arange(n) for n in (5, 37, 1, 20)])
ROWS = {
    "bare": {},
    "left": {"attention_mask": padding_mask((0, 3, 40), 63)},
    "right": {"attention_mask": padding_mask((0, 3, 40), 63, "right")},
    "ones": {"attention_mask": torch.ones(3, 63, dtype=torch.long)},
    "late": {"position_ids": torch.arange(10, 73)[None]},
    "late_each": {"position_ids": torch.arange(63) + torch.tensor([[3], [16], [30]])},
    "packed": {"position_ids": PACKED[None]},
    "packed_each": {
        "position_ids": torch.stack([PACKED, PACKED.flip(0).argsort().argsort(), torch.arange(63)])
    },
    "hole": {"attention_mask": padding_mask((0, 3, 40), 63).index_fill(1, torch.arange(20, 30), 0)},
    "all_padding": {"attention_mask": padding_mask((0, 63, 1), 63)},
    # No packed rows, since there is a mask: a token sees what stands before it at positions of the same chunk.
    "restarting": {"position_ids": PACKED[None], "attention_mask": torch.ones(3, 63, dtype=torch.long)},
}


@pytest.mark.parametrize(("kind", "use_cache"), in_turn(ROWS, [False, True]))
def test_rows_equal_eager(models, kind, use_cache):
    truth, model = models
    given = {"input_ids": tokens(3, 63), "use_cache": use_cache, **ROWS[kind]}
    real = given.get("attention_mask", torch.ones(3, 63)).bool()
    expected = run(truth, **given)[real]
    assert max_abs(run(model, **given)[real], expected) < TOLERANCE * max(1, expected.std())
    mask = chunked_mask(model, 3, 63, given.get("attention_mask"), None, given.get("position_ids"))
    form = {"bare": EqualRows, "ones": EqualRows, "late": EqualRows, "restarting": torch.Tensor}
    assert isinstance(mask, form.get(kind, Fold))


@pytest.mark.parametrize("length", [16, 17, 61])
def test_single_rows_equal_stock(length):
    stock = stock_model(Llama4ForCausalLM, stock_text_config())
    model = llamoe.LlamoeForCausalLM(llamoe.from_stock(stock.config))
    model.load_state_dict(stock.state_dict())
    ids = tokens(1, length)
    expected = run(stock.eval(), input_ids=ids)
    assert max_abs(run(model.eval(), input_ids=ids), expected) < TOLERANCE * max(1, expected.std())


CACHES = {
    "windows": lambda config, length: DynamicCache(config=config),
    "whole": lambda config, length: DynamicCache(),
    "static": lambda config, length: StaticCache(config=config, max_cache_len=length + 3),
}


PIECES = [(50, 21), (7, 40, 1, 23), (16, 33, 22), (3, 5, 60, 3)]


@pytest.mark.parametrize(
    ("cache", "side", "pieces"), in_turn(CACHES, ["none", "ones", "left", "late"], PIECES), ids=str
)
def test_pieces_equal_eager(models, cache, side, pieces):
    """They begin in the middle of a chunk, and are longer and shorter than one."""
    length = sum(pieces)
    ids, mask = tokens(3, length), padding_mask((0, 0, 0) if side == "ones" else (2, 0, 19), length)
    late = torch.arange(length)[None] + 6
    results = []
    for model in models:
        past, begin, parts = CACHES[cache](model.config, length), 0, []
        for size in pieces:
            end, given = begin + size, {}
            if side in ("ones", "left"):
                given["attention_mask"] = mask[:, :end]
            elif side == "late":
                given["position_ids"] = late[:, begin:end]
            parts.append(run(model, input_ids=ids[:, begin:end], past_key_values=past, **given))
            begin = end
        results.append(torch.cat(parts, 1)[mask.bool() if side == "left" else slice(None)])
    assert max_abs(*results) < TOLERANCE * max(1, results[0].std())


@pytest.mark.parametrize("chunk", [2, 11, 64])
def test_random_passes_equal_eager(chunk):
    """Sizes, padding on either side, positions and caches at random; two passes each."""
    draw = random.Random(chunk)
    models = pair(attention_chunk_size=chunk, num_hidden_layers=2, no_rope_layers=[1, 0])
    for _ in range(6):
        rows, first, second = draw.randint(1, 4), draw.randint(1, 60), draw.randint(1, 60)
        ids = tokens(rows, first + second, draw.randrange(1000))
        real = torch.ones(rows, first + second, dtype=torch.long)
        for row in real:
            if draw.random() < 0.5:
                row[: draw.randrange(first)] = 0
        positions = (real.cumsum(1) - 1).clamp(min=0) + draw.choice([0, 0, 3, chunk])
        has_mask, has_positions = draw.random() < 0.7, draw.random() < 0.5
        if not has_mask:
            real.fill_(1)
            positions = torch.arange(first + second)[None] + torch.tensor([[draw.randint(0, 9)]] * rows)
        cache = draw.choice([*CACHES])
        results = []
        for model in models:
            past, parts = CACHES[cache](model.config, first + second), []
            for begin, end in ((0, first), (first, first + second)):
                given = {"attention_mask": real[:, :end]} if has_mask else {}
                given |= {"position_ids": positions[:, begin:end]} if has_positions else {}
                parts.append(run(model, input_ids=ids[:, begin:end], past_key_values=past, **given))
            results.append(torch.cat(parts, 1)[real.bool()])
        drawn = (rows, first, second, cache, has_mask)
        assert max_abs(*results) < TOLERANCE * max(1, results[0].std()), drawn


# Training


@pytest.fixture
def no_full_masks(monkeypatch):
    """Gather rows of every size; masks of what continues them are in pieces."""
    monkeypatch.setattr(forms, "LARGEST_FULL_MASK", 0)
    monkeypatch.setattr(chunked_sdpa, "BLOCK", 32)


@pytest.mark.parametrize(
    ("kind", "checkpointing", "is_folded"),
    [
        *in_turn(["bare", "left", "right", "packed"], [None, True, False], [False]),
        ("left", None, True),
        ("packed", None, True),
    ],
)
def test_gradients_equal_eager(kind, checkpointing, is_folded, request):
    """Also through full layers whose rows are folded."""
    if is_folded:
        request.getfixturevalue("no_full_masks")
    models = pair(num_hidden_layers=2, no_rope_layers=[1, 0])
    given = {"input_ids": tokens(3, 63), "use_cache": False, **ROWS[kind]}
    real = given.get("attention_mask", torch.ones(3, 63)).bool()
    for model in models:
        model.train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        main_output(model(**given))[real].square().mean().backward()
    for (name, given), expected in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert torch.isfinite(given.grad).all(), name
        assert max_abs(given.grad, expected.grad) <= 1e-4 * expected.grad.abs().max(), name


@pytest.mark.parametrize("side", ["bare", "left"])
def test_a_layer_whose_cached_tokens_are_fewer_is_refused(side):
    model = pair(num_hidden_layers=2, no_rope_layers=[1, 1], interleave_moe_layer_step=2)[1]
    past, ids = DynamicCache(config=model.config), tokens(2, 60)
    mask = padding_mask((0, 0) if side == "bare" else (3, 0), 60)
    run(model, input_ids=ids[:, :20], attention_mask=mask[:, :20], past_key_values=past)
    layer = past.layers[1]
    layer.keys, layer.values = layer.keys[:, :, -4:], layer.values[:, :, -4:]
    with pytest.raises(ValueError, match="past_key_values"):
        model(ids[:, 20:], attention_mask=mask, past_key_values=past, use_cache=False)


@pytest.mark.parametrize("kind", ["bare", "left"])
def test_dropout_reaches_every_part(kind):
    """With values of one, each output is what is left of a sum of weights: one on average."""
    model = pair(attention_dropout=0.25)[1].train()
    given = ROWS[kind]
    mask = chunked_mask(model, 3, 63, given.get("attention_mask"))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 63, 20, generator=generator)
    key, value = torch.randn(3, 2, 63, 20, generator=generator), torch.ones(3, 2, 63, 20)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    module = model.model.layers[0].self_attn
    torch.manual_seed(0)
    outputs = torch.stack(
        [
            attend_in_form(sdpa, module, query, key, value, mask, None, scaling=0.2, dropout=0.25)[0]
            for _ in range(100)
        ]
    )
    real = given.get("attention_mask", torch.ones(3, 63)).bool()
    outputs = outputs[:, real]
    assert abs(outputs.mean() - 1) < 0.015 and (outputs.mean((0, 2, 3)) - 1).abs().max() < 0.21
    assert (outputs.var(0).mean((1, 2)) > 0.003).all()


# No large masks


class Largest(TorchDispatchMode):
    """The largest number of elements that an operation gives."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return result


# The largest activation has 360 * ((6 + 2) * 20) elements a row, queries and keys together; a mask 360 * 360.
LONG = {
    "bare": {},
    "left": {"attention_mask": padding_mask((7, 0), 360)},
    "right": {"attention_mask": padding_mask((7, 0), 360, "right")},
    "packed": {"position_ids": torch.arange(360).remainder(70)[None]},
    "late": {"position_ids": torch.arange(5, 365)[None]},
}


@pytest.mark.parametrize(("kind", "with_cache"), in_turn(LONG, [False, True]))
def test_chunked_layers_make_nothing_as_large_as_a_mask(kind, with_cache):
    overrides = dict(num_hidden_layers=1, no_rope_layers=[1], interleave_moe_layer_step=2)
    truth, model = (m.model for m in pair(**overrides))
    ids, largest = tokens(2, 360), {}
    for each in (truth, model):
        past = DynamicCache(config=each.config) if with_cache else None
        with Largest() as seen:
            chunked_only(each, ids, past, **LONG[kind])
        largest[each] = seen.elements
    assert largest[truth] >= 2 * 360 * 360
    assert largest[model] < 360 * 360


def chunked_only(model, ids, past, attention_mask=None, position_ids=None):
    """A pass of a model with one chunked layer and no full one, without the mask for full layers."""
    embeds = model.embed_tokens(ids)
    mask = masks_of(model.config, embeds, attention_mask, past, position_ids)
    with torch.no_grad():
        return model(
            inputs_embeds=embeds, attention_mask=mask, position_ids=position_ids, past_key_values=past
        ).last_hidden_state


@pytest.mark.parametrize("pieces", [(360,), (260, 99, 1)], ids=str)
@torch.no_grad()
def test_full_layers_make_no_mask_without_padding(monkeypatch, pieces):
    """A piece behind cached tokens takes a mask a few queries long; blocks of 1024 queries in practice."""
    monkeypatch.setattr(chunked_sdpa, "BLOCK", 32)
    case = HEADS["LlamoeDenseForCausalLM"]
    truth, model = case.make(num_hidden_layers=1), case.make(num_hidden_layers=1)
    truth.set_attn_implementation("eager")
    ids, results = tokens(1, 360), []
    for each in (truth, model):
        past, parts = DynamicCache(config=each.config), []
        with Largest() as largest:
            for piece in ids.split(pieces, 1):
                parts.append(each.model(piece, past_key_values=past).last_hidden_state)
        results.append(torch.cat(parts, 1))
        if each is model:
            assert largest.elements <= 360 * 160
    assert max_abs(*results) < TOLERANCE * max(1, results[0].std())


def test_folding_less_than_doubles_uneven_sequences():
    lengths = [500, 3, 1, 260, 17, 90, 2, 33, 128, 64] * 3
    groups = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    real = torch.ones_like(groups, dtype=torch.bool)
    folded = fold(sequences_of_groups(real, real, groups, groups), groups.numel(), groups.numel())
    assert folded.place.sort().values.unique().numel() == groups.numel()
    assert sum(batch.query_index.numel() for batch in folded.batches) < 2 * groups.numel()


# Full layers


@pytest.mark.parametrize(("kind", "cache"), in_turn(ROWS, [None, "windows", "static"]))
def test_full_layers_fold_rows_too(models, no_full_masks, kind, cache):
    truth, model = models
    given = {"input_ids": tokens(3, 63), **ROWS[kind]}
    if cache == "static" and "packed" in kind:  # a cache of fixed length takes one sequence a row
        cache = None
    real = given.get("attention_mask", torch.ones(3, 63)).bool()
    results = []
    for each in models:
        past = None if cache is None else CACHES[cache](each.config, 70)
        results.append(run(each, use_cache=past is not None, past_key_values=past, **given)[real])
    assert max_abs(*results) < TOLERANCE * max(1, results[0].std())
    past = None if cache is None else CACHES[cache](model.config, 70)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    masks = masks_of(model.config, torch.empty(3, 63, 0), mask, past, positions)
    form = {"left": Fold, "right": Fold, "hole": Fold, "all_padding": Fold, "packed": Fold}
    assert isinstance(masks["full_attention"], form.get(kind, Fold | EqualRows | None))


@pytest.mark.parametrize(
    ("pieces", "side", "cache"),
    in_turn([(50, 21), (7, 40, 1, 23), (3, 5, 60, 3)], ["none", "left", "hole"], CACHES),
    ids=str,
)
def test_pieces_of_folded_full_layers_equal_eager(models, no_full_masks, cache, side, pieces):
    length = sum(pieces)
    ids, mask = tokens(3, length), padding_mask((2, 0, 6), length)
    if side == "hole":
        mask[1, 30:35] = 0
    results = []
    for model in models:
        past, begin, parts = CACHES["whole" if side == "hole" else cache](model.config, length), 0, []
        for end in torch.tensor(pieces).cumsum(0).tolist():
            given = {} if side == "none" else {"attention_mask": mask[:, :end]}
            parts.append(run(model, input_ids=ids[:, begin:end], past_key_values=past, **given))
            begin = end
        results.append(torch.cat(parts, 1)[slice(None) if side == "none" else mask.bool()])
    assert max_abs(*results) < TOLERANCE * max(1, results[0].std())


@pytest.mark.parametrize("kind", ["left", "packed", "static_left"])
@torch.no_grad()
def test_long_rows_make_no_mask_in_full_layers(kind):
    """Above the size from which rows are gathered, in a decoder of full layers alone."""
    case, length = HEADS["LlamoeDenseForCausalLM"], 640
    ids, results = tokens(2, length), []
    for implementation in ("eager", "sdpa"):
        model = case.make(num_hidden_layers=1)
        model.set_attn_implementation(implementation)
        past = StaticCache(config=model.config, max_cache_len=700) if "static" in kind else None
        given = LONG_ROWS[kind](length)
        with Largest() as largest:
            results.append(model.model(ids, past_key_values=past, **given).last_hidden_state)
    assert largest.elements < length * length
    real = given.get("attention_mask", torch.ones(2, length)).bool()
    assert max_abs(results[0][real], results[1][real]) < TOLERANCE * max(1, results[0].std())


LONG_ROWS = {
    "left": lambda length: {"attention_mask": padding_mask((9, 0), length)},
    "packed": lambda length: {"position_ids": torch.arange(length).remainder(211)[None]},
    "static_left": lambda length: {"attention_mask": padding_mask((9, 0), length)},
}


def test_other_implementations_keep_their_masks_at_every_size(models, no_full_masks):
    truth, model = models
    embeds, mask = torch.empty(2, 30, 0), padding_mask((3, 0), 30)
    assert isinstance(masks_of(truth.config, embeds, mask, None, None)["full_attention"], torch.Tensor)
    four = torch.zeros(2, 1, 30, 30)
    assert masks_of(model.config, embeds, four, None, None)["full_attention"] is four
    past = StaticCache(config=model.config, max_cache_len=40)
    run(model, input_ids=tokens(2, 29), attention_mask=mask[:, :29], past_key_values=past)
    step = masks_of(model.config, embeds[:, :1], mask, past, None)
    assert isinstance(step["full_attention"], torch.Tensor)


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_no_full_layers_need_no_full_mask(given):
    truth, model = pair(num_hidden_layers=1, no_rope_layers=[1], interleave_moe_layer_step=2)
    ids, mask = tokens(2, 40), padding_mask((3, 0), 40)
    expected = run(truth, input_ids=ids, attention_mask=mask)
    masks = masks_of(model.config, torch.empty(2, 40, 0), mask, None, None)
    assert list(masks) == ["chunked_attention"]
    positions = (mask.cumsum(1) - 1).clamp(min=0) if given else None
    seen = run(model, input_ids=ids, attention_mask=masks if given else mask, position_ids=positions)
    assert max_abs(seen[mask.bool()], expected[mask.bool()]) < TOLERANCE * max(1, expected.std())
    bare = run(model, input_ids=ids, attention_mask={"chunked_attention": None})[:, :CHUNK]
    assert max_abs(bare, run(truth, input_ids=ids)[:, :CHUNK]) < TOLERANCE * max(1, expected.std())


@pytest.mark.parametrize("kind", ["left", "packed"])
def test_float64_rows_equal_eager(kind):
    """Narrowed to float32, a mask's lowest float64 is minus infinity, and a row of nothing else NaN."""
    truth, model = (each.double() for each in pair(attention_chunk_size=5))
    given = {"input_ids": tokens(3, 20)}
    real = padding_mask((0, 3, 13), 20)
    given |= (
        {"attention_mask": real} if kind == "left" else {"position_ids": torch.arange(20).remainder(7)[None]}
    )
    results = [run(each, **given) for each in (truth, model)]
    assert results[0].isfinite().all()
    real = real.bool() if kind == "left" else slice(None)
    assert max_abs(results[0][real], results[1][real]) < 1e-10


# Steps and devices


def test_a_single_query_takes_no_mask(models):
    """A step inside the first chunk is plain; later ones look at the last keys only."""
    model = models[1]
    for make in (DynamicCache, lambda: DynamicCache(config=model.config)):
        for length in (1, 9, 15, 16, 17, 40):
            past = make()
            run(model, input_ids=tokens(2, length), past_key_values=past)
            ones = torch.ones(2, length + 1, dtype=torch.long)
            for given in ({}, {"attention_mask": ones, "position_ids": torch.full((2, 1), length)}):
                masks = masks_of(
                    model.config,
                    torch.empty(2, 1, 0),
                    given.get("attention_mask"),
                    past,
                    given.get("position_ids"),
                )
                assert masks["full_attention"] is None
                mask = masks["chunked_attention"]
                seen = length % CHUNK + 1
                if length < CHUNK:
                    assert mask is None
                elif mask is None:  # a window that has lost what is over
                    assert past.layers[0].get_mask_sizes(1)[0] == seen
                else:
                    assert mask.begun + 1 == seen == mask.key_length - mask.first_key


def test_other_implementations_keep_getting_masks(models):
    _, model = models
    seen = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    interface = llamoe.modeling.attention.forms.ALL_MASK_ATTENTION_FUNCTIONS
    ALL_ATTENTION_FUNCTIONS["ours_alone"] = attend
    interface.register("ours_alone", interface["sdpa"])
    try:
        model.set_attn_implementation("ours_alone")
        given = run(model, input_ids=tokens(2, 40))
    finally:
        model.set_attn_implementation("sdpa")
        del ALL_ATTENTION_FUNCTIONS["ours_alone"], interface._global_mapping["ours_alone"]
    assert [mask is None or mask.shape[-2:] == (40, 40) for mask in seen] == [True] * 3
    assert seen[0] is not None and max_abs(given, run(model, input_ids=tokens(2, 40))) < TOLERANCE


@pytest.mark.parametrize("kind", ["bare", "left"])
def test_what_stands_for_a_mask_goes_where_masks_go(models, kind):
    """To other devices with accelerate's hooks, and through `generate`, which asks for contiguous masks."""
    mask = chunked_mask(models[1], 3, 63, ROWS[kind].get("attention_mask"))
    assert mask.contiguous() is mask
    moved = send_to_device(mask, torch.device("meta"))
    assert type(moved) is type(mask)
    if kind == "left":
        assert moved.place.is_meta and all(batch.key_index.is_meta for batch in moved.batches)


def test_equal_rows_cut():
    # Twenty cached tokens in chunks of sixteen: four have begun the second, of which twelve are left.
    assert cut_equal_rows(20, 50, 0, 70, 16) == EqualRows(16, None, 12, 4, 16, 70)
    # A window that keeps the last fifteen.
    assert cut_equal_rows(20, 50, 5, 65, 16) == EqualRows(16, None, 12, 4, 11, 65)
    # Rows that start at position 20 without a cache: nothing has begun.
    assert cut_equal_rows(20, 50, 20, 50, 16) == EqualRows(16, None, 12, 0, 0, 50)
    assert cut_equal_rows(20, 50, 0, 70, None) == EqualRows(None, None, 50, 20, 0, 70)


# Graphs


@pytest.fixture
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 14),
    reason="dynamo cannot tell compiling from exporting: masks stay",
)
def test_bare_rows_compile_to_few_graphs(forget_compiled_code):
    model = pair(num_hidden_layers=1, no_rope_layers=[1], interleave_moe_layer_step=2)[1].model
    graphs, largest = [], Largest()

    def backend(module, example_inputs):
        graphs.append(module)

        def watched(*args):
            with largest:
                return module(*args)

        return watched

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for length in (29, 41, 360):
        ids = tokens(2, length)
        expected = run(model, input_ids=ids)
        given = run(compiled, input_ids=ids, use_cache=False)
        assert max_abs(given, expected) < TOLERANCE * max(1, expected.std())
    # The first length as it is, then all that are longer than a chunk.
    assert len(graphs) <= 2 and largest.elements < 360 * 360
