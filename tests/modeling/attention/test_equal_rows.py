"""Rows without padding are computed by SDPA in blocks of queries: with the numbers of a mask, but without its memory.

Results are compared with `eager`, which uses masks.
"""

from functools import partial

import pytest
import torch
from accelerate.utils import send_to_device
from support.models import MODELS, make_asymmetric, max_abs, padding_mask, random_ids, run, text_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import llamoe
from llamoe.modeling.attention import MaskInputs, attention_masks, equal_rows
from llamoe.modeling.attention.equal_rows import EqualRows
from llamoe.modeling.attention.forms import attend_in_form
from llamoe.modeling.attention.layer import ALL_ATTENTION_FUNCTIONS
from llamoe.modeling.attention.visibility import Rule

CHUNK = 16
DENSE = next(case for case in MODELS if case.name == "LlamoeDenseForCausalLM")
# Sums are in another order; logits have a standard deviation of about one.
TOLERANCE = 1e-5


def pair(**overrides):
    """Return a model for `eager` and one for `sdpa`, by default with a chunked, a full and a chunked layer."""
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


def masks_of(model, rows, length, past_key_values=None, attention_mask=None, position_ids=None):
    embeds = torch.empty(rows, length, 0)
    return attention_masks(MaskInputs(model.config, embeds, attention_mask, past_key_values, position_ids))


@pytest.mark.parametrize("block", [1, 3, 1024])
@pytest.mark.parametrize("rule", [Rule(), *map(Rule, (1, 4, 7, 100)), *(Rule(None, w) for w in (1, 4, 100))])
def test_blocks_see_what_the_formula_says(rule, block, monkeypatch):
    monkeypatch.setattr(equal_rows, "BLOCK", block)
    monkeypatch.setattr(equal_rows, "SMALLEST_BLOCK", min(block, 5))
    for query_length in (1, 2, 9, 17):
        for first_query in (0, 3, 7, 8, 20):
            for first_key in {0, max(0, first_query - 3), first_query}:
                for unwritten in (0, 5):
                    key_length = first_query + query_length - first_key + unwritten
                    q = torch.arange(query_length)[:, None] + first_query
                    k = torch.arange(key_length) + first_key
                    formula = k <= q
                    if rule.chunk_size:
                        formula &= k // rule.chunk_size == q // rule.chunk_size
                    if rule.window:
                        formula &= k > q - rule.window
                    seen = torch.zeros(query_length, key_length, dtype=torch.bool)
                    rows = EqualRows(rule, first_query, first_key, key_length)
                    for part in rows.blocks(query_length):
                        mask = part.mask(q.device)[0, 0]
                        if part.is_plain:
                            mask = torch.ones_like(mask).tril() if len(mask) > 1 else torch.ones_like(mask)
                        seen[part.queries, part.keys] = mask
                    assert torch.equal(seen, formula)


