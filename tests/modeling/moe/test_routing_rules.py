"""Every rule of routing that a config can say, on either layout of experts, against the formula by hand."""

import random
from itertools import product

import pytest
import torch
from fuzz.batch import check, draw_batch, forward
from fuzz.judge import Judge
from fuzz.reference import Decoder
from fuzz.subject import rope_config
from support.models import make_asymmetric, max_abs, stock_mixtral_config, stock_text_config
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


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "make_config"), [("Mixtral", stock_mixtral_config), ("", stock_text_config)]
)
def test_every_rule_is_its_formula(family, make_config):
    """In a decoder of one layer, judged by the one that `tests/fuzz` has in float64; two rows of 17 tokens."""
    stock = make_config(**SIZES, num_hidden_layers=1, **({} if family else {"moe_layers": [0]}))
    for rule in RULES:
        config = llamoe.from_stock(stock)
        for name, value in rule.items():
            setattr(config, name, value)
        config.validate()
        model = make_asymmetric(getattr(llamoe, f"Llamoe{family}ForCausalLM")(config))
        weights = {name: weight.double() for name, weight in model.state_dict().items()}
        fields = stock.to_dict() | rule
        judge = Judge(Decoder(weights, fields, rope_config(fields)), torch.float32, seed=0)
        _, fed = forward(model, draw_batch(random.Random(3), fields, ["plain"], 30))
        check(fed, judge, str(rule))


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
