"""Test the check of each Triton kernel before its first use, and that graphs contain only checked kernels."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

from llamoe.modeling.formats import has_gpu_kernel
from llamoe.modeling.kernels import packed_rows, packed_rows_triton
from llamoe.modeling.moe import check_kernels
from llamoe.modeling.moe.products import plain_stack

from .interpreted import BF16, CLOSE, FP16, SIZES, distance, make_packed
from .mixtures import by_hand, make_experts, make_rows
from .models import MODELS, max_abs

# Faults for the kernels: text in their source, and the text that replaces it. Plain experts show the first, experts in
# int4 the others.
SPOILT = {
    "last inner column": ("deep < num_terms - begin", "deep < num_terms - begin - 1"),
    "the last row of a second tile": (
        "rows < tl.sum(tl.where(is_expert, ends, 0), axis=0)",
        "rows < tl.sum(tl.where(is_expert, ends - (ends - starts > M), 0), axis=0)",
    ),
    "rows of no expert": ("zeros = tl.zeros((M, COLUMNS),", "zeros = tl.full((M, COLUMNS), 1e-3,"),
    "as with TF32": ("return tl.dot(a, b,", "return tl.dot(a.to(tl.float16).to(tl.float32), b,"),
    "does not compile": (
        "program = tl.program_id(0)",
        'tl.static_assert(M == 0, "no such M"); program = tl.program_id(0)',
    ),
}
SPOILT_INT4 = {
    "code 15": ("codes & 15, bits), words_low[None", "tl.minimum(codes & 15, 14), bits), words_low[None"),
    "the last expert": ("far = expert.to(tl.int64)", "far = tl.minimum(expert, 1).to(tl.int64)"),
    "rows behind a tile": ("is_expert = group == expert", "is_expert = group == tl.minimum(expert, 1)"),
    "high codes of gradients": ("codes >> 4, bits), words_high[:", "codes & 15, bits), words_high[:"),
}


@pytest.mark.parametrize("name", SPOILT | SPOILT_INT4)
def test_a_wrong_kernel_is_not_used_and_said_once(name, on_a_gpu, tmp_path, monkeypatch, caplog):
    """Results are right without the kernel, and a warning gives the reason once."""
    old, new = (SPOILT | SPOILT_INT4)[name]
    text = Path(packed_rows_triton.__file__).read_text()
    assert text.count(old) == 1
    (tmp_path / "spoilt.py").write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("spoilt", tmp_path / "spoilt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(packed_rows_triton, "product_kernel", module.product_kernel)

    is_trained = "gradients" in name
    if name in SPOILT:
        experts = make_experts(SIZES, num_experts=3).requires_grad_(False)
        x, ids, scores = make_rows(experts, 6, 1)
        expected, close = by_hand(experts, x, ids, scores), 1e-5
    else:
        experts, plain = make_packed("int4")
        x, ids, scores = make_rows(experts, 6, 1, BF16, past_the_end=True)
        expected, close = plain.loop_over_experts(x.double(), ids, scores.double()), CLOSE
    for _ in range(3):
        with torch.set_grad_enabled(is_trained):
            given = experts(x.requires_grad_(is_trained), ids, scores)
        assert distance(given.detach(), expected) < close
    ours = [record for record in caplog.records if record.name == "llamoe"]
    messages = [record.getMessage() for record in ours if record.levelname == "WARNING"]
    assert 1 <= len(messages) == len(set(messages))
    reason = "no such M" if name == "does not compile" else "numbers are wrong"
    assert all("does not use its Triton kernel" in it and reason in it for it in messages)
    if is_trained:
        failures = {key: failure for (key, _, _), failure in packed_rows._FAILURES.items()}
        assert not any(failure for key, failure in failures.items() if "transposed" not in key)


# Numbers of rows of the launches by which a kernel is checked.
CHECKED = [37, 69, 13, 29]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_what_weights_hold_condemns_no_kernel(value, on_a_gpu):
    """A kernel passes its check whatever numbers the weights are."""
    stack = plain_stack(torch.full((2, 24, 40), value, dtype=FP16))
    assert has_gpu_kernel(stack.form, stack.parts, stack.sizes, None, 2)


def test_a_check_holds_for_its_strides(on_a_gpu, launches):
    """A stack with other strides is checked again, as Triton compiles another kernel for it."""
    stack = torch.randn(3, 40, 48)
    wide = torch.full((6, 40, 51), float("nan"))
    wide[::2, :, :48] = stack
    for weight, launched in ((stack, CHECKED), (wide[::2, :, :48], CHECKED), (stack.clone(), [])):
        checked = plain_stack(weight)
        assert has_gpu_kernel(checked.form, checked.parts, checked.sizes, None, 3)
        assert launches == launched
        launches.clear()


@pytest.fixture
def experts():
    """Make plain experts whose weights need no gradient."""
    return make_experts(SIZES, num_experts=3).requires_grad_(False)


@torch.no_grad()
def test_first_use_checks_once(experts, on_a_gpu, launches):
    inputs = make_rows(experts, 70, 1)
    assert max_abs(experts(*inputs), by_hand(experts, *inputs)) < 1e-5
    # 70 rows are too many for the kernel.
    assert launches == []
    for num_rows, top_k in ((5, 1), (1, 1), (64, 1), (32, 2), (65, 1), (33, 2)):
        launches.clear()
        inputs = make_rows(experts, num_rows, top_k)
        assert max_abs(experts(*inputs), by_hand(experts, *inputs)) < 1e-5
        checked = 2 * CHECKED if num_rows == 5 else []
        assert launches == checked + ([num_rows * top_k] * 2 if num_rows * top_k <= 64 else [])


def test_check_kernels_checks_nothing_that_is_not_asked_for(experts, on_a_gpu, launches):
    for name in ("eager", "batched_mm"):
        experts.config._experts_implementation = name
        check_kernels(experts)
    experts.config._experts_implementation = "llamoe"
    # The kernel takes no float64, and no weights on meta.
    check_kernels(experts.to(torch.float64))
    check_kernels(experts.to("meta"))
    assert launches == []


def recording_backend():
    """Return a backend of torch.compile that changes nothing, and a list with the operators of each graph."""
    graphs = []

    def backend(module, inputs, **_):
        graphs.append({str(node.target) for node in module.graph.nodes})
        return module

    torch._dynamo.reset()
    return backend, graphs


def has_kernel(graph):
    """Return True if a graph uses the kernel for all products."""
    return "llamoe.device_product.default" in graph and "llamoe.grouped_product.default" not in graph


@torch.no_grad()
def test_a_compiler_takes_checked_kernels_alone(experts, on_a_gpu, launches):
    """While torch.compile traces, no check runs, and the kernel is used only if an earlier check passed."""
    inputs = make_rows(experts, 5, 1)
    for is_checked in (False, False, True):
        if is_checked:
            check_kernels(experts)
            launches.clear()
        backend, graphs = recording_backend()
        given = torch.compile(experts, fullgraph=True, backend=backend)(*inputs)
        assert max_abs(given, by_hand(experts, *inputs)) < 1e-5
        assert list(map(has_kernel, graphs)) == [is_checked] and launches == [5, 5] * is_checked


@torch.no_grad()
def test_a_compiler_sees_one_graph_of_packed_experts(on_a_gpu, no_counting):
    """The graph's operators may be captured in a CUDA graph."""
    packed, plain = make_packed("int4")
    x, ids, scores = make_rows(packed, 5, 2, BF16, past_the_end=True)
    check_kernels(packed)
    backend, graphs = recording_backend()
    given = torch.compile(packed, backend=backend, fullgraph=True)(x, ids, scores)
    assert distance(given, plain.loop_over_experts(x.double(), ids, scores.double())) < CLOSE
    assert list(map(has_kernel, graphs)) == [True]
    assert torch.Tag.cudagraph_unsafe not in torch.ops.llamoe.device_product.default.tags


