"""The experts implementation `llamoe`: which way is taken when, and that every way gives the same numbers."""

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from support.models import MODELS, for_models, make_asymmetric, max_abs, run, stock_text_config
from support.tables import in_turn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import llamoe
from llamoe.modeling.moe import dispatch
from llamoe.modeling.moe.dispatch import PATHS, choose_path, compute_experts, why_not
from llamoe.modeling.moe.experts import Experts
from llamoe.modeling.moe.grouped_product import (
    groups_between,
    multiply_groups,
    multiply_sorted,
    plain_stack,
    product_operator,
)
from llamoe.modeling.moe.layer import MixtureOfExperts

SIZES = {
    "odd": dict(hidden_size=70, intermediate_size=51),
    "aligned": dict(hidden_size=64, intermediate_size=48),
}


def make_experts(sizes="odd", dtype=torch.float32, num_experts=5):
    config = llamoe.from_stock(stock_text_config(num_local_experts=num_experts, **SIZES[sizes]))
    return make_asymmetric(Experts(config)).to(dtype)


def make_rows(experts, num_tokens, top_k, dtype=torch.float32, past_the_end=False):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_size, _ = experts.sizes_of("down_proj")
    x = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    ids = torch.randint(0, experts.num_experts + 2 * past_the_end, (num_tokens, top_k), generator=generator)
    weights = torch.rand(num_tokens, top_k, generator=generator).to(dtype)
    return x, ids, weights


def by_hand(experts, x, ids, weights):
    """In float64, one token and expert at a time."""
    gate_up, down = experts.gate_up_proj.double(), experts.down_proj.double()
    out = []
    for row, chosen, factors in zip(x.double(), ids.tolist(), weights.double(), strict=True):
        terms = [torch.zeros_like(row)]
        for expert, factor in zip(chosen, factors, strict=True):
            if expert < experts.num_experts:
                gate, up = (row @ gate_up[expert]).chunk(2)
                terms.append(factor * ((F.silu(gate) * up) @ down[expert]))
        out.append(torch.stack(terms).sum(0))
    return torch.stack(out)


# Which way


def test_every_path_is_a_name_in_the_registry():
    assert {"llamoe", *(f"llamoe_{path}" for path in PATHS)} <= set(ALL_EXPERTS_FUNCTIONS.keys())


@for_models()
def test_llamoe_is_the_default_everywhere(case):
    """Of the parts of a multimodal model too: `generate` swaps the whole when one of them says `grouped_mm`."""
    assert set(case.make().get_experts_implementation().values()) == {"llamoe"}


@for_models("has_experts", "is_head")
def test_generate_on_a_gpu_leaves_it_alone(case, monkeypatch):
    model = case.make()
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    with model._optimize_model_for_decode():
        assert set(model.get_experts_implementation().values()) == {"llamoe"}


def test_the_environment_can_choose(monkeypatch):
    config = llamoe.from_stock(stock_text_config())
    monkeypatch.setenv("LLAMOE_EXPERTS", "batched_mm")
    make = AutoModelForCausalLM.from_config
    assert make(copy.deepcopy(config)).config._experts_implementation == "batched_mm"
    chosen = make(copy.deepcopy(config), experts_implementation="llamoe_loop")
    assert chosen.config._experts_implementation == "llamoe_loop"
    monkeypatch.setenv("LLAMOE_EXPERTS", "quick")
    with pytest.raises(ValueError, match=r"LLAMOE_EXPERTS is 'quick'.*not supported"):
        make(copy.deepcopy(config))


def test_other_libraries_experts_are_refused():
    theirs = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=6, num_local_experts=3))
    theirs.config._experts_implementation = "llamoe"
    with pytest.raises(ValueError, match=r"llamoe's own experts, not MixtralExperts.*grouped_mm"):
        theirs(torch.randn(2, 8), torch.tensor([[0], [1]]), torch.ones(2, 1))


