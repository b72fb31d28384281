"""The mixture decoder against transformers' Llama 4 text model.

A stock folder, loaded by path, gives stock's logits, router logits, gradients and generated tokens.
"""

import functools

import pytest
import torch
from support.models import (
    ROPES,
    check_bfloat16_errors,
    check_choices,
    choices,
    deviation_in_range,
    gradient_differences,
    load_whole,
    max_abs,
    mixtures,
    record_calls,
    scaled_rope,
    stock_model,
    stock_text_config,
)
from transformers import Llama4ForCausalLM

from llamoe import LlamoeForCausalLM, LlamoeTextModel
from llamoe.modeling.moe.stores import Experts

NAME, STOCK = "LlamoeForCausalLM", "Llama4ForCausalLM"
BACKENDS = ["llamoe", "eager", "grouped_mm", "batched_mm"]
# More than three attention chunks of 16 tokens, and six steps of the temperature (floor_scale is 8).
LENGTH = 53

SCOUT_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=16.0,
    original_max_position_embeddings=64,
    low_freq_factor=1.0,
    high_freq_factor=1.0,
)
# Unless said otherwise: five layers, the second and fourth are mixtures, the fourth is free of positions.
KINDS = {
    "moe-every-second": dict(),
    "moe-every": dict(interleave_moe_layer_step=1),
    "moe-listed": dict(moe_layers=[0, 3]),
    "moe-none": dict(moe_layers=[]),
    "top-2": dict(num_experts_per_tok=2),
    "top-2-every": dict(num_experts_per_tok=2, interleave_moe_layer_step=1),
    "no-qk-norm": dict(use_qk_norm=False),
    "no-qk-norm-every": dict(use_qk_norm=False, interleave_moe_layer_step=1),
    "no-tuning": dict(attn_temperature_tuning=False),
    "strong-tuning": dict(floor_scale=3, attn_scale=0.5),
    "no-rope-listed": dict(no_rope_layers=[0, 1, 1, 0, 1]),
    "rope-everywhere": dict(no_rope_layers=[1] * 5),
    "no-chunks": dict(layer_types=["full_attention"] * 5),
    "chunks-mixed": dict(layer_types=["full_attention", *["chunked_attention"] * 3, "full_attention"]),
    "scout": dict(interleave_moe_layer_step=1, rope_parameters=SCOUT_ROPE),
    "biases": dict(attention_bias=True),
    "mha": dict(num_key_value_heads=6),
    "mqa": dict(num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True),
}


def ids(length=LENGTH, rows=2):
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(1))


def pair(folder, attention="sdpa", ours_only=None, **overrides):
    """Stock with asymmetric weights, and ours read from its folder."""
    stock = stock_model(Llama4ForCausalLM, stock_text_config(attn_implementation=attention, **overrides))
    stock.save_pretrained(folder)
    ours = load_whole(LlamoeForCausalLM, folder, attn_implementation=attention, **(ours_only or {}))
    return stock, ours


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_states_and_routing(kind, attention, tmp_path, record_parity):
    stock, ours = pair(tmp_path, attention, **KINDS[kind])
    routers = record_calls({i: block.router for i, block in mixtures(stock).items()})
    wanted = dict(output_hidden_states=True, output_attentions=attention == "eager")
    expected, given = stock(ids(), **wanted), ours(ids(), output_router_logits=True, **wanted)
    assert deviation_in_range(expected.logits)
    difference = max_abs(given.logits, expected.logits)
    record_parity(NAME, STOCK, "float32", difference, "logits")
    assert difference <= 1e-4
    assert len(given.hidden_states) == len(expected.hidden_states) == 6
    for mine, its in zip(given.hidden_states, expected.hidden_states, strict=True):
        assert max_abs(mine, its) <= 1e-4  # values of a deviation of about 1 to 3
    if attention == "eager":
        assert len(given.attentions) == len(expected.attentions) == 5
        for mine, its in zip(given.attentions, expected.attentions, strict=True):
            assert mine.shape == its.shape and max_abs(mine, its) <= 1e-5  # at most 1

    assert list(routers) == ours.config.moe_layers
    for mine, (_, (_, its)) in zip(given.router_logits or (), routers.values(), strict=True):
        difference = max_abs(mine, its)
        record_parity(NAME, STOCK, "float32", difference, "router logits")
        assert difference <= 1e-4
        assert torch.equal(*(choices(x, ours.config.num_experts_per_tok) for x in (mine, its)))


