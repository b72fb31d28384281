"""The experts for few rows: plain version, operator, and Triton kernels as far as a machine without a GPU can tell.

The kernels' numbers are proven by `interpreted_kernels`, which `test_under_the_interpreter` starts. That they
compile for a Hopper GPU is tried here with the compiler and assembler that come with Triton; that they run there, in
graphs and without asking the host, is for the tests marked `gpu`.
"""

import ast
import re
from pathlib import Path

import pytest
import torch
from support.gpu_compiler import ELEMENTS, SHARED, compile_kernel, programs
from support.models import make_asymmetric, stock_text_config
from transformers.integrations.moe import batched_mm_experts_forward

import llamoe
from llamoe.modeling.kernels import few_rows
from llamoe.modeling.kernels.few_rows import (
    PLANS,
    TRITON_MAX_ROWS,
    constants,
    few_rows_experts,
    few_rows_experts_reference,
    few_rows_fits,
    warps_of,
)
from llamoe.modeling.moe.experts import Experts

CUDA = torch.device("cuda", 0)


def draw(num_rows, num_experts, hidden_size, intermediate_size, **where):
    """Rows and weights, drawn where they are wanted, with results of a deviation of about one half."""
    x = torch.randn(num_rows, hidden_size, **where)
    gate_up = torch.randn(num_experts, hidden_size, 2 * intermediate_size, **where).mul_(hidden_size**-0.5)
    down = torch.randn(num_experts, intermediate_size, hidden_size, **where).mul_(intermediate_size**-0.5)
    return x, gate_up, down, torch.randint(num_experts, (num_rows,), device=x.device)


def test_triton_is_imported_only_when_a_kernel_runs():
    """At the top of the files that hold kernels, and of these nowhere but inside functions."""
    folder = Path(few_rows.__file__).parents[1]
    for path in folder.rglob("*.py"):
        if not path.stem.endswith("_triton"):
            nodes = ast.parse(path.read_text()).body
            imported = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not [line for line in imported if "triton" in line], path
    assert (folder / "kernels/few_rows_triton.py").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plain_version_equals_batched_mm_of_transformers(dtype):
    config = llamoe.from_stock(stock_text_config())
    experts = make_asymmetric(Experts(config)).to(dtype)
    x = torch.randn(23, config.hidden_size, dtype=dtype)
    ids = torch.randint(config.num_local_experts, (23,))
    with torch.no_grad():
        expected = batched_mm_experts_forward(experts, x, ids[:, None], torch.ones(23, 1, dtype=dtype))
        given = few_rows_experts_reference(x, experts.gate_up_proj, experts.down_proj, ids)
    assert expected.float().std() > 0.3
    # Products of one row and of several may be summed in another order.
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)


def test_rows_of_no_expert_are_zero_in_the_plain_version():
    x, gate_up, down, ids = draw(7, 3, 20, 12)
    ids[1], ids[6] = 3, -1
    given = few_rows_experts(x, gate_up, down, ids)
    assert (given[[1, 6]] == 0).all()
    known = (ids >= 0) & (ids < 3)
    # Fewer rows of an expert may be summed in another order.
    expected = few_rows_experts(x[known], gate_up, down, ids[known])
    torch.testing.assert_close(given[known], expected, rtol=0, atol=1e-6)
    assert few_rows_experts(x[:0], gate_up, down, ids[:0]).shape == (0, 20)


def test_it_is_an_operator():
    """Its shapes without its numbers, that nothing is changed or aliased, and all of it within one graph."""
    inputs = draw(5, 3, 20, 12)
    checked = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(few_rows_experts, inputs, test_utils=checked)

    def double(*inputs):
        return few_rows_experts(*inputs) * 2

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), double(*inputs))


def test_a_gradient_is_refused():
    x, gate_up, down, ids = draw(5, 3, 20, 12)
    given = few_rows_experts(x.requires_grad_(), gate_up, down, ids)
    with pytest.raises(RuntimeError, match="autograd"):
        given.sum().backward()


