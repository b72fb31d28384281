"""Experts: every way to compute them gives the numbers and gradients of sums written out, or of float64."""

import copy
import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.mixtures import SIZES, by_hand, make_experts, make_rows
from support.models import for_models, make_asymmetric, max_abs, stock_text_config
from support.tables import in_turn
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import llamoe
from llamoe.modeling.moe import experts as moe_experts
from llamoe.modeling.moe import products
from llamoe.modeling.moe.experts import Experts
from llamoe.modeling.moe.layer import MixtureOfExperts
from llamoe.modeling.moe.products import (
    Stack,
    groups_between,
    multiply_groups,
    multiply_sorted,
    plain_stack,
    product_operator,
    takes_grouped_mm,
)

CUDA = torch.device("cuda", 0)


# The choice of the implementation


@for_models()
def test_llamoe_is_the_default_everywhere(case, monkeypatch):
    """Also in all parts of a multimodal model: if one had `grouped_mm`, `generate` would change all on a GPU."""
    model = case.make()
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    with model._optimize_model_for_decode() if case.is_head else nullcontext():
        assert set(model.get_experts_implementation().values()) == {"llamoe"}


def test_the_environment_can_choose(monkeypatch):
    config = llamoe.from_stock(stock_text_config())
    monkeypatch.setenv("LLAMOE_EXPERTS", "batched_mm")
    make = AutoModelForCausalLM.from_config
    assert make(copy.deepcopy(config)).config._experts_implementation == "batched_mm"
    chosen = make(copy.deepcopy(config), experts_implementation="eager")
    assert chosen.config._experts_implementation == "eager"
    monkeypatch.setenv("LLAMOE_EXPERTS", "quick")
    with pytest.raises(ValueError, match="quick.*not supported"):
        make(copy.deepcopy(config))


def test_other_libraries_experts_are_refused():
    theirs = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=6, num_local_experts=3))
    theirs.config._experts_implementation = "llamoe"
    with pytest.raises(ValueError, match=r"llamoe's own experts, not MixtralExperts.*grouped_mm"):
        theirs(torch.randn(2, 8), torch.tensor([[0], [1]]), torch.ones(2, 1))


# The choice of the product


def test_who_finds_the_rows_of_experts(monkeypatch):
    """On a CPU and for offloaded experts the host, in other cases kernels or operators."""
    experts = make_experts()
    assert experts.way(7, needs_gradient=False) == "host"
    assert experts.way(7, needs_gradient=True) == experts.way(7, False, is_traced=True) == "operators"
    monkeypatch.setattr(Experts, "device", CUDA)
    monkeypatch.setattr(moe_experts, "may_have_gpu_kernel", lambda device: True)
    monkeypatch.setattr(moe_experts, "few_rows_limit", lambda device: 64)
    monkeypatch.setattr(moe_experts, "has_gpu_kernel", lambda *_: True)
    assert experts.way(7, needs_gradient=False) == "kernels"
    experts.is_offloaded = True
    monkeypatch.setattr(Experts, "storage", "on 'disk'")
    assert experts.way(7, needs_gradient=False) == "host" and experts.way(7, True) == "operators"


STRIDES = {
    "whole": (lambda: torch.empty(3, 16, 24), True, True),
    "output first": (lambda: torch.empty(3, 24, 16).transpose(1, 2), True, True),
    "rows apart": (lambda: torch.empty(3, 16, 32)[..., :24], True, True),
    "rows 25 numbers apart": (lambda: torch.empty(3, 16, 25)[..., :24], False, False),
    "columns apart": (lambda: torch.empty(3, 16, 48)[..., ::2], False, False),
    "matrices 386 apart": (lambda: torch.empty(1158).as_strided((3, 16, 24), (386, 24, 1)), True, False),
    "behind one number": (lambda: torch.empty(1 + 3 * 16 * 24)[1:].view(3, 16, 24), True, False),
    "1024 of them": (lambda: torch.empty(1024, 4, 4), True, False),
    "odd rows": (lambda: torch.empty(3, 16, 22), False, False),
}