@torch.no_grad()
@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling(name, tmp_path, record_parity):
    stock, ours = pair(tmp_path, **scaled_rope(name))
    for length in (20, LENGTH):  # without and with the scaling of those that go by the length
        difference = max_abs(ours(ids(length)).logits, stock(ids(length)).logits)
        record_parity(NAME, STOCK, "float32", difference, "logits, scaled rope")
        assert difference <= 1e-4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "kind",
    ["moe-every-second", "moe-every", "moe-none", "top-2-every", "no-qk-norm", "scout", "biases", "tied"],
)
def test_loss_and_gradients(kind, attention, tmp_path, record_parity):
    stock, ours = pair(tmp_path, attention, **KINDS[kind])
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
    check_gradients(ours, stock, record_parity)


def check_gradients(ours, stock, record_parity):
    differences = gradient_differences(ours, stock)
    absolute, relative = (max(values) for values in zip(*differences.values(), strict=True))
    record_parity(NAME, STOCK, "float32", absolute, "gradients")
    record_parity(NAME, STOCK, "float32", relative, "gradients, relative to each parameter's largest")
    # About 1e-6 as a rule: sums over all tokens in another order, through five layers.
    assert relative <= 2e-5, max(differences.items(), key=lambda item: item[1][1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_experts_without_tokens(backend, tmp_path, record_parity):
    options = dict(experts_implementation=backend)
    stock, ours = pair(tmp_path, interleave_moe_layer_step=1, ours_only=options)
    routers = record_calls({i: block.router for i, block in mixtures(stock).items()})
    for model in (stock, ours):
        logits = model(ids(3, rows=1)).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    check_gradients(ours, stock, record_parity)
    for i, (_, (_, logits)) in routers.items():
        idle = sorted(set(range(5)) - set(logits.argmax(-1).tolist()))
        assert len(idle) >= 2  # three tokens at most hit three of five
        for parameter in mixtures(ours)[i].experts.parameters():
            assert parameter.grad[idle].abs().max() == 0
            assert parameter.grad.abs().amax((1, 2)).count_nonzero() == 5 - len(idle)


@pytest.fixture(scope="module")
def stock_of_width(tmp_path_factory):
    """Gives for a width of the experts the folder of a stock model, and its logits."""

    @functools.cache
    def make(width):
        folder = tmp_path_factory.mktemp("stock")
        sizes = dict(intermediate_size=width, interleave_moe_layer_step=1, num_experts_per_tok=2)
        stock = stock_model(Llama4ForCausalLM, stock_text_config(attn_implementation="sdpa", **sizes))
        stock.save_pretrained(folder)
        with torch.no_grad():
            return folder, stock(ids()).logits

    return make


@torch.no_grad()
@pytest.mark.parametrize("how", ["at-load", "set"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "fits"), [(52, True), (51, False)], ids=["aligned", "odd"])
def test_experts_backends(width, fits, backend, how, stock_of_width, monkeypatch):
    # Rows of 51 floats are no multiple of 16 bytes: `grouped_mm` then runs the loop over experts.
    folder, expected = stock_of_width(width)
    at_load = backend if how == "at-load" else "eager"
    ours = load_whole(LlamoeForCausalLM, folder, experts_implementation=at_load, attn_implementation="sdpa")
    if how == "set":
        ours.set_experts_implementation(backend)
    assert ours.config._experts_implementation == backend
    assert all(block.experts.fits_grouped_mm() is fits for block in mixtures(ours).values())
    loops = []
    loop = Experts.loop_over_experts
    monkeypatch.setattr(Experts, "loop_over_experts", lambda *args: loops.append(1) or loop(*args))
    assert max_abs(ours(ids()).logits, expected) <= 1e-4
    assert len(loops) == (5 if backend == "eager" or (backend == "grouped_mm" and not fits) else 0)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("kind", "width"),
    [("moe-every-second", 52), ("scout", 56), ("top-2-every", 56), ("no-qk-norm-every", 52)],
)
def test_bfloat16(kind, width, attention, tmp_path, record_parity):
    config = stock_text_config(attn_implementation=attention, intermediate_size=width, **KINDS[kind])
    reference_model = stock_model(Llama4ForCausalLM, config, exact_in_bfloat16=True)
    reference_model.save_pretrained(tmp_path)
    options = dict(attn_implementation=attention, dtype=torch.bfloat16)
    stock = load_whole(Llama4ForCausalLM, tmp_path, **options)
    calls = record_calls(mixtures(stock))
    reference, expected = reference_model(ids()).logits, stock(ids()).logits
    assert deviation_in_range(reference)
    for backend in BACKENDS:
        ours = load_whole(LlamoeForCausalLM, tmp_path, experts_implementation=backend, **options)
        # In bfloat16 rows of 52 are no multiple of 16 bytes, those of 56 are.
        assert all(block.experts.fits_grouped_mm() is (width == 56) for block in mixtures(ours).values())
        given = ours(ids(), output_router_logits=True)
        check_bfloat16_errors(given.logits, expected, reference, (NAME, STOCK), record_parity)
        check_blocks(mixtures(ours), calls, config.num_experts_per_tok)
        check_choices(
            given.router_logits, [its for _, (_, its) in calls.values()], config.num_experts_per_tok
        )


def check_blocks(blocks, calls, top_k):
    """The very same bfloat16 input: the same choice, and as a rule the same bits of the output."""
    assert blocks.keys() == calls.keys()
    for i, (hidden_states, (its_output, its_logits)) in calls.items():
        tokens = hidden_states.flatten(0, 1)
        logits, _, chosen = blocks[i].router(tokens)
        assert torch.equal(logits, its_logits)
        assert torch.equal(chosen.sort(-1).values, choices(its_logits, top_k))
        shared = blocks[i].shared_expert(tokens).float()
        # One unit in the last place of each of the two terms: bfloat16's neighbours are 2**-8 to 2**-7 apart.
        allowed = 2**-7 * (shared.abs() + (its_output - shared).abs())
        assert ((blocks[i](tokens) - its_output).abs() <= allowed).all()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tuning", [False, True], ids=["no-tuning", "tuning"])
def test_padding(tuning, side, attention, tmp_path):
    stock, ours = pair(tmp_path, attention, attn_temperature_tuning=tuning, interleave_moe_layer_step=1)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :5], mask[2, :21] = 0, 0  # 21 is more than a chunk
    mask = mask if side == "left" else mask.flip(-1)
    given = ours(ids(rows=3), attention_mask=mask).logits
    if tuning and side == "left":
        # Stock's temperature counts the padding, so the truth is each row alone.
        expected = torch.zeros_like(given)
        for i, row in enumerate(ids(rows=3)):
            expected[i, mask[i].bool()] = stock(row[mask[i].bool()][None]).logits[0]
    else:
        expected = stock(ids(rows=3), attention_mask=mask).logits
    assert max_abs(given[mask.bool()], expected[mask.bool()]) <= 1e-4


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", ["moe-every-second", "scout", "top-2", "no-qk-norm", "no-rope-listed", "no-chunks"]
)
def test_greedy_generation(kind, tmp_path):
    # Chunks of 7: the prompt ends in the third, and decoding from 19 to 33 tokens crosses the borders at 21 and 28.
    stock, ours = pair(tmp_path, attention_chunk_size=7, floor_scale=4, **KINDS[kind])
    options = dict(max_new_tokens=14, min_new_tokens=14, do_sample=False)
    options |= dict(return_dict_in_generate=True, output_logits=True)
    # One reference for both caches.
    expected = stock.generate(ids(19), **options)
    for cache in (None, "static"):
        given = ours.generate(ids(19), cache_implementation=cache, disable_compile=True, **options)
        assert given.sequences.tolist() == expected.sequences.tolist()
        for mine, its in zip(given.logits, expected.logits, strict=True):
            assert max_abs(mine, its) <= 1e-4


@torch.no_grad()
def test_base_model_reads_the_folder_of_the_model_with_a_head(tmp_path):
    stock, _ = pair(tmp_path)
    base, info = LlamoeTextModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info.pop("unexpected_keys") == {"lm_head.weight"} and not any(info.values())
    assert max_abs(base(ids()).last_hidden_state, stock.model(ids()).last_hidden_state) <= 1e-4
