"""The check of the kernels before their first use, in Triton's interpreter; `test_under_the_interpreter` starts this.

The kernels run for real, whole or spoilt on purpose: their source with one line changed. `on_a_gpu` has the CPU taken
for a device that may use kernels.
"""

import os
import re

import pytest
import torch
from support import triton_interpreter
from support.mixtures import forced
from support.models import MODELS, make_asymmetric, max_abs, stock_text_config
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

import llamoe
from llamoe.modeling.formats import has_gpu_kernel
from llamoe.modeling.kernels import packed_rows
from llamoe.modeling.moe import check_kernels, products
from llamoe.modeling.moe import experts as moe_experts
from llamoe.modeling.moe.experts import Experts
from llamoe.modeling.moe.products import plain_stack

assert os.environ.get("TRITON_INTERPRET") == "1", "compiled kernels would need a GPU"

SIZES = dict(num_local_experts=3, hidden_size=40, intermediate_size=24)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """A process that checked nothing yet."""
    monkeypatch.setattr(packed_rows, "_FAILURES", {})
    # All tiles would take the interpreter long.
    monkeypatch.setattr(packed_rows, "TILES", (16, 32))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The CPU as a device that takes kernels, for up to 64 rows."""
    monkeypatch.setattr(moe_experts, "may_have_gpu_kernel", lambda device: device.type != "meta")
    monkeypatch.setattr(moe_experts, "few_rows_limit", lambda device: 64)


@pytest.fixture
def launches(monkeypatch):
    """Numbers of rows for which kernels were launched, for each of two products."""
    counted = []
    product = packed_rows.packed_product

    def run(x_NC, *args, **kwargs):
        counted.append(len(x_NC))
        return product(x_NC, *args, **kwargs)

    for module in (packed_rows, products):
        monkeypatch.setattr(module, "packed_product", run)
    return counted


def stacks(dtype=torch.float32, num_experts=3, hidden=40, intermediate=24):
    """Random experts; rows of deviation one have results of deviation about one."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(num_experts, hidden, 2 * intermediate, generator=generator).mul_(2 / hidden**0.5)
    down = torch.randn(num_experts, intermediate, hidden, generator=generator).mul_(intermediate**-0.5)
    return gate_up.to(dtype), down.to(dtype)


def find_difference(*weights):
    """What is wrong with the kernels for each stack, as the first use finds it."""
    packed_rows._FAILURES.clear()
    for stack in map(plain_stack, weights):
        has_gpu_kernel(stack.form, stack.parts, stack.sizes, None, stack.num_experts)
    return "; ".join(packed_rows.kernel_failures())


def make_experts(**sizes):
    config = llamoe.from_stock(stock_text_config(**{**SIZES, **sizes}))
    config._experts_implementation = "llamoe"
    return make_asymmetric(Experts(config)).requires_grad_(False)


def rows(experts, num_rows, top_k=1):
    x = torch.randn(num_rows, experts.down_proj.shape[2])
    ids = torch.randint(experts.num_experts, (num_rows, top_k))
    return x, ids, torch.rand(num_rows, top_k)