@pytest.mark.parametrize(
    ("path", "dtype", "reason"),
    [
        ("kernel", torch.float32, r"CUDA device"),
        ("grouped", torch.float32, r"70 x 51.*16 bytes"),
        ("grouped", torch.float16, r"16 bytes, float16 is not for the CPU"),
        ("grouped", torch.float64, r'float64.*Choose "llamoe"'),
        ("kernel", torch.float64, r'float64.*Choose "llamoe"'),
    ],
)
def test_a_forced_path_says_why_it_cannot_be_taken(path, dtype, reason):
    experts = make_experts(dtype=dtype)
    experts.config._experts_implementation = f"llamoe_{path}"
    with torch.no_grad(), pytest.raises(ValueError, match=rf'llamoe_{path}": .*{reason}'):
        experts(*make_rows(experts, 3, 1, dtype))
    assert "no gradient" in why_not("kernel", experts, 1, torch.float32, needs_gradient=True)


@pytest.mark.parametrize(
    ("rows", "needs_gradient", "kernel_fits", "grouped_fits", "expected"),
    [
        (1, False, True, True, "kernel"),
        (64, False, True, True, "kernel"),
        (65, False, True, True, "grouped"),
        (1, True, True, True, "grouped"),
        (1, False, False, True, "grouped"),
        (8192, False, True, False, "loop"),
        (8, False, True, False, "kernel"),
        (8, True, True, False, "loop"),
    ],
)
def test_rows_and_gradients_decide_on_a_gpu(
    rows, needs_gradient, kernel_fits, grouped_fits, expected, monkeypatch
):
    """On a card that takes the kernel for up to 64 rows."""
    monkeypatch.setattr(dispatch, "why_no_kernel", lambda *_: None if kernel_fits else "It does not fit.")
    monkeypatch.setattr(dispatch, "few_rows_limit", lambda device: 64)
    # A processor with instructions for bfloat16.
    monkeypatch.setattr(dispatch, "rows_of_torch", lambda dtype: None)
    weight = SimpleNamespace(shape=(5, 48, 64), dtype=torch.bfloat16, device=torch.device("cuda"))
    experts = SimpleNamespace(
        gate_up_proj=weight,
        down_proj=weight,
        device=weight.device,
        formats=dict.fromkeys(("gate_up_proj", "down_proj")),
        sizes_of=lambda name: (64, 48),
        stack_shape=lambda name: weight.shape,
        refusal=lambda name: None,
        is_transposed=True,
        fits_grouped_mm=lambda dtype: grouped_fits,
    )
    assert choose_path(experts, rows, torch.bfloat16, needs_gradient) == expected
    weight.device = experts.device = torch.device("cpu")
    on_the_cpu = "grouped" if needs_gradient and grouped_fits else "loop"
    assert choose_path(experts, rows, torch.bfloat16, needs_gradient) == on_the_cpu
    weight.shape = (16, 1024, 1024)  # 32 MiB in bfloat16, and three rows for each expert are 48
    few = "loop" if rows <= 48 else on_the_cpu
    assert choose_path(experts, rows, torch.bfloat16, needs_gradient) == few


# The same numbers


