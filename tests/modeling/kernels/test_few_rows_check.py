"""The check of the kernels for few rows before their first use: what a CPU can tell, and what a GPU would.

`interpreted_check` checks kernels, whole and spoilt, under Triton's interpreter; `test_under_the_interpreter` starts
it.
"""

import pytest
import torch
from support.models import make_asymmetric, stock_text_config

import llamoe
from llamoe.modeling.kernels import few_rows, few_rows_check
from llamoe.modeling.kernels.few_rows import (
    PLANS,
    TRITON_MAX_ROWS,
    constants,
    few_rows_limit,
    row_counts_of_launches,
)
from llamoe.modeling.moe import grouped_mm_limits
from llamoe.modeling.moe.experts import Experts

CPU = torch.device("cpu")


@pytest.mark.parametrize("element_size", PLANS)
@pytest.mark.parametrize(
    "sizes", [(16, 5120, 8192), (128, 5120, 8192), (7, 52, 36), (1, 1024, 512), (64, 768, 64)]
)
def test_every_launch_is_among_those_that_are_checked(sizes, element_size):
    """What is compiled, and how the second product is split, for all numbers of rows."""
    num_experts, hidden, intermediate = sizes
    plan = PLANS[element_size]

    def launch(num_rows):
        tiles = [
            tuple(constants(tile, matrices, num_rows, element_size, plan.shared_bytes).items())
            for tile, matrices in ((plan.gate_up, 2), (plan.down, 1))
        ]
        return *tiles, few_rows._split_size(min(num_rows, num_experts), hidden, intermediate, plan)

    counts = row_counts_of_launches(num_experts, hidden, intermediate, element_size)
    assert counts == sorted(set(counts)) and len(counts) < 25
    assert (counts[0], counts[-1]) == (1, TRITON_MAX_ROWS)
    assert {launch(n) for n in counts} == {launch(n) for n in range(1, TRITON_MAX_ROWS + 1)}
    for before, behind in zip(range(1, TRITON_MAX_ROWS), range(2, TRITON_MAX_ROWS + 1), strict=True):
        assert launch(before) == launch(behind) or {before, behind} <= set(counts)


def test_a_check_without_memory_condemns_no_kernel(monkeypatch):
    """It is said with the bytes, and tried again when there may be room."""
    monkeypatch.setattr(few_rows_check, "_FAILURES", {})
    stacks = torch.randn(3, 40, 48) / 6, torch.randn(3, 24, 40) / 5

    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nAnd more lines.")

    with monkeypatch.context() as patch:
        patch.setattr(few_rows_check, "_plain_formula", refuse)
        with pytest.raises(torch.OutOfMemoryError, match=r"^llamoe: cpu has no room .* 131,072 bytes .*\.$"):
            few_rows_check.kernel_is_right(*stacks, may_check=True)
    assert few_rows_check._FAILURES == {}
    assert few_rows_check.kernel_is_right(*stacks, may_check=True)