@pytest.mark.parametrize(
    ("fits", "change"),
    [
        (True, {}),
        (True, {"num_rows": TRITON_MAX_ROWS, "dtype": torch.float32, "hidden_act": "swish"}),
        (True, {"num_rows": 1, "hidden_size": 51, "intermediate_size": 1, "dtype": torch.float16}),
        (False, {"num_rows": TRITON_MAX_ROWS + 1}),
        (False, {"dtype": torch.float64}),
        (False, {"hidden_act": "gelu"}),
        (False, {"device": torch.device("cpu")}),
        (False, {"device": torch.device("meta")}),
    ],
    ids=str,
)
def test_what_fits(monkeypatch, fits, change):
    monkeypatch.setattr(few_rows, "_HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    case = dict(num_rows=4, hidden_size=64, intermediate_size=96, dtype=torch.bfloat16, device=CUDA)
    assert few_rows_fits(**{**case, "hidden_act": "silu", **change}) is fits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llamoe.modeling.kernels.few_rows._HAS_TRITON", False),
        ("torch.version.hip", "6.4"),
        ("torch.cuda.get_device_capability", lambda device: (7, 5)),
    ],
    ids=["no Triton", "AMD", "an old GPU"],
)
def test_where_kernels_cannot_run(monkeypatch, name, value):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(name, value)
    assert not few_rows_fits(4, 64, 96, torch.bfloat16, CUDA, "silu")


# What a launch says of its arguments: widths, and which are multiples of 16 (`!`) or one.
ALIGNED = {"num_rows": "i32", "num_experts": "i32", "stride_xh": 1, "stride_wf": 1, "stride_ids": 1}
GATE_UP = ["hidden_size", "intermediate_size", "stride_xn", "stride_we", "stride_wh"]
DOWN = ["hidden_size", "intermediate_size", "split_size", "stride_we", "stride_wi"]


