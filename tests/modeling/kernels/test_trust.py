"""Who trusts the kernels for few rows, and after what: what a CPU can tell, and what a GPU would.

`interpreted_trust` tries kernels, whole and spoilt, under Triton's interpreter; `test_under_the_interpreter` starts it.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from support.models import make_asymmetric, stock_text_config

import llamoe
from llamoe.modeling.kernels import few_rows, trial, trust
from llamoe.modeling.kernels.few_rows import PLANS, TRITON_MAX_ROWS, constants, row_counts_of_launches
from llamoe.modeling.kernels.trial import describe, made_up_experts
from llamoe.modeling.moe import grouped_mm_limits
from llamoe.modeling.moe.stores import Experts

CPU = torch.device("cpu")


@pytest.mark.parametrize("element_size", PLANS)
@pytest.mark.parametrize(
    "sizes", [(16, 5120, 8192), (128, 5120, 8192), (7, 52, 36), (1, 1024, 512), (64, 768, 64)]
)
def test_every_launch_is_among_those_that_are_tried(sizes, element_size):
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


def test_made_up_experts_take_the_memory_of_one():
    gate_up = torch.empty(128, 96, 2 * 80, dtype=torch.bfloat16)
    down = torch.empty(128, 96, 80, dtype=torch.bfloat16).transpose(1, 2)
    made_up = made_up_experts(describe(gate_up, down), CPU)
    for given, real in zip(made_up, (gate_up, down), strict=True):
        assert given.shape == real.shape and given.dtype == real.dtype
        assert given.stride()[1:] == real.stride()[1:] and given.stride(0) % 16 == 0
        assert given.untyped_storage().nbytes() < 1.5 * real[0].numel() * 2
        assert not any(torch.equal(given[0], given[i]) for i in (1, 2, 127))
    x = torch.randn(64, 96)
    gate, up = (x @ made_up[0][5].float()).chunk(2, -1)
    assert 0.5 < ((torch.nn.functional.silu(gate) * up) @ made_up[1][5].float()).std() < 5


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"LLAMOE_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"LLAMOE_CACHE": "~/b", "XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/h/b"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/llamoe"),
        ({"HOME": "/h"}, "/h/.cache/llamoe"),
    ],
)
def test_where_answers_are_kept(environment, folder, monkeypatch):
    for name in ("LLAMOE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert trust._file_for({"a": "b"}).parent == Path(folder)


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
        monkeypatch.setattr("llamoe.modeling.moe.stores.is_torchdynamo_compiling", lambda: True)
        fits.append(experts.fits_grouped_mm(gpu))
        monkeypatch.setattr("llamoe.modeling.moe.stores.is_torchdynamo_compiling", lambda: False)
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
def nothing_known(monkeypatch, tmp_path):
    for name in ("_ANSWERS", "_ANSWERS_TO"):
        monkeypatch.setattr(trust, name, {})
    monkeypatch.setenv("LLAMOE_CACHE", str(tmp_path))


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1024, 512), (72, 51)], ids=str)
def test_first_use_on_a_gpu(sizes, dtype, nothing_known, tmp_path, caplog):
    """The kernel is tried apart and here, found right, timed, and the answer kept; the next process reads it."""
    experts = experts_on_gpu(dtype, hidden_size=sizes[0], intermediate_size=sizes[1])
    inputs = rows_on_gpu(experts, 5)
    assert_near(experts(*inputs), experts, inputs)
    (file,) = tmp_path.glob("*.json")
    content = json.loads(file.read_text())
    assert content["answer"]["failure"] == "" and 0 <= content["answer"]["rows"] <= TRITON_MAX_ROWS
    assert content["question"]["device"] == torch.cuda.get_device_name() and content["question"]["driver"]
    assert "1: " in content["answer"]["times"] and not [r for r in caplog.records if r.levelname == "WARNING"]
    trust._ANSWERS.clear()
    trust._ANSWERS_TO.clear()
    known = trust.rows_known(experts.down_proj.device, describe(experts.gate_up_proj, experts.down_proj))
    assert known == content["answer"]["rows"]


@pytest.mark.gpu
@torch.no_grad()
def test_the_trial_goes_through_in_both_processes_on_a_gpu():
    """None is the answer of the process of its own, too, and not that there was none."""
    experts = experts_on_gpu()
    description = describe(experts.gate_up_proj, experts.down_proj)
    device = experts.down_proj.device
    task = dict(path=sys.path, device=str(device), facts=trial.device_facts(device), experts=description)
    assert trial._run_apart(task) == ""
    assert trial.find_difference(experts.gate_up_proj, experts.down_proj) is None


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_after_the_first_use(nothing_known, monkeypatch):
    """Tried before, used within; without an answer nothing is tried while it is captured."""
    monkeypatch.setattr(trust, "find_fastest_rows", lambda *_: (64, "not measured"))
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

    trust._ANSWERS.clear()
    trust._ANSWERS_TO.clear()
    monkeypatch.setenv("LLAMOE_CACHE", os.environ["LLAMOE_CACHE"] + "/other")
    monkeypatch.setattr(trust, "_try", None)
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
def test_the_host_waits_for_the_trial_only(nothing_known, monkeypatch):
    monkeypatch.setattr(trust, "find_fastest_rows", lambda *_: (64, "not measured"))
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
def test_compiled_with_cuda_graphs_after_the_first_use(nothing_known, monkeypatch):
    monkeypatch.setattr(trust, "find_fastest_rows", lambda *_: (64, "not measured"))
    experts = experts_on_gpu()
    inputs = rows_on_gpu(experts, 5)
    experts(*inputs)
    call = torch.compile(experts, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        for tensor, new in zip(inputs, rows_on_gpu(experts, 5), strict=True):
            tensor.copy_(new)
        assert_near(call(*inputs).clone(), experts, inputs)


@pytest.mark.gpu
@torch.no_grad()
def test_the_crossover_is_measured_on_a_gpu(nothing_known):
    """By powers of two, up to the first at which the kernel is slower; how many rows that are nobody knows yet."""
    experts = experts_on_gpu(num_local_experts=16, hidden_size=5120, intermediate_size=2048)
    experts(*rows_on_gpu(experts, 1))
    (answer,) = trust._ANSWERS.values()
    measured = re.findall(r"(\d+): (\S+) and (\S+) ms", answer.times)
    assert answer.failure == "" and measured, answer
    faster = [int(rows) for rows, kernel, other in measured if float(kernel) <= float(other)]
    assert [int(rows) for rows, _, _ in measured] == [2**i for i in range(len(measured))]
    assert answer.rows == (faster[-1] if faster else 0) and len(measured) - len(faster) <= 1


def test_stored_answers_are_listed_for_the_device_that_they_are_of(tmp_path, monkeypatch):
    """What `llamoe doctor` shows: not those of other devices and versions, and not what is damaged."""
    pytest.importorskip("triton", reason="needs triton, which torch brings where it is built for CUDA")
    monkeypatch.setenv("LLAMOE_CACHE", str(tmp_path))
    kinds = [f"torch.bfloat16 {experts} 96 80 15360 160 1 7680 96 1" for experts in (3, 5, 7)]
    given = [trust.Answer(64, times="1: 1 and 2 ms"), trust.Answer(0, "it is wrong"), trust.Answer(8)]
    for experts, answer in zip(kinds, given, strict=True):
        question = trust._question(CPU, experts)
        trust._write(trust._file_for(question), question, answer)
    other = {**trust._question(CPU, kinds[0]), "driver": "another"}
    trust._write(trust._file_for(other), other, trust.Answer(1))
    damaged = trust._file_for(trust._question(CPU, kinds[2]))
    damaged.write_text(damaged.read_text()[:-9])
    (tmp_path / "few_rows-nothing.json").write_text("[]")
    assert trust.answers_on(CPU) == dict(zip(kinds[:2], given[:2], strict=True))
