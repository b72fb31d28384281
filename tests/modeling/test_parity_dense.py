"""LLaMA 1 and 2 against transformers' Llama: a stock folder, loaded by path, gives stock's logits and gradients."""

import pytest
import torch
from support.models import (
    ROPES,
    check_bfloat16_errors,
    deviation_in_range,
    gradient_differences,
    load_whole,
    max_abs,
    scaled_rope,
    stock_dense_config,
    stock_model,
)
from transformers import LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llamoe import LlamoeDenseForCausalLM, LlamoeDenseModel

NAME, STOCK = "LlamoeDenseForCausalLM", "LlamaForCausalLM"
LENGTH = 50

# Everywhere 6 * 20 channels of the heads are not the 72 of the residual stream, unless the head follows from it.
ARCHITECTURES = {
    "gqa": dict(),
    "mha": dict(num_key_value_heads=6),
    "mqa": dict(num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "head_dim-derived": dict(head_dim=None, num_key_value_heads=3),
    "gelu-large-eps": dict(hidden_act="gelu", rms_norm_eps=0.05),
}


def test_every_scaling_type_of_transformers_is_tried():
    tried = {ROPES[name].get("rope_type", name) for name in ROPES}
    # "default" is not in the table: it is the type without scaling.
    assert tried == {*ROPE_INIT_FUNCTIONS, "default"}


def ids(length=LENGTH, rows=2):
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(1))


def pair(folder, attention="sdpa", **overrides):
    """Stock with asymmetric weights, and ours read from its folder."""
    config = stock_dense_config(attn_implementation=attention, **overrides)
    stock = stock_model(LlamaForCausalLM, config)
    stock.save_pretrained(folder)
    return stock, load_whole(LlamoeDenseForCausalLM, folder, attn_implementation=attention)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_states_and_weights_of_attention(kind, attention, tmp_path, record_parity):
    stock, ours = pair(tmp_path, attention, **ARCHITECTURES[kind])
    wanted = dict(output_hidden_states=True, output_attentions=attention == "eager")
    expected, given = stock(ids(), **wanted), ours(ids(), **wanted)
    assert deviation_in_range(expected.logits)
    difference = max_abs(given.logits, expected.logits)
    record_parity(NAME, STOCK, "float32", difference, "logits")
    assert difference <= 1e-4
    assert len(given.hidden_states) == len(expected.hidden_states) == 4
    for mine, its in zip(given.hidden_states, expected.hidden_states, strict=True):
        assert max_abs(mine, its) <= 1e-4  # values of a deviation of about 1 to 3
    if attention == "eager":
        assert len(given.attentions) == len(expected.attentions) == 3
        for mine, its in zip(given.attentions, expected.attentions, strict=True):
            assert mine.shape == its.shape and max_abs(mine, its) <= 1e-5  # at most 1


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling(name, attention, tmp_path, record_parity):
    stock, ours = pair(tmp_path, attention, **scaled_rope(name))
    unscaled = 10000.0 ** (-torch.arange(10) / 10)  # of 20 channels
    # Twice the short pass: `dynamic` and `longrope` keep frequencies of the pass before, and have to return.
    frequencies = []
    for length in (20, LENGTH, 20):
        expected, given = stock(ids(length)).logits, ours(ids(length)).logits
        assert deviation_in_range(expected)
        difference = max_abs(given, expected)
        record_parity(NAME, STOCK, "float32", difference, "logits, scaled rope")
        assert difference <= 1e-4
        frequencies.append(stock.model.rotary_emb.inv_freq.clone())
    assert max_abs(frequencies[1], unscaled) > 1e-3, "these parameters scale nothing"
    if name in ("dynamic", "longrope"):
        assert max_abs(frequencies[0], frequencies[1]) > 1e-3, "both passes are of one kind"
        assert max_abs(frequencies[0], frequencies[2]) == 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gqa", "mha", "mqa", "tied", "biases", "yarn", "llama3"])
def test_loss_and_gradients(kind, attention, tmp_path, record_parity):
    stock, ours = pair(
        tmp_path, attention, **(ARCHITECTURES[kind] if kind in ARCHITECTURES else scaled_rope(kind))
    )
    labels = ids().clone()
    labels[0, :20] = -100
    means, shares = [], []
    for model in (stock, ours):
        means.append(model(ids(), labels=labels).loss.item())
        # Divided by a count that is not this batch's, as trainers do that accumulate gradients.
        shares.append(model(ids(), labels=labels, num_items_in_batch=131).loss)
        shares[-1].backward()
    assert means[1] == pytest.approx(means[0], abs=1e-5)
    assert shares[1].item() == pytest.approx(shares[0].item(), abs=1e-5)
    num_targets = int((labels[:, 1:] != -100).sum())
    assert shares[1].item() == pytest.approx(means[1] * num_targets / 131, rel=1e-4)
    differences = gradient_differences(ours, stock)
    absolute, relative = (max(values) for values in zip(*differences.values(), strict=True))
    record_parity(NAME, STOCK, "float32", absolute, "gradients")
    record_parity(NAME, STOCK, "float32", relative, "gradients, relative to each parameter's largest")
    assert relative <= 2e-5, max(differences.items(), key=lambda item: item[1][1])


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gqa", "mha", "mqa", "tied", "biases", "llama3", "longrope"])
def test_bfloat16(kind, attention, tmp_path, record_parity):
    overrides = ARCHITECTURES[kind] if kind in ARCHITECTURES else scaled_rope(kind)
    config = stock_dense_config(attn_implementation=attention, **overrides)
    reference_model = stock_model(LlamaForCausalLM, config, exact_in_bfloat16=True)
    reference_model.save_pretrained(tmp_path)
    options = dict(attn_implementation=attention, dtype=torch.bfloat16)
    ours = load_whole(LlamoeDenseForCausalLM, tmp_path, **options)
    stock = load_whole(LlamaForCausalLM, tmp_path, **options)
    reference = reference_model(ids()).logits
    assert deviation_in_range(reference)
    check_bfloat16_errors(ours(ids()).logits, stock(ids()).logits, reference, (NAME, STOCK), record_parity)


@torch.no_grad()
def test_base_model_reads_the_folder_of_the_model_with_a_head(tmp_path):
    stock, _ = pair(tmp_path)
    base, info = LlamoeDenseModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info.pop("unexpected_keys") == {"lm_head.weight"} and not any(info.values())
    expected = stock.model(ids()).last_hidden_state
    assert max_abs(base(ids()).last_hidden_state, expected) <= 1e-4


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side, tmp_path):
    stock, ours = pair(tmp_path)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :17] = 0
    mask = mask if side == "left" else mask.flip(-1)
    # Stock numbers padding too; a common offset of all positions of a row changes no score.
    expected, given = stock(ids(), attention_mask=mask).logits, ours(ids(), attention_mask=mask).logits
    assert max_abs(given[mask.bool()], expected[mask.bool()]) <= 1e-4


@torch.no_grad()
@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_generation(cache, tmp_path):
    stock, ours = pair(tmp_path)
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, disable_compile=True)
    options |= dict(cache_implementation=cache)
    expected, given = (model.generate(ids(20), **options) for model in (stock, ours))
    assert given.tolist() == expected.tolist()
