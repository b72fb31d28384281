"""Plain experts on GPUs: when the Triton kernels are used, and, on a GPU, that they are right.

`support/interpreted_products.py`, which `kernels/test_packed_rows.py` starts, compares the kernels' numbers on a CPU.
The tests marked `gpu` run them on a GPU, also in CUDA graphs, where the host must not wait.
"""

import pytest
import torch
from support.mixtures import forced, make_experts
from support.models import stock_text_config
from torch import nn

import llamoe
from llamoe.modeling.formats import format
from llamoe.modeling.kernels import packed_rows
from llamoe.modeling.moe import products
from llamoe.modeling.moe.experts import Experts

BF16 = torch.bfloat16
CUDA = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    """A stand-in for a GPU of compute capability 9.0, with Triton."""
    monkeypatch.setattr(packed_rows, "_HAS_TRITON", True)
    monkeypatch.setattr(packed_rows, "_INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(
    ("fits", "case"),
    [
        (True, {}),
        (True, {"num_rows": 64, "dtype": torch.float32}),
        (True, {"num_rows": 1, "dtype": torch.float16, "sizes": "aligned"}),
        (False, {"num_rows": 65}),
        (False, {"needs_gradient": True}),
        (False, {"dtype": torch.float64}),
        (False, {"device": torch.device("cpu")}),
        (False, {"device": torch.device("meta")}),
        # Autocast would cast the weights.
        (False, {"dtype": torch.float32, "product_dtype": BF16}),
        # No Triton; AMD's GPU; an old GPU.
        (False, {"llamoe.modeling.kernels.packed_rows._HAS_TRITON": False}),
        (False, {"torch.version.hip": "6.4"}),
        (False, {"torch.cuda.get_device_capability": lambda device: (7, 5)}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_when_kernels_are_used(hopper, fits, case, monkeypatch):
    """The check of a kernel, if it is run, is replaced by one that finds it right."""
    case = {"num_rows": 4, "dtype": BF16, "device": CUDA, "needs_gradient": False, "sizes": "odd", **case}
    for name, value in case.items():
        if "." in name:
            monkeypatch.setattr(name, value)
    if "product_dtype" in case:
        monkeypatch.setattr(Experts, "product_dtype", lambda self: case["product_dtype"])
    device, dtype = case["device"], case["dtype"]
    monkeypatch.setattr(Experts, "device", device)
    monkeypatch.setattr(format, "_why_no_gpu_kernel", lambda _: packed_rows.why_no_gpu_kernel(device))
    monkeypatch.setattr(format, "is_right", lambda *_: True)
    experts = make_experts(case["sizes"], dtype)
    assert experts.has_kernels(case["num_rows"], case["needs_gradient"]) is fits


# On a GPU

SCOUT = dict(hidden_size=5120, intermediate_size=8192, device="cuda", dtype=torch.bfloat16)


def draw(num_rows, num_experts, hidden_size, intermediate_size, **where):
    """Draw rows and weights on a device; results have a standard deviation of about one half."""
    x = torch.randn(num_rows, hidden_size, **where)
    gate_up = torch.randn(num_experts, hidden_size, 2 * intermediate_size, **where).mul_(hidden_size**-0.5)
    down = torch.randn(num_experts, intermediate_size, hidden_size, **where).mul_(intermediate_size**-0.5)
    return x, gate_up, down, torch.randint(num_experts, (num_rows,), device=x.device)


def experts_of(gate_up, down):
    """Return experts with these weights."""
    config = llamoe.from_stock(stock_text_config())
    config._experts_implementation = "llamoe"
    experts = Experts(config)
    experts.num_experts = len(down)
    experts.gate_up_proj, experts.down_proj = (
        nn.Parameter(stack, requires_grad=False) for stack in (gate_up, down)
    )
    return experts


def one_each(x, ids):
    """Return inputs of experts that send each row to one expert."""
    return x, ids[:, None], torch.ones(len(ids), 1, dtype=x.dtype, device=x.device)


def by_kernels(x, gate_up, down, ids):
    """Compute each row's expert by the kernels."""
    with forced("kernels"):
        return experts_of(gate_up, down)(*one_each(x, ids))


def plain_version(x, gate_up, down, ids):
    """Compute by torch's operations, in a loop on the host."""
    return experts_of(gate_up, down).loop_over_experts(*one_each(x, ids))


def check_on_gpu(given, inputs):
    """Check that errors, measured against float32, are at most 1.2 times those of the plain version."""
    x, gate_up, down, ids = inputs
    truth = plain_version(x.float(), gate_up.float(), down.float(), ids)
    plain = plain_version(*inputs)
    errors = [(out.float() - truth).square().mean().sqrt() for out in (given, plain)]
    assert truth.std() > 0.1
    assert errors[0] <= 1.2 * errors[1] + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 33, 64, 128])
@torch.no_grad()
def test_kernels_equal_the_plain_version_on_a_gpu(num_rows):
    inputs = draw(num_rows, 6, **SCOUT)
    check_on_gpu(by_kernels(*inputs), inputs)
    inputs[3].fill_(4)
    check_on_gpu(by_kernels(*inputs), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 17, 64])