def by_hand(experts, x, ids, weights):
    """In float64, one row and expert at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, factor in zip(ids[row].tolist(), weights[row].double(), strict=True):
            gate, up = (x[row].double() @ experts.gate_up_proj[expert].double()).chunk(2)
            out[row] += factor * ((gate / (1 + (-gate).exp()) * up) @ experts.down_proj[expert].double())
    return out


# How kernels are spoilt: a line of their source, and what stands there instead.
SPOILT = {
    "last inner column": ("has_term = deep < num_terms - begin", "has_term = deep < num_terms - begin - 1"),
    "the last row of a second tile": (
        "return expert, rows, rows < tl.sum(tl.where(is_mine, ends, 0), axis=0)",
        "return expert, rows, rows < tl.sum(tl.where(is_mine, ends - (ends - starts > M), 0), axis=0)",
    ),
    "rows of no expert": (
        "zeros = tl.zeros((M, COLUMNS), tl.float32)",
        "zeros = tl.full((M, COLUMNS), 1e-3, tl.float32)",
    ),
    "as with TF32": ("return tl.dot(a, b,", "return tl.dot(a.to(tl.float16).to(tl.float32), b,"),
    "does not compile": (
        "place = tl.program_id(0)",
        'tl.static_assert(M == 0, "no such M"); place = tl.program_id(0)',
    ),
}


# Right kernels


def test_right_kernels_on_stacks_as_they_lie():
    """A slice of wider weights, and an output-first stack; nothing else is read."""
    gate_up, down = (stack.clone() for stack in stacks())
    wide = torch.full((6, 40, 51), float("nan"))
    wide[::2, :, :48] = gate_up
    transposed = down.transpose(1, 2).contiguous().transpose(1, 2)
    assert find_difference(wide[::2, :, :48], transposed) == ""


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_what_weights_hold_condemns_no_kernel(value):
    gate_up, down = stacks(torch.float16, num_experts=2)
    assert find_difference(gate_up, torch.full_like(down, value)) == ""


# Spoilt kernels


@pytest.mark.parametrize("how", SPOILT)
def test_spoilt_kernels_are_found(how, monkeypatch, tmp_path):
    triton_interpreter.spoil(monkeypatch, tmp_path, *SPOILT[how])
    difference = find_difference(*stacks())
    expected = "no such M" if how == "does not compile" else "numbers are wrong"
    assert re.search(f"^with \\d+ rows .*{expected}", difference), difference


# First use


@torch.no_grad()
def test_first_use_checks_once(on_a_gpu, launches):
    experts = make_experts()
    inputs = rows(experts, 70)
    assert max_abs(experts(*inputs), by_hand(experts, *inputs)) < 1e-5
    assert launches == []  # too many rows for it
    for num_rows, top_k in ((5, 1), (1, 1), (64, 1), (32, 2), (65, 1), (33, 2)):
        checked = [] if num_rows != 5 else 2 * [37, 69, 13, 29]
        del launches[:]
        inputs = rows(experts, num_rows, top_k)
        assert max_abs(experts(*inputs), by_hand(experts, *inputs)) < 1e-5
        assert launches == checked + ([num_rows * top_k] * 2 if num_rows * top_k <= 64 else [])


@torch.no_grad()
@pytest.mark.parametrize("how", ["last inner column", "does not compile"])
def test_a_spoilt_kernel_is_not_used_and_said_once(how, on_a_gpu, caplog, monkeypatch, tmp_path):
    """Forced it is launched all the same."""
    triton_interpreter.spoil(monkeypatch, tmp_path, *SPOILT[how])
    experts = make_experts()
    inputs = rows(experts, 5)
    for _ in range(3):
        assert max_abs(experts(*inputs), by_hand(experts, *inputs)) < 1e-5
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "does not use its Triton kernel" in record.getMessage()
    caplog.clear()
    with forced("kernels"):
        if how == "does not compile":
            with pytest.raises(Exception, match="no such M"):
                experts(*inputs)
        else:
            assert max_abs(experts(*inputs), by_hand(experts, *inputs)) > 1e-3
    assert not caplog.records


# Graphs


def compiled(experts):
    graphs = []

    def backend(module, inputs, **_):
        graphs.append({node.target for node in module.graph.nodes})
        return module

    torch._dynamo.reset()
    return torch.compile(experts, fullgraph=True, backend=backend), graphs


def has_kernel(graph):
    return any("device_product" in str(target) for target in graph)


@torch.no_grad()
def test_a_compiler_is_told_what_is_known(on_a_gpu, launches):
    """Nothing runs while it reads along; it takes the other way."""
    experts = make_experts()
    inputs = rows(experts, 5)
    for _ in range(2):
        call, graphs = compiled(experts)
        assert max_abs(call(*inputs), by_hand(experts, *inputs)) < 1e-5
        assert len(graphs) == 1 and not has_kernel(graphs[0]) and launches == []

    experts(*inputs)
    assert launches[-2:] == [5, 5]
    call, graphs = compiled(experts)
    del launches[:]
    assert max_abs(call(*inputs), by_hand(experts, *inputs)) < 1e-5
    assert len(graphs) == 1 and has_kernel(graphs[0]) and launches == [5, 5]


@torch.no_grad()
def test_sizes_that_a_compiler_leaves_open(on_a_gpu):
    """Experts that are no parameters, as in expert parallelism, and any number of rows."""
    experts = make_experts()
    check_kernels(experts)
    for name in ("gate_up_proj", "down_proj"):
        stack = getattr(experts, name).detach()
        delattr(experts, name)
        setattr(experts, name, stack)
    torch._dynamo.reset()
    call = torch.compile(experts, fullgraph=True, dynamic=True, backend="eager")
    for num_rows in (5, 9, 70):
        inputs = rows(experts, num_rows)
        assert max_abs(call(*inputs), by_hand(experts, *inputs)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("trace", ["jit", "export"])
def test_programs_for_all_numbers_of_rows_do_without(trace, on_a_gpu, launches):
    """Known or not: nothing is tried while somebody traces."""
    experts = make_experts()
    inputs = rows(experts, 5)
    for is_known in (False, True):
        if is_known:
            experts(*inputs)
            del launches[:]
        if trace == "jit":
            program = torch.jit.trace(experts, inputs, check_trace=False)
        else:
            program = torch.export.export(experts, inputs).module()
        assert max_abs(program(*inputs), by_hand(experts, *inputs)) < 1e-5 and launches == []


@torch.no_grad()
def test_fake_tensors_are_told_what_is_known(on_a_gpu, launches):
    """As in a tracer that has only shapes."""
    experts = make_experts()
    x, ids, weights = rows(experts, 5)

    def call(x, gate_up, down):
        parameters = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(experts, parameters, (x, ids, weights))

    for is_known in (False, True):
        if is_known:
            experts(x, ids, weights)
            del launches[:]
        inputs = x, experts.gate_up_proj.detach(), experts.down_proj.detach()
        traced = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        assert has_kernel({node.target for node in traced.graph.nodes}) is is_known and launches == []
        assert max_abs(traced(*inputs), by_hand(experts, x, ids, weights)) < 1e-5
        assert launches == [5, 5] * is_known


def test_a_check_holds_for_its_strides(launches):
    """Kernels are compiled for them."""
    gate_up, _ = stacks()
    wide = torch.zeros(3, 40, 51)
    wide[..., :48] = gate_up
    checked = [37, 69, 13, 29]
    for weight, launched in ((gate_up, checked), (wide[..., :48], checked), (gate_up.clone(), [])):
        stack = plain_stack(weight)
        assert has_gpu_kernel(stack.form, stack.parts, stack.sizes, None, 3)
        assert launches == launched
        del launches[:]


def test_generate_checks_before_it_compiles(on_a_gpu, launches):
    """Each step of the one graph then runs the kernel, two experts for each of two tokens."""
    case = next(case for case in MODELS if case.name == "LlamoeForCausalLM")
    model = case.make_small(**SIZES)
    inputs = case.inputs(padding=(0, 2), length=70)
    options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation="static")
    graphs = []

    def backend(module, inputs, **_):
        graphs.append({node.target for node in module.graph.nodes})
        return module

    compile_config = CompileConfig(fullgraph=True, backend=backend)
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    given = model.generate(**inputs, **options, compile_config=compile_config)
    assert len(graphs) == 1 and has_kernel(graphs[0])
    assert launches[-7:] == [29, *[4, 4] * 3]
    model.set_experts_implementation("eager")
    assert torch.equal(given, model.generate(**inputs, **options, disable_compile=True))


def test_check_kernels_checks_nothing_that_is_not_asked_for(on_a_gpu, launches):
    experts = make_experts()
    for name in ("eager", "batched_mm"):
        experts.config._experts_implementation = name
        check_kernels(experts)
    experts.config._experts_implementation = "llamoe"
    check_kernels(experts.to(torch.float64))  # which the kernel does not take
    check_kernels(experts.to("meta"))
    assert launches == []
