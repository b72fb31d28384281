"""A mixture's second half in one call: the modules' choice and numbers, and the bits of several calls."""

import itertools

import pytest
import torch
from support.few_bits import load, save
from support.models import draw, max_abs
from torch import nn

import llamoe
from llamoe.modeling.formats import plain
from llamoe.modeling.kernels import (
    SHORTCUTS_ARE_ON,
    cpp_kernels,
    cpp_layer,
    few_rows_pass,
    known_modules,
    second_half,
)
from llamoe.modeling.moe import Experts, Router

pytestmark = pytest.mark.skipif(
    cpp_kernels.library() is None or not SHORTCUTS_ARE_ON,
    reason="needs a C++ compiler, a CPU with AVX2, AVX-512 or NEON, and shortcuts",
)
HIDDEN = 192
SIZES = dict(
    vocab_size=101, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=3, hidden_size=HIDDEN
)
MIXTRAL = dict(SIZES, intermediate_size=320, num_local_experts=5, num_experts_per_tok=2)
TEXT = dict(
    SIZES, head_dim=80, intermediate_size=192, intermediate_size_mlp=384, num_local_experts=5,
    num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=64,
)  # fmt: skip
RULES = [
    dict(zip(("router_score_function", "router_pre_softmax", "norm_topk_prob"), rule, strict=True))
    for rule in itertools.product(("softmax", "sigmoid"), (True, False), (True, False))
    if rule[:2] != ("sigmoid", True)
]


@pytest.fixture
def whole(monkeypatch):
    """What the mixtures that were computed in one call returned."""
    found = []

    def notice(*args, original=second_half.normalized_mixture):
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(second_half, "normalized_mixture", notice)
    return found


def mixture_of(family, dtype=torch.float32, **fields):
    """A mixture with asymmetric weights, and the norm before it."""
    if family == "mixtral":
        model = draw(llamoe.LlamoeMixtralForCausalLM, llamoe.LlamoeMixtralConfig(**{**MIXTRAL, **fields}))
    else:
        model = draw(llamoe.LlamoeForCausalLM, llamoe.LlamoeTextConfig(**{**TEXT, **fields}))
    if dtype in ("int4", "int8"):
        model = load(save(model.bfloat16()), dtype)
    else:
        model = model.to(dtype)
    layer = model.eval().model.layers[0]
    return layer.post_attention_layernorm, getattr(layer, layer.feed_forward_name)


def compute(norm, mixture, x):
    return second_half.SecondHalves(x, {}).feed_forward(norm, mixture, x)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_choice_is_that_of_the_router(rule, has_bias):
    """Among few values, so that most experts are beside an equal one."""
    for (num_experts, top_k), dtype, scales_input in itertools.product(
        ((5, 2), (16, 1), (128, 8), (130, 2)), (torch.float32, torch.bfloat16), (False, True)
    ):
        fields = dict(hidden_size=48, num_local_experts=num_experts, num_experts_per_tok=top_k)
        config = llamoe.LlamoeMixtralConfig(
            num_attention_heads=8, **fields, **rule, apply_router_weight_on_input=scales_input,
            router_balancing="bias" if has_bias else None,
        )  # fmt: skip
        router = Router(config).to(dtype).eval()
        nn.init.zeros_(router.weight)
        router.weight.data[:, :4] = torch.randint(-1, 2, (num_experts, 4)).to(dtype) / 2
        if has_bias:
            router.balancing_bias.copy_(torch.randint(-1, 2, (num_experts,)).float())
        matrix = cpp_kernels.plain_matrix(router.weight)
        x = torch.randint(-2, 3, (17, 48)).to(dtype)
        rows, scores, ids = cpp_layer.route(x, None, 0.0, second_half._routing(router, matrix))
        with torch.no_grad():
            _, expected, expected_ids = router(x)
        assert rows is x and torch.equal(ids, expected_ids)
        assert scores.dtype == expected.dtype
        # Exponentials and sums in another order; on the border between two numbers of 16 bits either.
        most = 2**-8 if expected.dtype == torch.bfloat16 else 2e-6
        assert ((scores - expected).abs() <= most * expected.abs()).all()


