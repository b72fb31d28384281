"""Left-padded, packed, cached and single runs of the same tokens give the same logits.

The truth is each row by itself, without padding and without a cache: transformers' own Llama 4 fails some of these
(its temperature follows the cache's length; see `test_stock_differs_where_it_is_wrong`).
"""

import functools
import itertools
import random

import pytest
import torch
from support.models import (
    draw,
    make_asymmetric,
    max_abs,
    run,
    scaled_rope,
    stock_dense_config,
    stock_text_config,
    text_config,
)
from transformers import DynamicCache, Llama4ForCausalLM, StaticCache

import llamoe
from llamoe.configuration.decoder import LAYER_TYPES
from llamoe.modeling.attention import MaskInputs
from llamoe.modeling.attention.visibility import RULES

CHUNK = 16  # attention_chunk_size of the tiny config; floor_scale is 8
LENGTHS = (5, 37, 50)  # one chunk, a chunk border inside, several borders
# Sums in another order: the same tokens are multiplied in batches of other sizes.
TOLERANCE = 2e-5


def text_model(attention="sdpa", **overrides):
    model = draw(llamoe.LlamoeForCausalLM, llamoe.from_stock(stock_text_config(**overrides)))
    model.set_attn_implementation(attention)
    return model


def dense_model(attention="sdpa", **overrides):
    model = draw(llamoe.LlamoeDenseForCausalLM, llamoe.from_stock(stock_dense_config(**overrides)))
    model.set_attn_implementation(attention)
    return model


def rows():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (1, length), generator=generator) for length in LENGTHS]


@torch.no_grad()
def alone(model, row):
    return model(row, use_cache=False).logits[0]


def padded(side):
    width = max(LENGTHS)
    ids, mask = torch.zeros(len(LENGTHS), width, dtype=torch.long), torch.zeros(len(LENGTHS), width)
    for i, row in enumerate(rows()):
        place = slice(width - row.shape[1], None) if side == "left" else slice(0, row.shape[1])
        ids[i, place], mask[i, place] = row[0], 1
    return ids, mask.long()


@torch.no_grad()
def test_stock_differs_where_it_is_wrong():
    # If transformers mends its temperature, this fails and the claim in the README goes.
    stock = make_asymmetric(Llama4ForCausalLM(stock_text_config()))
    ids, mask = padded("left")
    row = rows()[0]
    in_batch = stock(ids, attention_mask=mask).logits[0][mask[0].bool()]
    assert max_abs(in_batch, stock(row).logits[0]) > 1e-3


SMALL = dict(num_hidden_layers=2, no_rope_layers=[1, 1], layer_types=["chunked_attention"] * 2)


@functools.cache
def model_of_small_chunks(implementation, chunk_size):
    return text_model(implementation, **SMALL, attention_chunk_size=chunk_size)


def mask_with_holes(chance, num_rows, length):
    mask = torch.ones(num_rows, length, dtype=torch.long)
    for row in mask:
        row[: chance.choice([0, 0, 1, 4])] = 0
        for _ in range(chance.choice([0, 1, 2])):
            begin = chance.randrange(6, length)
            row[begin : begin + chance.choice([1, 2, 3, 9])] = 0
    mask[:, -1] = 1
    return mask


def in_pieces(model, inputs, past, borders):
    pieces = []
    for begin, end in itertools.pairwise(borders):
        piece = {name: tensor[:, begin:end] for name, tensor in inputs.items()}
        piece["attention_mask"] = inputs["attention_mask"][:, :end]
        pieces.append(run(model, **piece, past_key_values=past))
    return torch.cat(pieces, 1)


@torch.no_grad()
@pytest.mark.parametrize(("cache", "implementation"), [("dynamic", "eager"), ("static", "sdpa")])
def test_padding_in_the_middle_of_cached_rows(implementation, cache):
    """Fed in pieces, of cached tokens only the mask is known. One pass, which sees all positions, is the truth."""
    chance = random.Random(cache)
    compared = refused = 0
    for chunk_size in (3, 5):
        model = model_of_small_chunks(implementation, chunk_size)
        for _ in range(8):
            length = chance.randint(15, 26)
            mask = mask_with_holes(chance, 3, length)
            ids = torch.randint(3, 90, mask.shape, generator=torch.Generator().manual_seed(length))
            # Those of hidden tokens tell nothing, not even how the others are counted.
            positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, chance.choice([0, 1, 50]))
            inputs = dict(input_ids=ids, attention_mask=mask, position_ids=positions)
            past = DynamicCache() if cache == "dynamic" else StaticCache(model.config, max_cache_len=length)
            borders = [0, *sorted(chance.sample(range(1, length), chance.randint(1, 3))), length]
            try:
                given = in_pieces(model, inputs, past, borders)
            except ValueError as error:
                # Windows of a chunk may have lost what goes on behind padding.
                if cache == "dynamic" or "forgotten tokens" not in str(error):
                    raise
                refused += 1
                continue
            compared += 1
            expected = run(model, **inputs, use_cache=False)
            assert max_abs(given[mask == 1], expected[mask == 1]) < TOLERANCE
    assert compared > 4, (compared, refused)