@torch.no_grad()
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 1), (1, 1), (2, 3), (5, 1), (33, 3)])
@pytest.mark.parametrize("path", ["loop", "grouped", None])
def test_every_path_equals_the_sum_by_hand(path, num_tokens, top_k):
    experts = make_experts("aligned")
    x, ids, weights = make_rows(experts, num_tokens, top_k, past_the_end=path != "grouped")
    out = compute_experts(experts, x, ids, weights, path=path)
    assert out.shape == x.shape
    if num_tokens:  # sums of about fifty terms of order one
        assert max_abs(out, by_hand(experts, x, ids, weights)) < 1e-5
        assert max_abs(out, experts.loop_over_experts(x, ids, weights)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_of_odd_sizes(num_tokens, dtype):
    experts = make_experts(dtype=dtype)
    inputs = make_rows(experts, num_tokens, 2, dtype)
    expected = by_hand(experts, *inputs)
    # Each of four roundings is half a unit in the last place.
    tolerance = 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert max_abs(compute_experts(experts, *inputs), expected) < tolerance


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_weights_in_any_strides(num_tokens):
    """Slices of larger storages and transposed stacks, as other libraries store them."""
    experts = make_experts()
    inputs = make_rows(experts, num_tokens, 1)
    expected = by_hand(experts, *inputs)
    gate_up, down = experts.gate_up_proj, experts.down_proj
    wide = torch.full((*gate_up.shape[:2], gate_up.shape[2] + 3), math.nan)
    wide[..., :-3] = gate_up
    experts.gate_up_proj.data = wide[..., :-3]
    experts.down_proj.data = down.transpose(1, 2).contiguous().transpose(1, 2)
    assert not experts.gate_up_proj.is_contiguous() and not experts.down_proj.is_contiguous()
    assert max_abs(compute_experts(experts, *inputs), expected) < 1e-5


@pytest.mark.parametrize("spacing", [(3, 1), (8, 1), (8, 2)], ids=str)
def test_training_with_weights_in_any_strides(spacing):
    """Rows that are not multiples of 16 bytes apart, and columns that are not neighbours, go through the loop."""
    more, step = spacing
    experts, expected = make_experts("aligned"), make_experts("aligned")
    expected.load_state_dict(experts.state_dict())
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        wide = torch.full((*weight.shape[:2], step * weight.shape[2] + more), math.nan)
        wide[..., : -more or None : step] = weight.detach()
        weight.data = wide[..., :-more:step]
    x, ids, weights = make_rows(experts, 9, 2)
    assert experts.fits_grouped_mm() is (more == 8 and step == 1)
    for each in (experts, expected):
        compute_experts(each, x, ids, weights).square().sum().backward()
    for name, parameter in experts.named_parameters():
        assert max_abs(parameter.grad, getattr(expected, name).grad) < 1e-4, name


@pytest.mark.parametrize("path", ["loop", "grouped"])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_add_up_over_passes(path, frozen):
    stock_config = stock_text_config(**SIZES["aligned"])
    stock = make_asymmetric(Llama4TextMoe(stock_config))
    config = llamoe.from_stock(stock_config)
    config._experts_implementation = f"llamoe_{path}"
    ours = MixtureOfExperts(config)
    ours.load_state_dict(stock.state_dict())
    for block in (stock, ours):
        block.experts.requires_grad_(not frozen)
    for num_tokens in (7, 1, 30):
        x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(num_tokens))
        inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
        factors = torch.linspace(-1, 1, x.numel()).view_as(x)
        (ours(inputs[0]) * factors).sum().backward()
        (stock(inputs[1])[0] * factors).sum().backward()
        assert max_abs(inputs[0].grad, inputs[1].grad) < 1e-5
    expected = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        if frozen and name.startswith("experts."):
            assert parameter.grad is None
        else:
            assert max_abs(parameter.grad, expected[name].grad) < 1e-4, name


def test_gradients_of_a_gradient_that_is_one_number_everywhere():
    """`y.sum().backward()` gives a gradient without strides, which torch's grouped product refuses."""
    experts = make_experts("aligned")
    for path in ("loop", "grouped"):
        experts.zero_grad()
        compute_experts(experts, *make_rows(experts, 6, 1), path=path).sum().backward()
        assert experts.gate_up_proj.grad.abs().sum() > 0


