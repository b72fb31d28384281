"""The same tokens give the same logits in a left-padded batch, in a packed row, with a cache and by themselves.

Results are compared with each row by itself, without padding and cache. transformers' Llama 4 fails some of these
tests: its temperature follows the cache's length (see `test_stock_differs_where_it_is_wrong`).
"""

import pytest
import torch
from support.models import (
    draw,
    make_asymmetric,
    max_abs,
    random_ids,
    run,
    scaled_rope,
    stock_dense_config,
    stock_text_config,
    text_config,
)
from transformers import DynamicCache, Llama4ForCausalLM, StaticCache

import llamoe
from llamoe.modeling.attention import MaskInputs
from llamoe.modeling.attention.visibility import RULES

# `attention_chunk_size` of the small config; `floor_scale` is 8.
CHUNK = 16
# Sums are in another order, since batches have other sizes.
TOLERANCE = 2e-5


def text_model(**overrides):
    return draw(llamoe.LlamoeForCausalLM, llamoe.from_stock(stock_text_config(**overrides)))


def dense_model(**overrides):
    return draw(llamoe.LlamoeDenseForCausalLM, llamoe.from_stock(stock_dense_config(**overrides)))


@torch.no_grad()
def test_stock_differs_where_it_is_wrong():
    # If this fails, transformers has corrected its temperature: then remove the sentence about it from the README.
    stock, ids = make_asymmetric(Llama4ForCausalLM(stock_text_config())), random_ids(1, 5)
    padded = torch.nn.functional.pad(ids, (45, 0))
    in_batch = stock(padded, attention_mask=(padded != 0).long()).logits[:, 45:]
    assert max_abs(in_batch, stock(ids).logits) > 1e-3


# A config with chunks in every layer.
SMALL = dict(num_hidden_layers=2, no_rope_layers=[1, 1], layer_types=["chunked_attention"] * 2)


@pytest.mark.parametrize("begin", [0, 1], ids=["all tokens", "real tokens from 1"])
def test_other_positions_after_padding_are_refused(begin):
    """Positions say which chunks cached tokens are in only if they count real tokens from zero, as in `generate`."""
    model, past = text_model(**SMALL, attention_chunk_size=4), DynamicCache()
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 5] = 0
    positions = torch.arange(12).expand(2, -1) if begin == 0 else mask.cumsum(1)
    first = {"attention_mask": mask[:, :6], "position_ids": positions[:, :6]}
    run(model, input_ids=ids[:, :6], **first, past_key_values=past)
    with pytest.raises(ValueError, match=r"position_ids .*cumsum"):
        model(ids[:, 6:], attention_mask=mask, position_ids=positions[:, 6:], past_key_values=past)


def test_positions_on_another_device_are_not_read():
    """Reading would wait for a GPU. Here tensors are on the meta device, where reading is an error."""
    mask = torch.ones(2, 9, dtype=torch.bool, device="meta")
    positions = torch.zeros(2, 3, dtype=torch.long, device="meta")
    past = DynamicCache()
    past.update(*[torch.zeros(2, 2, 6, 20, device="meta")] * 2, 0)
    inputs = MaskInputs(text_config(), torch.zeros(2, 3, 0, device="meta"), mask, past, positions)
    assert inputs.positions_at(torch.arange(9, device="meta")).shape == (2, 9)


@pytest.mark.parametrize(("cache", "implementation"), [("windows", "eager"), ("static", "sdpa")])
def test_windows_that_lost_tokens_are_refused(cache, implementation):
    """Tokens 10 to 24 are padding: the chunk that began before them continues after them."""
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
    # After 12 tokens the window has not lost any token of the chunk.
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
def test_positions_of_padding_do_not_decide_frequencies(make, rope):
    """These types of scaling depend on the highest position of a forward, here on whether it exceeds 32."""
    tokens = random_ids(1, 20)
    expected = make(**scaled_rope(rope))(tokens, use_cache=False).logits[0]
    ids, mask = torch.zeros(2, 50, dtype=torch.long), torch.zeros(2, 50, dtype=torch.long)
    ids[0, :20], mask[0, :20] = tokens[0], 1
    ids[1, 30:], mask[1, 30:] = tokens[0], 1
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1000)
    for given in (None, positions):
        model = make(**scaled_rope(rope))
        logits = run(model, input_ids=ids, attention_mask=mask, position_ids=given, use_cache=False)
        for of_row, its_mask in zip(logits, mask, strict=True):
            assert max_abs(of_row[its_mask == 1], expected) < TOLERANCE


@torch.no_grad()
def test_negative_positions_under_a_mask_of_four_axes():
    """Such a mask does not say which tokens are padding; visible tokens must have numbers all the same."""
    model, ids = text_model(), random_ids(1, 37)
    padded = torch.nn.functional.pad(ids, (4, 0))
    index = torch.arange(41)
    visible = (index <= index[:, None]) & (index >= 4)
    visible |= torch.eye(41, dtype=torch.bool)
    same_chunk = ((index - 4) // CHUNK)[:, None] == (index - 4) // CHUNK
    masks = {"full_attention": visible, "chunked_attention": visible & same_chunk}
    masks = {name: mask[None, None] for name, mask in masks.items()}
    logits = run(model, input_ids=padded, attention_mask=masks, position_ids=(index - 4)[None])
    assert max_abs(logits[:, 4:], run(model, input_ids=ids, use_cache=False)) < TOLERANCE


def test_every_layer_type_has_a_rule():
    assert set(RULES) == {"full_attention", "chunked_attention", "sliding_attention"}