@pytest.mark.parametrize("begin", [0, 1], ids=["all tokens", "real tokens from 1"])
def test_other_numbers_behind_padding_are_refused(begin):
    """Only real tokens from zero, as `generate` counts them, tell where the cached ones stand."""
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(6))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 5] = 0
    positions = torch.arange(12).expand(2, -1) if begin == 0 else mask.cumsum(1)
    inputs = dict(input_ids=ids, attention_mask=mask, position_ids=positions)
    with pytest.raises(ValueError, match=r"position_ids .*cumsum"):
        in_pieces(text_model(**SMALL, attention_chunk_size=4), inputs, DynamicCache(), [0, 6, 12])


def test_nobody_waits_for_positions_on_another_device():
    """Tensors without values cannot be read; a GPU's must not be."""
    mask = torch.ones(2, 9, dtype=torch.bool, device="meta")
    positions = torch.zeros(2, 3, dtype=torch.long, device="meta")
    past = DynamicCache()
    past.update(*[torch.zeros(2, 2, 6, 20, device="meta")] * 2, 0)
    inputs = MaskInputs(text_config(), torch.zeros(2, 3, 0, device="meta"), mask, past, positions)
    assert inputs.positions_at(torch.arange(9, device="meta")).shape == (2, 9)


@pytest.mark.parametrize(("cache", "implementation"), [("windows", "eager"), ("static", "sdpa")])
def test_windows_that_lost_tokens_are_refused(cache, implementation):
    """Tokens 10 to 24 are padding: the chunk that began before them goes on behind them."""
    config = text_config()
    model = make_asymmetric(llamoe.LlamoeForCausalLM(config))
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, 10:25] = 0
    positions = mask.cumsum(1) - 1
    expected = run(model, input_ids=ids[:, mask[0] == 1])[0, 10:]

    def continued(past, begin):
        first = dict(
            input_ids=ids[:, :begin], attention_mask=mask[:, :begin], position_ids=positions[:, :begin]
        )
        run(model, **first, past_key_values=past)
        rest = dict(input_ids=ids[:, begin:], attention_mask=mask, position_ids=positions[:, begin:])
        return run(model, **rest, past_key_values=past)[0, 25 - begin :]

    assert max_abs(continued(DynamicCache(), 22), expected) < 1e-5 * expected.std()
    make = {
        "windows": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config=config, max_cache_len=48),
    }[cache]
    with pytest.raises(ValueError, match=r"forgotten tokens that may still be needed.*DynamicCache\(\)"):
        continued(make(), 22)
    # Nothing was lost yet: the window still begins within the first tokens.
    assert max_abs(continued(make(), 12), expected) < 1e-5 * expected.std()


def test_packed_rows_in_static_caches_are_refused():
    for model in (text_model(), dense_model()):
        ids = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(5))
        positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
        past = StaticCache(config=model.config, max_cache_len=40)
        with pytest.raises(ValueError, match="position_ids"):
            model(ids, position_ids=positions, past_key_values=past)


@torch.no_grad()
@pytest.mark.parametrize(("rope", "make"), [("dynamic", text_model), ("longrope", dense_model)])
def test_padding_chooses_no_frequencies(make, rope):
    """In these types of scaling the highest position of a pass decides, at 32 here; it must not be the padding's."""
    row = rows()[2][:, :20]
    expected = make(**scaled_rope(rope))(row, use_cache=False).logits[0]
    ids, mask = torch.zeros(2, 50, dtype=torch.long), torch.zeros(2, 50, dtype=torch.long)
    ids[0, :20], mask[0, :20] = row[0], 1
    ids[1, 30:], mask[1, 30:] = row[0], 1
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1000)
    for given in (None, positions):
        model = make(**scaled_rope(rope))
        logits = run(model, input_ids=ids, attention_mask=mask, position_ids=given, use_cache=False)
        for of_row, its_mask in zip(logits, mask, strict=True):
            assert max_abs(of_row[its_mask == 1], expected) < TOLERANCE


@torch.no_grad()
def test_negative_positions_under_a_mask_of_four_axes():
    """What such a mask hides is not looked for; a number comes out for what is seen."""
    model, row = text_model(), rows()[1]
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), row], 1)
    index = torch.arange(41)
    visible = (index <= index[:, None]) & (index >= 4)
    visible |= torch.eye(41, dtype=torch.bool)
    same_chunk = ((index - 4) // CHUNK)[:, None] == (index - 4) // CHUNK
    masks = {"full_attention": visible, "chunked_attention": visible & same_chunk}
    masks = {name: mask[None, None] for name, mask in masks.items()}
    logits = run(model, input_ids=padded, attention_mask=masks, position_ids=(index - 4)[None])
    assert max_abs(logits[0, 4:], alone(model, row)) < TOLERANCE


def test_every_layer_type_has_a_rule():
    assert set(LAYER_TYPES) == set(RULES)