@torch.no_grad()
def test_odd_sizes_on_a_gpu(num_rows, dtype):
    for sizes in ((52, 36), (1, 1), (131, 67), (512, 1024)):
        x, gate_up, down, ids = draw(num_rows, 7, *sizes, device="cuda", dtype=dtype)
        gate_up[3] = float("nan")
        ids[ids == 3] = 7
        given = by_kernels(x, gate_up, down, ids)
        plain = plain_version(x, gate_up, down, ids)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}[dtype]
        torch.testing.assert_close(given, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@torch.no_grad()
def test_weights_beyond_two_to_the_31_elements_on_a_gpu():
    """The last of 32 experts begins at element 2.6e9; all weights before it are NaN."""
    x, gate_up, down, _ = draw(3, 3, **SCOUT)
    many_gate_up = torch.full((32, *gate_up.shape[1:]), float("nan"), device="cuda", dtype=torch.bfloat16)
    many_down = torch.full((32, *down.shape[1:]), float("nan"), device="cuda", dtype=torch.bfloat16)
    many_gate_up[31], many_down[31] = gate_up[0], down[0]
    ids = torch.full((3,), 31, device="cuda")
    given = by_kernels(x, many_gate_up, many_down, ids)
    assert torch.equal(given, by_kernels(x, gate_up, down, torch.zeros_like(ids)))


@pytest.mark.gpu
@torch.no_grad()
def test_compiled_into_one_graph_on_a_gpu():
    """`reduce-overhead` captures a CUDA graph, which is right for several inputs without another compilation."""
    x, gate_up, down, ids = draw(5, 6, **SCOUT)
    experts = experts_of(gate_up, down)

    def scaled(x, ids, scores):
        return experts(*one_each(x * scores, ids)) + x

    compiled = torch.compile(scaled, fullgraph=True, mode="reduce-overhead", dynamic=False)
    with forced("kernels"), torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            x.normal_()
            ids.random_(6)
            scores = torch.rand(5, 1, device="cuda", dtype=torch.bfloat16)
            given = compiled(x, ids, scores)
            expected = scaled(x, ids, scores)
            torch.testing.assert_close(given, expected, rtol=2**-6, atol=2**-6)


# On a GPU, with the check before the first use


def drawn_experts(num_rows, hidden_size=1024, intermediate_size=512, dtype=torch.bfloat16):
    """Return six experts, and inputs for them."""
    x, gate_up, down, ids = draw(num_rows, 6, hidden_size, intermediate_size, device="cuda", dtype=dtype)
    return experts_of(gate_up, down), one_each(x, ids)


def assert_near(given, experts, inputs):
    expected = experts.loop_over_experts(*inputs).float()
    assert expected.std() > 0.01
    assert (given.float() - expected).abs().max() < 4 * torch.finfo(given.dtype).eps * expected.abs().max()


@pytest.fixture
def no_kernel_checked(monkeypatch):
    monkeypatch.setattr(packed_rows, "_FAILURES", {})


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1024, 512), (72, 51)], ids=str)
def test_first_use_on_a_gpu(sizes, dtype, no_kernel_checked):
    """The kernels for both stacks are checked, and are right."""
    experts, inputs = drawn_experts(5, *sizes, dtype)
    assert_near(experts(*inputs), experts, inputs)
    assert list(packed_rows._FAILURES.values()) == ["", ""]


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_after_the_first_use(no_kernel_checked, monkeypatch):
    """A graph captures kernels that were checked before, and no others."""
    experts, inputs = drawn_experts(5)
    experts(*inputs)
    torch.cuda.synchronize()
    launched = []
    for module in (packed_rows, products):
        product = module.packed_product
        monkeypatch.setattr(
            module, "packed_product", lambda *args, it=product: launched.append(1) or it(*args)
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(*inputs)
    assert launched == [1, 1]
    for tensor, new in zip(inputs, drawn_experts(5)[1], strict=True):
        tensor.copy_(new)
    graph.replay()
    assert_near(captured, experts, inputs)

    packed_rows._FAILURES.clear()
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        # There torch's grouped product waits for the host, and cannot be captured.
        return
    with forced("operators"):
        # Run the product that the capture will use: its first call allocates memory.
        experts(*inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        experts(*inputs)
    assert launched == [1, 1]


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("num_rows", [5, 40])
def test_the_host_waits_only_for_the_check(num_rows, no_kernel_checked):
    experts, inputs = drawn_experts(num_rows)
    experts(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        given = experts(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_near(given, experts, inputs)