@pytest.mark.parametrize(("make", "on_the_host", "on_a_gpu"), STRIDES.values(), ids=STRIDES)
def test_strides_that_grouped_mm_takes(make, on_the_host, on_a_gpu, monkeypatch):
    """Torch's sources say what it requires on a GPU; requirements that also hold on a CPU are tried here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(products, "is_recorded", lambda x: False)
    weight = make().zero_()
    rows = torch.ones(5, weight.shape[1])
    ends = torch.full((len(weight),), 5, dtype=torch.int32)
    if on_the_host:
        torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    else:
        with pytest.raises(RuntimeError, match="multiple of 16 bytes|Invalid strides"):
            torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    assert takes_grouped_mm(on_gpu(torch.float32), plain_stack(weight)) is on_a_gpu
    assert not takes_grouped_mm(rows, plain_stack(weight))


def on_gpu(dtype):
    return SimpleNamespace(is_cuda=True, device=CUDA, dtype=dtype, is_meta=False)


@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "in_eager", "compiled"),
    [
        ((7, 5), None, torch.bfloat16, False, False),
        ((8, 0), None, torch.bfloat16, True, False),
        ((9, 0), None, torch.bfloat16, True, True),
        ((10, 3), None, torch.bfloat16, True, True),
        ((12, 0), None, torch.bfloat16, True, False),
        ((9, 4), "6.4", torch.bfloat16, True, False),
        ((9, 0), None, torch.float32, True, False),
        ((9, 0), None, torch.float16, True, False),
        ((9, 0), None, torch.float64, False, False),
    ],
    ids=str,
)
def test_compiled_products_do_not_wait_for_the_host(capability, hip, dtype, in_eager, compiled, monkeypatch):
    """With `reduce-overhead` they are captured in a CUDA graph, where waiting is an error."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    stack = plain_stack(torch.empty(3, 16, 24, dtype=dtype))
    for is_compiled, expected in ((False, in_eager), (True, compiled)):
        monkeypatch.setattr(products, "is_recorded", lambda x, it=is_compiled: it)
        assert takes_grouped_mm(on_gpu(dtype), stack) is expected
    packed = Stack(SimpleNamespace(), stack.parts, stack.sizes)
    assert not takes_grouped_mm(on_gpu(dtype), packed)


# Results and gradients