RESTARTING = torch.cat([torch.arange(n) for n in (5, 37, 1, 20)])[None]
ROWS = {
    "bare": {},
    "ones": {"attention_mask": torch.ones(3, 63, dtype=torch.long)},
    "late": {"position_ids": torch.arange(10, 73)[None]},
    "late_each": {"position_ids": torch.arange(63) + torch.tensor([[3], [16], [30]])},
    "left": {"attention_mask": padding_mask((0, 3, 40), 63)},
    "packed": {"position_ids": RESTARTING},
    # With a mask rows are not packed: a token sees all earlier tokens whose positions are in its chunk.
    "restarting": {"position_ids": RESTARTING, "attention_mask": torch.ones(3, 63, dtype=torch.long)},
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_begin_at_one_position_are_cut_into_blocks(models, kind):
    mask = masks_of(models[1], 3, 63, **ROWS[kind])["chunked_attention"]
    assert type(mask) is (EqualRows if kind in ("bare", "ones", "late") else torch.Tensor)
    if kind == "restarting":
        expected, given = (run(model, input_ids=random_ids(3, 63), **ROWS[kind]) for model in models)
        assert max_abs(given, expected) < TOLERANCE * max(1, expected.std())


def test_a_layer_whose_cached_tokens_are_fewer_is_refused():
    model = pair(num_hidden_layers=2, no_rope_layers=[1, 1], interleave_moe_layer_step=2)[1]
    past, ids = DynamicCache(config=model.config), random_ids(2, 60)
    run(model, input_ids=ids[:, :20], past_key_values=past)
    layer = past.layers[1]
    layer.keys, layer.values = layer.keys[:, :, -4:], layer.values[:, :, -4:]
    with pytest.raises(ValueError, match="past_key_values"):
        model(ids[:, 20:], past_key_values=past, use_cache=False)


def test_dropout_reaches_every_block(models):
    """If all values are one, each output is the sum of the attention weights after dropout, which is one on average."""
    mask = masks_of(models[1], 3, 63)["chunked_attention"]
    query = torch.randn(3, 6, 63, 20, generator=torch.Generator().manual_seed(0))
    key, value, module = query[:, :2], torch.ones(3, 2, 63, 20), models[1].model.layers[0].self_attn
    attend = partial(attend_in_form, ALL_ATTENTION_FUNCTIONS["sdpa"], module, query, key, value, mask, None)
    torch.manual_seed(0)
    outputs = torch.stack([attend(scaling=0.2, dropout=0.25)[0] for _ in range(100)])
    assert abs(outputs.mean() - 1) < 0.015 and (outputs.var(0).mean((0, 2, 3)) > 0.003).all()


class Largest(TorchDispatchMode):
    """Records the largest number of elements in a result of an operation."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for it in result if isinstance(result, tuple | list) else [result]:
            if isinstance(it, torch.Tensor):
                self.elements = max(self.elements, it.untyped_storage().nbytes() // it.element_size())
        return result


@pytest.mark.parametrize("pieces", [(360,), (260, 99, 1)], ids=str)
@pytest.mark.parametrize("kind", ["chunked", "late", "full", "window"])
@torch.no_grad()
def test_long_rows_make_no_mask(kind, pieces, monkeypatch):
    """After cached tokens each block of queries has a mask; a block has 1024 queries, in this test 32."""
    monkeypatch.setattr(equal_rows, "BLOCK", 32)
    if kind in ("chunked", "late"):
        truth, model = pair(num_hidden_layers=1, no_rope_layers=[1], interleave_moe_layer_step=2)
    else:
        window = 18 if kind == "window" else None
        truth, model = (DENSE.make(num_hidden_layers=1, sliding_window=window) for _ in range(2))
    truth.set_attn_implementation("eager")
    ids, results = random_ids(1, 360), []
    for tested in (truth, model):
        past, parts, positions = DynamicCache(config=tested.config), [], torch.arange(360)[None]
        with Largest() as largest:
            for piece, at in zip(ids.split(pieces, 1), positions.split(pieces, 1), strict=True):
                given = {"position_ids": at + 5} if kind == "late" else {}
                parts.append(tested.model(piece, past_key_values=past, **given).last_hidden_state)
        results.append(torch.cat(parts, 1))
        # Queries and keys together have 360 * ((6 + 2) * 20) elements, a mask of all tokens 360 * 360.
        assert (largest.elements <= 360 * 160) == (tested is model) or len(pieces) > 1
    assert max_abs(*results) < TOLERANCE * max(1, results[0].std())


@pytest.mark.parametrize("kind", ["left", "packed"])
def test_float64_rows_equal_eager(kind):
    """The lowest float64, cast to float32, would be minus infinity, and a fully masked row NaN."""
    truth, model = (it.double() for it in pair(attention_chunk_size=5))
    real, positions = padding_mask((0, 3, 13), 20), torch.arange(20).remainder(7)[None]
    given = {"attention_mask": real} if kind == "left" else {"position_ids": positions}
    results = [run(it, input_ids=random_ids(3, 20), **given) for it in (truth, model)]
    assert results[0].isfinite().all()
    real = real.bool() if kind == "left" else slice(None)
    assert max_abs(results[0][real], results[1][real]) < 1e-10


def test_a_single_query_needs_no_mask(models):
    """Within the first chunk it attends to all keys, later to the last keys."""
    model = models[1]
    for make in (DynamicCache, lambda: DynamicCache(config=model.config)):
        for length in (1, 9, 15, 16, 17, 40):
            past = make()
            run(model, input_ids=random_ids(2, length), past_key_values=past)
            ones = torch.ones(2, length + 1, dtype=torch.long)
            for given in ({}, {"attention_mask": ones, "position_ids": torch.full((2, 1), length)}):
                masks = masks_of(model, 2, 1, past, **given)
                assert masks["full_attention"] is None
                mask = masks["chunked_attention"]
                seen = length % CHUNK + 1
                if length < CHUNK:
                    assert mask is None
                elif mask is None:
                    # A window has forgotten the keys that the query does not see.
                    assert past.layers[0].get_mask_sizes(1)[0] == seen
                else:
                    assert mask.blocks(1)[0].keys == slice(mask.key_length - seen, mask.key_length)


def test_other_implementations_get_masks(models):
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
        given = run(model, input_ids=random_ids(2, 40))
    finally:
        model.set_attn_implementation("sdpa")
        del ALL_ATTENTION_FUNCTIONS["ours_alone"], interface._global_mapping["ours_alone"]
    assert [mask is None or mask.shape[-2:] == (40, 40) for mask in seen] == [True] * 3
    assert seen[0] is not None and max_abs(given, run(model, input_ids=random_ids(2, 40))) < TOLERANCE


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_masks_are_made_only_for_types_that_layers_have(given):
    truth, model = pair(num_hidden_layers=1, no_rope_layers=[1], interleave_moe_layer_step=2)
    ids, mask = random_ids(2, 40), padding_mask((3, 0), 40)
    expected = run(truth, input_ids=ids, attention_mask=mask)
    masks = masks_of(model, 2, 40, None, mask)
    assert list(masks) == ["chunked_attention"]
    positions = (mask.cumsum(1) - 1).clamp(min=0) if given else None
    seen = run(model, input_ids=ids, attention_mask=masks if given else mask, position_ids=positions)
    assert max_abs(seen[mask.bool()], expected[mask.bool()]) < TOLERANCE * max(1, expected.std())


def test_equal_rows_can_be_passed_like_masks(models):
    """accelerate's hooks send them to other devices, and `generate` calls `contiguous` on them."""
    rows = masks_of(models[1], 3, 63)["chunked_attention"]
    assert rows.contiguous() is rows
    assert send_to_device(rows, torch.device("meta")).blocks(63) == rows.blocks(63)
