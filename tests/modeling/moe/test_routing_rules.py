"""Every rule of routing that a config can say, on either layout of experts, against the formula by hand."""

import math
from itertools import product

import pytest
import torch
from support.models import make_asymmetric, max_abs, stock_mixtral_config, stock_text_config
from torch.nn import functional as F
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import llamoe
from llamoe.modeling.moe import MixtureOfExperts

SIZES = dict(hidden_size=24, intermediate_size=20, num_local_experts=5, num_experts_per_tok=3)
RULES = [
    dict(
        router_score_function=function,
        router_pre_softmax=first,
        norm_topk_prob=normalised,
        apply_router_weight_on_input=on_input,
        use_shared_expert=shared,
    )
    for function, first, normalised, on_input, shared in product(
        ("softmax", "sigmoid"), (True, False), (True, False), (True, False), (True, False)
    )
    if not (function == "sigmoid" and first)
]


def make_block(family, **fields):
    stock = stock_mixtral_config if family == "mixtral" else stock_text_config
    config = llamoe.from_stock(stock(**SIZES))
    for name, value in fields.items():
        setattr(config, name, value)
    config.validate()
    return make_asymmetric(MixtureOfExperts(config)), config


def by_hand(block, config, x):
    """In float64, one token and expert at a time."""
    router = getattr(block, config.router_name)
    gate_up, down = (block.experts.stack(name).matrices() for name in ("gate_up_proj", "down_proj"))

    def swiglu(row, expert):
        gate, up = (row @ gate_up[expert].double()).chunk(2)
        return (F.silu(gate) * up) @ down[expert].double()

    rows = []
    for row in x.double():
        logits = (router.weight.double() @ row).tolist()
        chosen = sorted(range(len(logits)), key=lambda expert: -logits[expert])[: config.num_experts_per_tok]
        if config.router_score_function == "sigmoid":
            scores = [1 / (1 + math.exp(-logits[expert])) for expert in chosen]
        else:
            among = range(len(logits)) if config.router_pre_softmax else chosen
            total = sum(math.exp(logits[expert]) for expert in among)
            scores = [math.exp(logits[expert]) / total for expert in chosen]
        if config.norm_topk_prob:
            scores = [score / sum(scores) for score in scores]
        total = torch.zeros_like(row)
        for expert, score in zip(chosen, scores, strict=True):
            if config.apply_router_weight_on_input:
                total += swiglu(row * score, expert)
            else:
                total += score * swiglu(row, expert)
        if config.use_shared_expert:
            total += block.shared_expert.double()(row)
            block.shared_expert.float()
        rows.append(total)
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("family", ["mixtral", "llama4"])
def test_every_rule_is_its_formula(family):
    x = torch.randn(11, 24, generator=torch.Generator().manual_seed(0))
    results = []
    for rule in RULES:
        block, config = make_block(family, **rule)
        results.append(block(x))
        # Sums of some fifty terms of order one in float32.
        assert max_abs(results[-1], by_hand(block, config, x)) < 2e-5, rule
    assert max(map(max_abs, results, results[1:])) > 0.1


IMPLEMENTATIONS = ["llamoe", "eager", "grouped_mm", "batched_mm"]


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 2), (2, 5), (33, 1)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_way_to_compute_mixtrals_experts(implementation, num_tokens, top_k):
    config = stock_mixtral_config(**{**SIZES, "num_experts_per_tok": top_k})
    stock = make_asymmetric(MixtralSparseMoeBlock(config))
    ours = MixtureOfExperts(llamoe.from_stock(config))
    ours.load_state_dict(stock.state_dict())
    ours.experts.config._experts_implementation = implementation
    stock.experts.config._experts_implementation = "eager"
    x = torch.randn(1, num_tokens, 24, generator=torch.Generator().manual_seed(num_tokens))
    results = []
    for block in (stock, ours):
        inputs = x.clone().requires_grad_()
        with torch.no_grad():
            without_gradient = block(x)
        output = block(inputs)
        (output * torch.linspace(-1, 1, x.numel()).view_as(x)).sum().backward()
        results.append(
            [without_gradient, output, inputs.grad]
            + [parameter.grad for _, parameter in sorted(block.named_parameters())]
        )
    for its, mine in zip(*results, strict=True):
        assert max_abs(its, mine) < 1e-5 * max(1.0, its.abs().max().item())


def test_capacity_drops_the_least_scores_of_mixtral():
    block, _ = make_block("mixtral", expert_capacity_factor=0.4)
    x = torch.randn(1, 40, 24, generator=torch.Generator().manual_seed(0))
    block.train()
    limited = block(x)
    block.eval()
    assert (limited - block(x)).abs().amax(-1).gt(1e-3).any() and limited.isfinite().all()
    block.capacity_factor, whole = 5.0, block(x)
    assert torch.equal(block.train()(x), whole)