def test_the_gradient_of_the_operator_is_its_derivative():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(4, 3, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    ends = torch.tensor([2, 2, 5, 5], dtype=torch.int32)  # two groups without rows, and a row behind the last

    def product(x, weight):
        return multiply_sorted(x, plain_stack(weight), ends)

    assert torch.autograd.gradcheck(product, (x, weight))
    assert torch.autograd.gradgradcheck(product, (x, weight))
    for given in (weight, weight.mT.contiguous().mT):
        stack = plain_stack(given.detach())
        rows = multiply_groups(x.detach(), stack, groups_between(ends, len(x)))
        assert max_abs(product(x, given), rows) == 0
        operands = x.detach(), stack.parts, stack.form.key, list(stack.sizes), ends, False, False
        torch.library.opcheck(product_operator, operands)


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_of_gradients_equal_stocks(sizes):
    """Of odd sizes through our operators, of others through torch's."""
    stock, ours, x = stock_pair(sizes)
    results = []
    for block in (stock, ours):
        inputs = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(main(block(inputs)).square().sum(), inputs, create_graph=True)
        gradient.square().sum().backward()
        results.append([inputs.grad, *(parameter.grad for parameter in block.parameters())])
    for theirs, mine in zip(*results, strict=True):
        assert max_abs(mine, theirs) < 1e-5 * theirs.abs().max()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(x[:, None])[:, 0],
    "gradients of rows": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x[None]).square().sum()))(
        x
    ),
}


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # torch loops over rows of its grouped product
@pytest.mark.parametrize("sizes", SIZES)
def test_the_default_follows_transforms_of_torch_func(sizes):
    """Its own operators would lose the experts' part; transformers' for these sizes do not."""
    stock, ours, x = stock_pair(sizes)
    for transform in TRANSFORMS.values():
        given, expected = (transform(lambda x, m=m: main(m(x)), x) for m in (ours, stock))
        assert max_abs(given, expected) < 1e-5 * expected.abs().max()


def test_forced_paths_refuse_transforms_of_torch_func():
    """A forced path is an operator of ours; the loop takes grad and jvp."""
    stock, ours, x = stock_pair("odd")
    ours.experts.config._experts_implementation = "llamoe_loop"
    with pytest.raises(ValueError, match=r"torch.func.*Choose \"eager\""):
        torch.func.jvp(ours, (x,), (x,))
    ours.experts.config._experts_implementation = "eager"
    for name in ("grad", "jvp"):
        given, expected = (TRANSFORMS[name](lambda x, m=m: main(m(x)), x) for m in (ours, stock))
        assert max_abs(given, expected) < 1e-5 * expected.abs().max()


def stock_pair(sizes):
    stock_config = stock_text_config(**SIZES[sizes])
    stock = make_asymmetric(Llama4TextMoe(stock_config))
    ours = MixtureOfExperts(llamoe.from_stock(stock_config))  # outside of a model; `llamoe` is the default
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(7, SIZES[sizes]["hidden_size"], generator=torch.Generator().manual_seed(1))
    return stock, ours, x


def main(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize(
    ("implementation", "sizes"),
    in_turn(["llamoe", "llamoe_loop", "eager", "grouped_mm", "batched_mm"], ["aligned", "odd"])
    + [("llamoe", "odd")],
)
def test_float64_gradients_are_the_derivatives(sizes, implementation):
    """By differences, of rows, both stacks and weights, also of sizes that torch's grouped product takes.

    Without the router, whose scores are rounded to float32 as Llama 4's rule has it.
    """
    small = {
        "odd": dict(hidden_size=6, intermediate_size=5),
        "aligned": dict(hidden_size=6, intermediate_size=2),
    }
    config = llamoe.from_stock(stock_text_config(num_local_experts=3, **small[sizes]))
    experts = make_asymmetric(Experts(config)).double()
    experts.config._experts_implementation = implementation
    x, ids, weights = make_rows(experts, 4, 2, torch.float64)

    def call(x, weights, gate_up, down):
        stacks = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(experts, stacks, (x, ids, weights))

    stacks = [parameter.detach().clone().requires_grad_() for parameter in experts.parameters()]
    inputs = (x.requires_grad_(), weights.requires_grad_(), *stacks)
    # All derivatives at once, along random directions.
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("case", "implementation"),
    in_turn([case for case in MODELS if case.is_head and case.has_experts], ["llamoe", "grouped_mm"]),
    ids=lambda value: getattr(value, "name", value),
)
def test_a_float64_mixture_trains_as_eager_does(case, implementation):
    """Autocast leaves float64 alone, whichever way the experts are computed."""
    results = []
    for name, autocast in ((implementation, False), (implementation, True), ("eager", False)):
        model, inputs = case.make(intermediate_size=56).double(), case.inputs()
        model.set_experts_implementation(name)
        inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            experts = next(module for module in model.modules() if isinstance(module, Experts))
            rows, ids, weights = make_rows(experts, 9, 2, torch.float64)
            results.append(experts(rows, ids, weights))
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        results[-1] = [results[-1], experts.down_proj.grad, experts.gate_up_proj.grad]
    for given in results[:2]:
        for mine, expected in zip(given, results[2], strict=True):
            assert (mine - expected).abs().max() < 1e-12 * max(1, expected.abs().max())


