"""A mixture layer: every rule of routing that a config can express, and the options for training."""

import math
import random
from itertools import product

import pytest
import torch
from fuzz.batch import check, draw_batch, forward
from fuzz.judge import Judge
from fuzz.reference import Decoder
from fuzz.subject import rope_config
from support.mixtures import SIZES, by_hand
from support.models import make_asymmetric, max_abs, stock_mixtral_config, stock_text_config
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import llamoe
from llamoe.modeling.moe.layer import MixtureOfExperts

# Fields that decide how scores are computed and used, in every combination that a config accepts.
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


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "make_config"), [("Mixtral", stock_mixtral_config), ("", stock_text_config)]
)
def test_every_rule_is_its_formula(family, make_config):
    """A decoder of one layer is compared with the decoder of `tests/fuzz` in float64."""
    sizes = dict(hidden_size=24, intermediate_size=20, num_local_experts=5, num_experts_per_tok=3)
    stock = make_config(**sizes, num_hidden_layers=1, **({} if family else {"moe_layers": [0]}))
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


def tokens(num_tokens):
    return torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(4))


def training_block(family="llama4", backend="eager", **options):
    make_config = stock_mixtral_config if family == "mixtral" else stock_text_config
    config = llamoe.from_stock(make_config(**SIZES["aligned"]))
    for name, value in options.items():
        setattr(config, name, value)
    config._experts_implementation = backend
    return make_asymmetric(MixtureOfExperts(config)).train()


@pytest.mark.parametrize("backend", ["llamoe", "eager", "grouped_mm"])
@pytest.mark.parametrize("num_rows", [0, 1])
def test_every_expert_stays_in_the_graph(backend, num_rows):
    block = training_block(backend=backend).eval()
    block(tokens(num_rows)).sum().backward()
    for name, parameter in block.experts.named_parameters():
        assert parameter.grad is not None, name


@torch.no_grad()
@pytest.mark.parametrize("option", [dict(router_jitter_noise=0.3), dict(router_dropout=0.5)], ids=str)
def test_noise_acts_in_training_only(option):
    x = tokens(30)
    plain, noisy = training_block(), training_block(**option)
    assert max_abs(noisy.eval()(x), plain(x)) == 0
    assert max_abs(noisy.train()(x), plain(x)) > 0


@torch.no_grad()
def test_jitter_changes_only_the_routers_input():
    # The routed experts return zeros here. So the output is that of the shared expert, whose input has no jitter.
    block = training_block(router_jitter_noise=0.2)
    x = tokens(5)
    block.experts.down_proj.zero_()
    assert max_abs(block(x), block.shared_expert(x)) == 0


def test_mixtrals_jitter_equals_transformers():
    """The same seed draws the same noise, which also changes the input of Mixtral's experts."""
    stock = make_asymmetric(
        MixtralSparseMoeBlock(stock_mixtral_config(router_jitter_noise=0.2, **SIZES["aligned"]))
    )
    ours = training_block("mixtral", router_jitter_noise=0.2)
    ours.load_state_dict(stock.state_dict())
    outputs = []
    for block in (stock.train(), ours):
        torch.manual_seed(3)
        outputs.append(block(tokens(30)[None].clone()).detach())
    assert max_abs(*outputs) < 1e-5
    assert max_abs(outputs[1], ours.eval()(tokens(30)[None])) > 0.01


@torch.no_grad()
@pytest.mark.parametrize(("family", "top_k"), [("llama4", 1), ("llama4", 2), ("mixtral", 2)])
def test_capacity_keeps_the_best_scores(family, top_k):
    block = training_block(family, expert_capacity_factor=0.5, num_experts_per_tok=top_k)
    x = tokens(40)
    capacity = math.ceil(0.5 * 40 * top_k / 5)
    _, scores, indices = getattr(block, block.router_name)(x)
    kept = torch.zeros(40, top_k, dtype=torch.bool)
    for expert in range(5):
        places = [(t, k) for t in range(40) for k in range(top_k) if indices[t, k] == expert]
        for t, k in sorted(places, key=lambda place: -scores[place].item())[:capacity]:
            kept[t, k] = True
    assert 0 < kept.sum() < kept.numel()
    # Tokens above the capacity get a number that no expert has.
    indices = indices.masked_fill(~kept, 5)
    if family == "mixtral":
        expected = by_hand(block.experts, x, indices, scores)
    else:
        rows = (x[:, None] * scores[..., None]).flatten(0, 1)
        terms = by_hand(block.experts, rows, indices.view(-1, 1), torch.ones(40 * top_k, 1))
        expected = block.shared_expert(x) + terms.view(40, top_k, -1).sum(1)
    assert max_abs(block(x), expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(("factor", "trains"), [(5.0, True), (1e12, True), (0.1, False)])
def test_capacity_drops_nothing_in_inference_or_if_every_token_fits(factor, trains):
    """With a factor of at least the number of experts, one expert may take all tokens."""
    block, plain = training_block(expert_capacity_factor=factor).train(trains), training_block()
    x = tokens(40)
    assert max_abs(block(x), plain(x)) == 0


def test_the_module_is_as_peft_needs_it():
    """The router is no linear layer, and the stacks have this order."""
    block = training_block()
    assert not isinstance(block.router, torch.nn.Linear)
    assert [name for name, _ in block.experts.named_parameters()] == ["gate_up_proj", "down_proj"]
