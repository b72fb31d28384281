"""Test the benchmarks on tiny sizes. No time is judged, since a busy machine would fail the test."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support import programs
from transformers import MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM

import llamoe
from benchmarks import (
    block,
    cpu,
    decoder,
    drawn_folders,
    harness,
    offload,
    processes,
    prove_gpu,
    published_sizes,
)
from benchmarks.harness import FLOAT32, OURS, STOCK, Case, ProcessorClock
from benchmarks.machine import describe
from benchmarks.weights import Setting
from llamoe.conversion import quantize

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SETTING = Setting(CPU, torch.float32)
MB = 2**20


@pytest.fixture(scope="module")
def clock():
    return ProcessorClock(cache_bytes=2**16)


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(harness, "SAMPLE", 1e-5)
    monkeypatch.setattr(harness, "SECONDS", 0.0)


def test_memory_of_known_allocations():
    """Of three tensors the first is freed before the last is allocated, so the peak is the first two."""

    def run():
        first = torch.empty(3 * MB, dtype=torch.uint8)
        second = torch.empty(5 * MB, dtype=torch.uint8)
        del first
        return [second, torch.empty(2 * MB, dtype=torch.uint8)]

    tensors, peak = harness.peak_of(run, CPU)
    assert peak == 8 * MB and len(tensors) == 2
    memory = torch.frombuffer(bytearray(MB), dtype=torch.uint8)
    # Memory that another library allocated counts once.
    assert harness.peak_of(lambda: [memory, memory[5:], torch.zeros(MB, dtype=torch.uint8)], CPU)[1] == 2 * MB


def test_outputs_that_differ_and_errors_are_failures(clock):
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))

    def fail():
        raise RuntimeError("no memory")

    runs = {STOCK: lambda: x, OURS: lambda: x + 1e-5, "wrong": lambda: x * 1.1, "nan": lambda: x * torch.nan}
    result = harness.measure(
        Case("c", {**runs, "broken": fail}, FLOAT32, memory_at_most={OURS: 2.0}), clock, 4
    )
    assert [failure.split()[0] for failure in result["failures"]] == ["wrong", "nan", "broken:"]
    assert set(result["rows"]) == set(runs) and len(result["rows"][OURS]["seconds"]) == 3
    assert (
        result["rows"][STOCK]["ratio"] == 1 and x.nbytes <= result["rows"][OURS]["peak_bytes"] < x.nbytes + 64
    )


def tiny_models():
    sizes = dict(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=101
    )
    sizes |= dict(head_dim=16, sliding_window=None)
    yield from decoder.cases("Mistral", MistralForCausalLM, MistralConfig(**sizes, num_hidden_layers=2))
    mixture = MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=3)
    yield from decoder.cases("Mixtral", MixtralForCausalLM, mixture)


def test_groups_from_the_cases_to_the_page(tmp_path, monkeypatch):
    """Contestants agree, and the page has a row for each; another run keeps results that it does not measure."""
    monkeypatch.setattr(decoder, "BEHIND", (5,))
    monkeypatch.setattr(decoder, "PROMPTS", (9,))
    monkeypatch.delenv("LLAMA_CPP_CONVERTER", raising=False)
    groups = {
        "block-16": lambda: block.forward(SETTING, 5, {1: 1.0, 40: 0.0}),
        "training-16": lambda: block.training(SETTING, 5, 20, 1.0),
        "mixtral": lambda: block.mixtral(SETTING, {3: 1.0}, 20),
        "lora-16": lambda: block.lora(SETTING, 5, {20: 1.0}, memory=1.0),
        "decoder": tiny_models,
    }
    monkeypatch.setattr(cpu, "GROUPS", groups)
    arguments = ["--rounds", "2", "--output", str(tmp_path)]
    assert cpu.main(arguments) == 0
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert {name: len(group["cases"]) for name, group in results.items()} == dict(
        zip(groups, (2, 1, 2, 1, 8), strict=True)
    )
    assert results["lora-16"]["cases"][0]["rows"][OURS]["memory_ratio"] < 1
    page = path.with_suffix(".md").read_text()
    # No time meets a limit of zero, so this case fails.
    assert "** | 0.000 |" in page and page.count("| llamoe |") == 14 and page.count("| llamoe, int4 |") == 4
    groups["block-16"] = lambda: iter([Case("new", {STOCK: lambda: torch.ones(2)}, None)])
    assert cpu.main(["--cases", "block-16", *arguments]) == 0
    again = json.loads(path.read_text())
    assert [case["case"] for case in again["block-16"]["cases"]] == ["new"]
    assert again["decoder"] == results["decoder"]


def test_offloaded_experts_beside_resident_ones(monkeypatch):
    programs.in_place_of_subprocess(monkeypatch, processes)
    mixture = offload.LargeMixture(hidden=64, expert=48, layers=3, experts=7, vocabulary=101)
    (result,) = offload.offload(mixture, share=0.3, warm=5, tokens=20, rounds=2)
    assert result["failures"] == [] and set(result["rows"]) == set(offload.CONTESTANTS)
    ours = result["rows"][OURS]
    assert 0 < ours["hit_rate"] < 1
    # Such small experts are read through the page cache, without their neighbours in the file.
    assert ours["counted_bytes"] == pytest.approx(ours["missed"] * mixture.expert_bytes)
    given = {"folder": "nowhere", "who": "nobody", "budget": 1, "warm": 1, "tokens": 1}
    assert set(processes.in_process("offload", "decode", **given)) == {"failed"}


PUBLISHED = dict(
    vocab_size=301, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, head_dim=32,
    num_key_value_heads=2,
)  # fmt: skip


def test_a_published_size_is_written_as_quantize_does(tmp_path):
    """Names, shapes, dtypes and small files are equal; the random numbers have the deviation of new weights."""
    config = llamoe.preset("mixtral-8x7b", **PUBLISHED)
    drawn_folders.write(config, tmp_path / "drawn", "int4:64")
    llamoe.LlamoeMixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "made", to="int4", group_size=64, search=False)
    drawn, made = (load_file(tmp_path / name / "model.safetensors") for name in ("drawn", "made"))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in drawn.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in made.items()
    }
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("drawn", "made")]
    for config in configs:
        config["quantization_config"].pop("search", None)
    assert configs[0] == configs[1]
    model = llamoe.LlamoeMixtralForCausalLM.from_pretrained(tmp_path / "drawn")
    weight = model.model.layers[1].mlp.experts.dequantized_weight("gate_up_proj", torch.float32)
    assert weight.std().item() == pytest.approx(drawn_folders.STD, rel=0.05) and abs(weight.mean()) < 1e-3
    assert not torch.equal(weight[0], weight[1])


SCOUT = llamoe.LlamoeTextConfig(
    **PUBLISHED | dict(intermediate_size=256),
    intermediate_size_mlp=384,
    num_local_experts=7,
    moe_layers=[0, 1, 2],
)


@pytest.mark.parametrize(
    ("config", "weights", "ram"),
    [(llamoe.preset("mixtral-8x7b", **PUBLISHED), "int4:64", "3.9MB"), (SCOUT, "w4a16", "5.4MB")],
    ids=["quantized", "downloaded"],
)
def test_a_published_size_runs_as_a_user_runs_it(config, weights, ram, tmp_path, monkeypatch):
    programs.in_place_of_subprocess(monkeypatch, processes)
    rates = llamoe.Bandwidths()
    monkeypatch.setattr(published_sizes, "SETTLING", 0)
    monkeypatch.setattr(llamoe, "measure_bandwidths", lambda *_: rates)
    # Memory for a part of the experts; such small ones are read through the page cache.
    given = dict(ram=ram, headroom="0GB", tokens=5, prompt=23, row=11, steps=2)
    written, found = published_sizes.measure(config, weights, tmp_path, **given)
    assert list(tmp_path.iterdir()) == []
    assert 0 < found["experts_memory"] < found["offloaded"] < written["bytes"]
    assert found["decode"]["missed_bytes"] > 0 and found["reloaded_is_equal"]
    first, second = (step["loss"] for step in found["steps"])
    assert second < first
    judged = published_sizes.judge(found)
    assert set(judged) == set(published_sizes.TARGETS) and judged["load_seconds"][1]
    about = {**describe(CPU), "command": "c"}
    assert "| logits then | equal |" in published_sizes.page(about, "small", weights, written, found)


def test_the_proof_of_a_gpu_runs_on_a_cpu_with_small_sizes(tmp_path, capsys, monkeypatch):
    """All ten steps run, results are written, and a failed check sets the exit status."""
    assert prove_gpu.main(["--small", "--output", str(tmp_path)]) == 0, capsys.readouterr().out[-3000:]
    found = json.loads((tmp_path / "prove_gpu.json").read_text())
    judged = {check["step"] for check in found["checks"] if check["passed"] is not None}
    assert judged == set(prove_gpu.STEPS) - {"facts", "speed"}
    page = (tmp_path / "prove_gpu.md").read_text()
    assert page.count("\n| ") == len(found["checks"]) + 1 and "FAILED" not in page

    def fail(proof):
        proof.judge("a number", 3.0, most=2.0)
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(prove_gpu.STEPS, "speed", fail)
    assert prove_gpu.main(["--small", "--steps", "speed", "--output", str(tmp_path)]) == 1
    page = (tmp_path / "prove_gpu.md").read_text()
    assert page.count("FAILED") == 2 and "RuntimeError: no such kernel" in page
    if not torch.cuda.is_available():
        assert prove_gpu.main([]) == 2 and "needs a CUDA device" in capsys.readouterr().err