def compile_for(monkeypatch, folder, capability, kernel_name, num_rows, dtype, aligned=True):
    """Compile and assemble a kernel as a launch would; gives Triton's result, and what the assembler says of it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from llamoe.modeling.kernels import few_rows_triton

    kernel = getattr(few_rows_triton, kernel_name)
    is_first, plan = kernel_name == "gate_up_kernel", PLANS[dtype.itemsize]
    tile = plan.gate_up if is_first else plan.down
    room = min(plan.shared_bytes, SHARED[capability] * 1024 - 2048)
    arguments = {**ALIGNED, **dict.fromkeys(GATE_UP if is_first else DOWN, "i32!")}
    if not is_first:
        arguments["stride_wh"] = 1
    if not aligned:
        # Everything that a launch may find to be one, and everything else without alignment.
        arguments = {name: 1 if name.startswith("stride") else "i64" for name in arguments}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            element = "i64" if name == "ids_ptr" else ELEMENTS[dtype]
            arguments[name] = f"*{element}{'!' if aligned else ''}"
    arguments |= constants(tile, 2 if is_first else 1, num_rows, dtype.itemsize, room)
    return compile_kernel(monkeypatch, folder, capability, kernel, arguments, warps_of(tile, num_rows))


KERNELS = ("gate_up_kernel", "down_kernel")


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("kernel_name", KERNELS)
def test_kernels_compile(monkeypatch, tmp_path, kernel_name, capability):
    """For a decode step: on tensor cores, with copies of 16 bytes that run ahead, and no register kept in memory."""
    compiled, usage = compile_for(monkeypatch, tmp_path, capability, kernel_name, 1, torch.bfloat16)
    ptx = compiled.asm["ptx"]
    assert usage["STACK"] == 0 and "mma.sync" in ptx
    widths = set(re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?, (0x\w+|\d+)", ptx))
    assert widths == {"0x10"} or widths == {"16"}, widths
    shared = compiled.metadata.shared
    assert shared <= SHARED[capability] * 1024
    # Two programs a multiprocessor where shared memory is as much as the plans assume; elsewhere one fills it.
    if capability in (90, 100):
        assert programs(capability, shared, usage["REG"], 4) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel_name", KERNELS)
def test_kernels_compile_for_all_rows(monkeypatch, tmp_path, kernel_name, dtype, capability):
    """No register is kept in memory in 16 bits; in float32, which has no tensor cores to wait for, up to ten are."""
    for num_rows in (1, 17, 64, TRITON_MAX_ROWS):
        compiled, usage = compile_for(monkeypatch, tmp_path, capability, kernel_name, num_rows, dtype)
        assert compiled.metadata.shared <= SHARED[capability] * 1024
        assert usage["STACK"] <= (40 if dtype == torch.float32 else 0), (num_rows, usage)


FLOAT32 = (4, torch.float32, True)
UNALIGNED = (3, torch.float16, False)


@pytest.mark.parametrize(
    ("kernel_name", "call"),
    [
        ("gate_up_kernel", FLOAT32),
        ("down_kernel", UNALIGNED),
        pytest.param("gate_up_kernel", UNALIGNED, marks=pytest.mark.slow),
        pytest.param("down_kernel", FLOAT32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_dtypes_and_alignments_compile_for_hopper(monkeypatch, tmp_path, kernel_name, call):
    """In float32 without tensor cores, which would round to TF32; without alignment too."""
    ptx = compile_for(monkeypatch, tmp_path, 90, kernel_name, *call)[0].asm["ptx"]
    if call == FLOAT32:
        assert "mma" not in ptx and "fma.rn.f32" in ptx
    else:
        assert "mma.sync" in ptx


SCOUT = dict(hidden_size=5120, intermediate_size=8192, device="cuda", dtype=torch.bfloat16)


def check_on_gpu(given, inputs):
    """As near to float32 as the plain version is."""
    x, gate_up, down, ids = inputs
    truth = few_rows_experts_reference(x.float(), gate_up.float(), down.float(), ids)
    plain = few_rows_experts_reference(*inputs)
    errors = [(out.float() - truth).square().mean().sqrt() for out in (given, plain)]
    assert truth.std() > 0.1
    assert errors[0] <= 1.2 * errors[1] + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 33, 64, 128])
@torch.no_grad()
def test_kernels_equal_the_plain_version_on_a_gpu(num_rows):
    inputs = draw(num_rows, 6, **SCOUT)
    assert few_rows_fits(num_rows, 5120, 8192, torch.bfloat16, CUDA, "silu")
    check_on_gpu(few_rows_experts(*inputs), inputs)
    inputs[3].fill_(4)
    check_on_gpu(few_rows_experts(*inputs), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 17, 64])
@torch.no_grad()
def test_odd_sizes_on_a_gpu(num_rows, dtype):
    for sizes in ((52, 36), (1, 1), (131, 67), (512, 1024)):
        x, gate_up, down, ids = draw(num_rows, 7, *sizes, device="cuda", dtype=dtype)
        gate_up[3] = float("nan")
        ids[ids == 3] = 7
        given = few_rows_experts(x, gate_up, down, ids)
        plain = few_rows_experts_reference(x, gate_up, down, ids)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}[dtype]
        torch.testing.assert_close(given, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@torch.no_grad()
def test_weights_beyond_two_to_the_31_elements_on_a_gpu():
    """The last of 32 experts begins at element 2.6e9; what stands before it has no numbers."""
    x, gate_up, down, _ = draw(3, 3, **SCOUT)
    many_gate_up = torch.full((32, *gate_up.shape[1:]), float("nan"), device="cuda", dtype=torch.bfloat16)
    many_down = torch.full((32, *down.shape[1:]), float("nan"), device="cuda", dtype=torch.bfloat16)
    many_gate_up[31], many_down[31] = gate_up[0], down[0]
    ids = torch.full((3,), 31, device="cuda")
    given = few_rows_experts(x, many_gate_up, many_down, ids)
    assert torch.equal(given, few_rows_experts(x, gate_up, down, torch.zeros_like(ids)))


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_serves_other_ids():
    """Captured once, replayed for rows of other experts, for one expert only, and for none."""
    x, gate_up, down, ids = draw(9, 6, **SCOUT)
    few_rows_experts(x, gate_up, down, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = few_rows_experts(x, gate_up, down, ids)
    for new_ids in (torch.randint(6, (9,)), torch.full((9,), 2), torch.full((9,), 6)):
        ids.copy_(new_ids)
        x.normal_()
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, few_rows_experts(x, gate_up, down, ids))


@pytest.mark.gpu
@torch.no_grad()
def test_the_host_waits_for_nothing():
    inputs = draw(7, 6, **SCOUT)
    few_rows_experts(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        given = few_rows_experts(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_on_gpu(given, inputs)


@pytest.mark.gpu
@torch.no_grad()
def test_compiled_into_one_graph_on_a_gpu():
    """With `reduce-overhead`, which records a CUDA graph, for several inputs and without a recompilation."""

    def scaled(x, gate_up, down, ids, scores):
        return few_rows_experts(x * scores, gate_up, down, ids) + x

    compiled = torch.compile(scaled, fullgraph=True, mode="reduce-overhead", dynamic=False)
    x, gate_up, down, ids = draw(5, 6, **SCOUT)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            x.normal_()
            ids.random_(6)
            scores = torch.rand(5, 1, device="cuda", dtype=torch.bfloat16)
            given = compiled(x, gate_up, down, ids, scores)
            expected = scaled(x, gate_up, down, ids, scores)
            torch.testing.assert_close(given, expected, rtol=2**-6, atol=2**-6)