@torch.no_grad()
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 1), (1, 1), (2, 3), (5, 1), (33, 3)])
@pytest.mark.parametrize("is_output_first", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_way_equals_the_sum_by_hand(sizes, is_output_first, num_tokens, top_k, monkeypatch):
    """The host, operators and the loop; ids past the last expert stand for experts of other processes."""
    experts = make_experts(sizes, is_output_first=is_output_first)
    inputs = make_rows(experts, num_tokens, top_k, past_the_end=True)
    expected = by_hand(experts, *inputs)
    given = [experts(*inputs), experts.loop_over_experts(*inputs)]
    monkeypatch.setattr(Experts, "way", lambda *_: "operators")
    given.append(experts(*inputs))
    # Sums have about fifty terms of order one.
    for out in given:
        assert out.shape == inputs[0].shape and out.dtype == torch.float32
        assert not num_tokens or max_abs(out, expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(num_tokens, dtype):
    experts = make_experts(dtype=dtype)
    inputs = make_rows(experts, num_tokens, 2, dtype)
    expected = by_hand(experts, *inputs)
    # Each of four roundings is half a unit in the last place; sums in float64 have a few more.
    tolerance = (40 if dtype == torch.float64 else 4) * torch.finfo(dtype).eps * expected.abs().max()
    assert max_abs(experts(*inputs), expected) < tolerance
    if dtype == torch.float64:
        # Autocast does not cast float64.
        with torch.autocast("cpu", torch.bfloat16):
            assert max_abs(experts(*inputs), expected) < tolerance


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("spacing", ["transposed", (3, 1), (8, 2)], ids=str)
def test_weights_in_any_strides(spacing, num_tokens):
    """Other libraries store slices of larger tensors and transposed stacks: outputs and gradients are right."""
    experts = make_experts("aligned")
    expected = copy.deepcopy(experts)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        if spacing == "transposed":
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            more, step = spacing
            wide = torch.full((*weight.shape[:2], step * weight.shape[2] + more), math.nan)
            wide[..., :-more:step] = weight.detach()
            weight.data = wide[..., :-more:step]
        assert not weight.is_contiguous()
    inputs = make_rows(experts, num_tokens, 2)
    with torch.no_grad():
        assert max_abs(experts(*inputs), by_hand(experts, *inputs)) < 1e-5
    for module in (experts, expected):
        module(*inputs).square().sum().backward()
    for name, parameter in experts.named_parameters():
        assert max_abs(parameter.grad, getattr(expected, name).grad) < 1e-4, name


@pytest.mark.parametrize("is_output_first", [False, True])
def test_gradients_have_their_stacks_strides(is_output_first):
    """With other strides autograd would copy them. The gradient of an expert without tokens is zero."""
    experts = make_experts(is_output_first=is_output_first)
    x, _, _ = make_rows(experts, 9, 1)
    layouts = []
    for stack in experts.parameters():
        stack.register_hook(lambda gradient: layouts.append(gradient.stride()))
    experts(x, torch.arange(9)[:, None] % 4, torch.ones(9, 1)).square().sum().backward()
    assert sorted(layouts) == sorted(stack.stride() for stack in experts.parameters())
    assert (experts.down_proj.grad[4] == 0).all()


def test_the_gradient_of_the_operator_is_its_derivative():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(4, 3, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    # Two experts have no rows, and the last row has no expert.
    ends = torch.tensor([2, 2, 5, 5], dtype=torch.int32)

    def product(x, weight):
        return multiply_sorted(x, plain_stack(weight), ends)

    assert torch.autograd.gradcheck(product, (x, weight))
    assert torch.autograd.gradgradcheck(product, (x, weight))
    by_row = torch.stack([x[row] @ weight[expert] for row, expert in enumerate([0, 0, 2, 2, 2])])
    for given in (weight, weight.mT.contiguous().mT):
        stack = plain_stack(given.detach())
        rows = multiply_groups(x.detach(), stack, groups_between(ends, len(x)))
        assert max_abs(product(x, given), rows) == 0 and not rows[5].any()
        assert max_abs(rows[:5], by_row) < 1e-12
        operands = x.detach(), stack.parts, stack.form.key, list(stack.sizes), ends, False, False
        torch.library.opcheck(product_operator, operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_groups_without_rows(dtype):
    x, grad = torch.randn(4, 5).to(dtype), torch.randn(4, 7).to(dtype)
    # The last row has no expert.
    ends = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    out = products.grouped_outer_product(x, grad, ends)
    assert out.shape == (4, 5, 7) and out.dtype == dtype and out.is_contiguous()
    expected = torch.stack([x[:0].T @ grad[:0], x[:2].T @ grad[:2], x[:0].T @ grad[:0], x[2:3].T @ grad[2:3]])
    assert max_abs(out, expected) <= torch.finfo(dtype).eps * 8
    assert products.grouped_outer_product(x[:, :0], grad, ends).shape == (4, 0, 7)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(x[:, None])[:, 0],
    "gradients of rows": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x[None]).square().sum()))(
        x
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func(transform):
    """Under transforms experts use torch's operators: with custom ones their part would silently be missing."""
    config, follow = stock_text_config(**SIZES["odd"]), TRANSFORMS[transform]
    stock, ours = make_asymmetric(Llama4TextMoe(config)), MixtureOfExperts(llamoe.from_stock(config))
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(7, 70, generator=torch.Generator().manual_seed(1))
    given, expected = follow(ours, x), follow(lambda x: stock(x)[0], x)
    assert max_abs(given, expected) < 1e-5 * expected.abs().max()
    ours.experts.__class__ = type("Packed", (Experts,), {"storage": "int4"})
    with pytest.raises(ValueError, match=r"packed or offloaded.*do not follow transforms of torch.func"):
        follow(ours, x)


@pytest.mark.parametrize(
    ("is_output_first", "implementation"),
    in_turn([False, True], ["llamoe", "eager", "batched_mm"], times=3),
)
def test_float64_gradients_are_the_derivatives(is_output_first, implementation):
    """First and second derivatives for rows, stacks and weights, compared with differences.

    The router takes no part, since Llama 4 rounds its scores to float32.
    """
    sizes = dict(hidden_size=6, intermediate_size=5)
    experts = make_experts(sizes, torch.float64, 3, is_output_first)
    experts.config._experts_implementation = implementation
    x, ids, weights = make_rows(experts, 4, 2, torch.float64)

    def call(x, weights, gate_up, down):
        stacks = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(experts, stacks, (x, ids, weights))

    stacks = [parameter.detach().clone().requires_grad_() for parameter in experts.parameters()]
    inputs = (x.requires_grad_(), weights.requires_grad_(), *stacks)
    # All derivatives at once, along random directions.
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def test_frozen_experts_keep_no_rows():
    experts = make_experts().requires_grad_(False)
    x, ids, weights = make_rows(experts, 9, 1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        experts(x.requires_grad_(), ids, weights).sum().backward()
    assert (9, 70) not in saved and (5, 70, 102) in saved


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 3, 12])
def test_autocast_computes_in_its_dtype(num_tokens):
    experts = make_experts()
    inputs = make_rows(experts, num_tokens, 1)
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(*inputs)
    assert out.dtype == torch.float32
    rounded = copy.deepcopy(experts).to(torch.bfloat16)
    assert 0 < max_abs(out, experts(*inputs))
    assert max_abs(out, rounded(inputs[0].bfloat16(), *inputs[1:])) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_outputs_and_gradients_on_the_meta_device(dtype):
    experts = make_experts("aligned", dtype).to("meta")
    empty = partial(torch.empty, device="meta")
    out = experts(empty(7, 64, dtype=dtype), empty(7, 2, dtype=torch.long), empty(7, 2, dtype=dtype))
    assert out.is_meta and out.shape == (7, 64)
    out.sum().backward()
    assert experts.gate_up_proj.grad.shape == experts.gate_up_proj.shape