@pytest.mark.parametrize(("capability", "rows"), [((8, 6), 128), ((9, 0), 64), ((10, 3), 64), ((12, 0), 128)])
def test_rows_that_the_kernel_is_taken_for(capability, rows, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert few_rows_limit(torch.device("cuda", 0)) == rows


@pytest.mark.parametrize(
    ("capability", "hip", "waits"),
    [
        ((8, 0), None, True), ((8, 9), None, True), ((9, 0), None, False), ((10, 3), None, False),
        ((12, 0), None, True), ((9, 4), "6.4", True),
    ],
)  # fmt: skip
def test_grouped_mm_waits_for_the_host_on_most_gpus(capability, hip, waits, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped_mm_limits.grouped_mm_waits(torch.device("cuda", 0)) is waits
    assert not grouped_mm_limits.grouped_mm_waits(CPU)


@pytest.mark.parametrize(
    ("make", "on_the_host", "on_a_gpu"),
    {
        "whole": (lambda: torch.empty(3, 16, 24), True, True),
        "output first": (lambda: torch.empty(3, 24, 16).transpose(1, 2), True, True),
        "rows apart": (lambda: torch.empty(3, 16, 32)[..., :24], True, True),
        "rows 25 numbers apart": (lambda: torch.empty(3, 16, 25)[..., :24], False, False),
        "columns apart": (lambda: torch.empty(3, 16, 48)[..., ::2], False, False),
        "all rows one": (lambda: torch.empty(3, 1, 24).expand(3, 16, 24), False, False),
        "matrices 386 apart": (lambda: torch.empty(1158).as_strided((3, 16, 24), (386, 24, 1)), True, False),
        "behind one number": (lambda: torch.empty(1 + 3 * 16 * 24)[1:].view(3, 16, 24), True, False),
        "1024 of them": (lambda: torch.empty(1024, 4, 4), True, False),
    }.values(),
)
def test_strides_that_grouped_mm_takes(make, on_the_host, on_a_gpu):
    """On the CPU torch itself says so; what it asks on a GPU stands in its sources."""
    weight = make().zero_() if make().stride(1) else make()
    assert grouped_mm_limits.grouped_mm_takes(weight, CPU) is on_the_host
    assert grouped_mm_limits.grouped_mm_takes(weight, torch.device("cuda", 0)) is on_a_gpu
    rows = torch.ones(5, weight.shape[1])
    ends = torch.full((len(weight),), 5, dtype=torch.int32)
    if on_the_host:
        torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    else:
        with pytest.raises(RuntimeError, match="multiple of 16 bytes|Invalid strides"):
            torch.nn.functional.grouped_mm(rows, weight, offs=ends)


def test_compilers_get_no_product_that_waits_for_the_host(monkeypatch):
    """`reduce-overhead` would put it into a CUDA graph."""
    experts = Experts(llamoe.from_stock(stock_text_config(hidden_size=64, intermediate_size=48))).bfloat16()
    gpu = torch.device("cuda", 0)
    fits = []
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        fits.append(experts.fits_grouped_mm(gpu))
        monkeypatch.setattr("llamoe.modeling.moe.grouped_mm_limits.is_torchdynamo_compiling", lambda: True)
        fits.append(experts.fits_grouped_mm(gpu))
        monkeypatch.setattr("llamoe.modeling.moe.grouped_mm_limits.is_torchdynamo_compiling", lambda: False)
    assert fits == [True, False, True, True]


# On a GPU


def experts_on_gpu(dtype=torch.bfloat16, **sizes):
    sizes = dict(num_local_experts=6, hidden_size=1024, intermediate_size=512) | sizes
    config = llamoe.from_stock(stock_text_config(**sizes))
    config._experts_implementation = "llamoe"
    experts = make_asymmetric(Experts(config)).requires_grad_(False)
    return experts.to("cuda", dtype)


def rows_on_gpu(experts, num_rows):
    x = torch.randn(num_rows, experts.down_proj.shape[2], device="cuda", dtype=experts.down_proj.dtype)
    ids = torch.randint(experts.num_experts, (num_rows, 1), device="cuda")
    return x, ids, torch.ones_like(ids, dtype=x.dtype)


def assert_near(given, experts, inputs):
    experts.config._experts_implementation = "llamoe_loop"
    expected = experts(*inputs).float()
    experts.config._experts_implementation = "llamoe"
    assert expected.std() > 0.01
    assert (given.float() - expected).abs().max() < 4 * torch.finfo(given.dtype).eps * expected.abs().max()


@pytest.fixture
def nothing_known(monkeypatch):
    monkeypatch.setattr(few_rows_check, "_FAILURES", {})


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1024, 512), (72, 51)], ids=str)
def test_first_use_on_a_gpu(sizes, dtype, nothing_known):
    """The kernel is checked and found right."""
    experts = experts_on_gpu(dtype, hidden_size=sizes[0], intermediate_size=sizes[1])
    inputs = rows_on_gpu(experts, 5)
    assert_near(experts(*inputs), experts, inputs)
    assert list(few_rows_check._FAILURES.values()) == [""]


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_after_the_first_use(nothing_known, monkeypatch):
    """Checked before, used within; nothing is checked while it is captured."""
    experts = experts_on_gpu()
    inputs = rows_on_gpu(experts, 5)
    experts(*inputs)
    torch.cuda.synchronize()
    launched = []
    run_kernels = few_rows.run_kernels
    monkeypatch.setattr(few_rows, "run_kernels", lambda *args: launched.append(1) or run_kernels(*args))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(*inputs)
    assert launched == [1]
    for tensor, new in zip(inputs, rows_on_gpu(experts, 5), strict=True):
        tensor.copy_(new)
    graph.replay()
    assert_near(captured, experts, inputs)

    few_rows_check._FAILURES.clear()
    experts.config._experts_implementation = "llamoe_grouped"
    experts(*inputs)  # what the capture will take, warmed up
    experts.config._experts_implementation = "llamoe"
    if grouped_mm_limits.grouped_mm_waits(experts.down_proj.device):
        return  # nothing else could be captured there
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        experts(*inputs)
    assert launched == [1]


@pytest.mark.gpu
@torch.no_grad()
def test_the_host_waits_for_the_check_only(nothing_known):
    experts = experts_on_gpu()
    inputs = rows_on_gpu(experts, 5)
    experts(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        given = experts(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_near(given, experts, inputs)


@pytest.mark.gpu
@torch.no_grad()
def test_compiled_with_cuda_graphs_after_the_first_use(nothing_known):
    experts = experts_on_gpu()
    inputs = rows_on_gpu(experts, 5)
    experts(*inputs)
    call = torch.compile(experts, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        for tensor, new in zip(inputs, rows_on_gpu(experts, 5), strict=True):
            tensor.copy_(new)
        assert_near(call(*inputs).clone(), experts, inputs)
