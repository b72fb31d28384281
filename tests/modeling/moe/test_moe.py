"""The mixture by itself: against transformers' block, its backends against each other, and its training options."""

import math

import pytest
import torch
from support.mixtures import SIZES
from support.models import make_asymmetric, max_abs, stock_text_config
from torch.nn import functional as F
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

import llamoe
from llamoe.modeling.moe.experts import Experts
from llamoe.modeling.moe.layer import MixtureOfExperts


def blocks(backend="eager", dtype=torch.float32, sizes="aligned", **overrides):
    stock_config = stock_text_config(**SIZES[sizes], **overrides)
    stock = make_asymmetric(Llama4TextMoe(stock_config)).to(dtype)
    config = llamoe.from_stock(stock_config)
    config._experts_implementation = backend
    ours = MixtureOfExperts(config).to(dtype).eval()
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def tokens(num_tokens, hidden_size, dtype=torch.float32):
    return torch.randn(num_tokens, hidden_size, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("backend", ["llamoe", "eager", "grouped_mm"])
@pytest.mark.parametrize("num_rows", [0, 1])
def test_every_expert_stays_in_the_graph(backend, num_rows):
    _, ours = blocks(backend)
    ours(tokens(num_rows, 64)).sum().backward()
    for name, parameter in ours.experts.named_parameters():
        assert parameter.grad is not None, name


def training_block(**options):
    config = llamoe.from_stock(stock_text_config(**SIZES["aligned"]))
    for name, value in options.items():
        setattr(config, name, value)
    config._experts_implementation = "eager"
    return make_asymmetric(MixtureOfExperts(config)).train()


@torch.no_grad()
@pytest.mark.parametrize("option", [dict(router_jitter_noise=0.3), dict(router_dropout=0.5)], ids=str)
def test_noise_acts_in_training_only(option):
    x = tokens(30, 64)
    plain, noisy = training_block(), training_block(**option)
    assert max_abs(noisy.eval()(x), plain(x)) == 0
    assert max_abs(noisy.train()(x), plain(x)) > 0


@torch.no_grad()
def test_jitter_touches_the_routers_input_only():
    # With every expert chosen and equal, only scores can differ; the shared expert must see the clean input.
    block = training_block(router_jitter_noise=0.2)
    x = tokens(5, 64)
    block.experts.down_proj.zero_()
    assert max_abs(block(x), block.shared_expert(x)) == 0


@torch.no_grad()
@pytest.mark.parametrize("top_k", [1, 2])
def test_capacity_keeps_the_best_scores(top_k):
    block = training_block(expert_capacity_factor=0.5, num_experts_per_tok=top_k)
    x = tokens(40, 64)
    capacity = math.ceil(0.5 * 40 * top_k / 5)
    _, scores, indices = block.router(x)
    kept = torch.zeros(40, top_k, dtype=torch.bool)
    for expert in range(5):
        places = [(t, k) for t in range(40) for k in range(top_k) if indices[t, k] == expert]
        for t, k in sorted(places, key=lambda place: -scores[place].item())[:capacity]:
            kept[t, k] = True
    assert 0 < kept.sum() < kept.numel()
    by_hand = block.shared_expert(x)
    for t, k in kept.nonzero().tolist():
        gate, up = ((x[t] * scores[t, k]) @ block.experts.gate_up_proj[indices[t, k]]).chunk(2)
        by_hand[t] += (F.silu(gate) * up) @ block.experts.down_proj[indices[t, k]]
    assert max_abs(block(x), by_hand) < 1e-5
    dropped = ~kept.any(-1)
    assert max_abs(block(x)[dropped], block.shared_expert(x)[dropped]) == 0


@torch.no_grad()
@pytest.mark.parametrize(("factor", "trains"), [(5.0, True), (1e12, True), (0.1, False)])
def test_capacity_drops_none_in_inference_or_where_every_token_fits(factor, trains):
    """As many times the fair share as there are experts is everything already."""
    block, plain = training_block(expert_capacity_factor=factor).train(trains), training_block()
    x = tokens(40, 64)
    assert max_abs(block(x), plain(x)) == 0


def test_the_router_is_no_linear_layer():
    assert not isinstance(training_block().router, torch.nn.Linear)


def test_declared_in_the_order_that_peft_relies_on():
    config = llamoe.from_stock(stock_text_config())
    assert [name for name, _ in Experts(config).named_parameters()] == ["gate_up_proj", "down_proj"]