@torch.no_grad()
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*itertools.product(("mixtral", "text"), (torch.float32, torch.bfloat16, "int4", "int8"))],
)
def test_the_numbers_are_those_of_the_modules(family, dtype, num_rows, whole, monkeypatch):
    norm, mixture = mixture_of(family, dtype)
    x = torch.randn(num_rows, 1, HIDDEN).to(norm.weight.dtype)
    for module in (few_rows_pass, plain):
        # Where torch has AMX it multiplies as many in bfloat16.
        monkeypatch.setattr(module, "plain_max_rows", lambda _: 16)
    found = compute(norm, mixture, x)
    assert len(whole) == 1
    with monkeypatch.context() as patched:
        patched.setattr(Experts, "for_kernel", lambda _: None)
        known_modules._KNOWN.clear()
        # As of experts that are offloaded: the same bits.
        is_equal = torch.equal(compute(norm, mixture, x), found)
        assert is_equal and len(whole) == 1
        patched.setattr(cpp_kernels, "_library", None)
        expected = x + mixture(norm(x))
    # Of 16 bits roundings in another order, which may send a row to another expert: the median row.
    errors = (found - expected).float().norm(dim=-1) / (expected - x).float().norm(dim=-1)
    assert errors.median() < (2e-6 if dtype == torch.float32 else 0.02)


@torch.no_grad()
@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
def test_every_rule(scales_input, has_shared, whole):
    for rule, bias in itertools.product(RULES, (None, "bias")):
        fields = dict(apply_router_weight_on_input=scales_input, use_shared_expert=has_shared)
        norm, mixture = mixture_of("mixtral", router_balancing=bias, **fields, **rule)
        x = torch.randn(3, 1, HIDDEN)
        found = compute(norm, mixture, x)
        assert max_abs(found, x + mixture(norm(x))) < 2e-5
    assert len(whole) == 2 * len(RULES)


@torch.no_grad()
def test_a_rule_that_is_changed_between_two_passes_is_seen(whole):
    """Also by a whole decoder, whose modules are looked at once a pass."""
    model = draw(llamoe.LlamoeMixtralForCausalLM, llamoe.LlamoeMixtralConfig(**MIXTRAL)).eval()
    tokens = torch.tensor([[3]])
    with torch.no_grad():
        before = [model(tokens).logits for _ in range(2)]
        router = model.model.layers[0].mlp.gate
        router.top_k = 1
        one = model(tokens).logits
        router.normalizes = False
        plain = model(tokens).logits
        expected = model.to(torch.float64)(tokens).logits
    assert len(whole) == 4 and torch.equal(*before)
    assert max_abs(one, before[0]) > 1e-3 and max_abs(plain, one) > 1e-3
    # Sums in float32.
    assert max_abs(plain, expected) < 1e-5


def test_modules_are_called_where_somebody_looks(whole):
    """Or where they are something else."""
    norm, mixture = mixture_of("text")
    x = torch.randn(2, 1, HIDDEN)
    expected, calls = x + mixture(norm(x)), []
    for name in ("router", "experts", "shared_expert", "shared_expert.up_proj", "experts.act_fn", ""):
        handle = mixture.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
        found = compute(norm, mixture, x)
        found = x + mixture(norm(x)) if found is None else found
        handle.remove()
        assert calls and max_abs(found, expected) < 2e-5, name
        calls.clear()
    assert not whole
    mixture.experts.act_fn = nn.Tanh()
    assert max_abs(compute(norm, mixture, x), x + mixture(norm(x))) < 2e-5 and not whole
    mixture.experts.act_fn = nn.SiLU()
    mixture.experts.down_proj.data = mixture.experts.down_proj.data.flip(0).contiguous()
    assert max_abs(compute(norm, mixture, x), x + mixture(norm(x))) < 2e-5


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "int4"], ids=str)
def test_threads_change_nothing(dtype):
    norm, mixture = mixture_of("text", dtype)
    x, threads, found = torch.randn(3, 1, HIDDEN).to(norm.weight.dtype), torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(compute(norm, mixture, x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@torch.no_grad()
def test_what_is_no_number_stays_in_its_row(whole):
    norm, mixture = mixture_of("text")
    x = torch.randn(3, 1, HIDDEN)
    expected = compute(norm, mixture, x)
    x[1, 0, 5] = torch.nan
    found = compute(norm, mixture, x)
    assert len(whole) == 2 and found[1].isnan().all()
    assert max_abs(found[[0, 2]], expected[[0, 2]]) < 2e-5


@pytest.mark.parametrize("family", ["mixtral", "text"])
def test_beams_are_those_of_the_modules(family, whole, monkeypatch):
    fields = MIXTRAL if family == "mixtral" else TEXT
    classes = (
        (llamoe.LlamoeMixtralForCausalLM, llamoe.LlamoeMixtralConfig)
        if family == "mixtral"
        else (llamoe.LlamoeForCausalLM, llamoe.LlamoeTextConfig)
    )
    model = draw(classes[0], classes[1](**fields))
    ids = torch.randint(3, 101, (2, 7), generator=torch.Generator().manual_seed(5))
    how = dict(max_new_tokens=6, num_beams=3, do_sample=False, pad_token_id=0)
    found = model.generate(ids, **how)
    assert whole
    monkeypatch.setattr(cpp_kernels, "_library", None)
    assert torch.equal(found, model.generate(ids, **how))