@torch.no_grad()
def test_sizes_that_a_compiler_leaves_open(experts, on_a_gpu):
    """One compiled graph takes any number of rows; weights are plain attributes, as under expert parallelism."""
    check_kernels(experts)
    for name in ("gate_up_proj", "down_proj"):
        stack = getattr(experts, name).detach()
        delattr(experts, name)
        setattr(experts, name, stack)
    torch._dynamo.reset()
    call = torch.compile(experts, fullgraph=True, dynamic=True, backend="eager")
    for num_rows in (5, 9, 70):
        inputs = make_rows(experts, num_rows, 1)
        assert max_abs(call(*inputs), by_hand(experts, *inputs)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("trace", ["jit", "export", "fake"])
def test_tracers(trace, experts, on_a_gpu, launches):
    """Tracing launches no kernel, and only traced programs for a fixed number of rows use checked kernels."""
    inputs, weights = make_rows(experts, 5, 1), dict(experts.named_parameters())

    def call(*inputs):
        return torch.func.functional_call(experts, weights, inputs)

    for is_checked in (False, True):
        if is_checked:
            experts(*inputs)
            launches.clear()
        if trace == "jit":
            program = torch.jit.trace(experts, inputs, check_trace=False)
        elif trace == "export":
            program = torch.export.export(experts, inputs).module()
        else:
            program = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        assert launches == []
        assert max_abs(program(*inputs), by_hand(experts, *inputs)) < 1e-5
        assert launches == [5, 5] * (is_checked and trace == "fake")


def test_generate_checks_before_it_compiles(on_a_gpu, launches):
    """Each generated token runs the kernels of one graph, for two experts of each of two rows."""
    case = next(case for case in MODELS if case.name == "LlamoeForCausalLM")
    model = case.make_small(num_local_experts=3, **SIZES)
    inputs = case.inputs(padding=(0, 2), length=70)
    options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation="static")
    backend, graphs = recording_backend()
    compile_config = CompileConfig(fullgraph=True, backend=backend)
    compile_config._compile_all_devices = True
    given = model.generate(**inputs, **options, compile_config=compile_config)
    assert list(map(has_kernel, graphs)) == [True]
    assert launches[-7:] == [29, *[4, 4] * 3]
    model.set_experts_implementation("eager")
    assert torch.equal(given, model.generate(**inputs, **options, disable_compile=True))