def test_frozen_experts_keep_no_rows():
    experts = make_experts().requires_grad_(False)
    x, ids, weights = make_rows(experts, 9, 1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        compute_experts(experts, x.requires_grad_(), ids, weights).sum().backward()
    assert (9, 70) not in saved and (5, 70, 102) in saved


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 3, 12])
def test_autocast_computes_in_its_dtype(num_tokens):
    experts = make_experts()
    inputs = make_rows(experts, num_tokens, 1)
    with torch.autocast("cpu", torch.bfloat16):
        out = compute_experts(experts, *inputs)
    assert out.dtype == torch.float32
    rounded = copy.deepcopy(experts).to(torch.bfloat16)
    assert max_abs(out, compute_experts(rounded, inputs[0].bfloat16(), *inputs[1:])) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_shapes_alone(sizes, dtype):
    """Of outputs and gradients."""
    experts = make_experts(sizes, dtype).to("meta")
    hidden_size = SIZES[sizes]["hidden_size"]
    out = compute_experts(
        experts,
        torch.empty(7, hidden_size, device="meta", dtype=dtype),
        *(torch.empty(7, 2, dtype=dtype, device="meta") for dtype in (torch.long, dtype)),
    )
    assert out.is_meta and out.shape == (7, hidden_size)
    out.sum().backward()
    assert experts.gate_up_proj.grad.shape == experts.gate_up_proj.shape


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_leaves_float64_alone(dtype):
    experts = make_experts(dtype=dtype)
    inputs = make_rows(experts, 3, 1, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        given = compute_experts(experts, *inputs)
    assert (max_abs(given, compute_experts(experts, *inputs)) == 0) == (dtype == torch.float64)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_in_one_graph_for_every_number_of_rows():
    experts = make_experts(dtype=torch.bfloat16)
    experts.config._experts_implementation = "llamoe"
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (2, 5, 40):
        inputs = make_rows(experts, num_tokens, 2, torch.bfloat16)
        assert max_abs(compiled(*inputs), experts(*inputs)) < 0.1


@for_models("has_experts")
def test_models_give_the_same_by_every_path(case):
    model, inputs = case.make(), case.inputs()
    expected = run(model, **inputs)
    for name in ("eager", "llamoe_loop"):
        model.set_experts_implementation(name)
        assert max_abs(run(model, **inputs), expected) < 1e-5 * expected.std()


@pytest.mark.parametrize(
    ("path", "dtype", "waits", "is_refused"),
    [
        ("loop", torch.bfloat16, False, True),
        ("grouped", torch.float32, False, True),
        ("grouped", torch.bfloat16, True, True),
        ("grouped", torch.bfloat16, False, False),
    ],
)
def test_a_capture_is_refused_where_experts_ask_the_host(path, dtype, waits, is_refused, monkeypatch):
    """What would end the capture of a CUDA graph with an error of CUDA's."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(dispatch, "grouped_mm_waits", lambda device: waits)
    refusal = pytest.raises(RuntimeError, match="a CUDA graph is being captured.* One pass of few tokens")
    with refusal if is_refused else contextlib.nullcontext():
        dispatch._refuse_capture(path, dtype, torch.device("cuda", 0))
