"""The benchmark of experts on disk on tiny sizes; no time is judged here, since a busy machine would fail it."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support import programs

import llamoe
from benchmarks import OURS, bars, command_line, offload, processes, published_sizes
from benchmarks.clocks import ProcessorClock
from benchmarks.hardware import describe
from benchmarks.harness import Budget
from benchmarks.large_mixtures import LargeMixture, passes_of, simulate
from llamoe.conversion import quantize

pytestmark = pytest.mark.slow

TINY = LargeMixture(hidden=64, expert=48, layers=3, experts=7, vocabulary=101)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mixture")
    TINY.save(made)
    return made


def test_passes_ask_for_each_expert_once():
    experts = torch.tensor([[[2, 1], [0, 0]], [[3, 3], [1, 2]]])
    assert passes_of(experts) == [[(0, 1), (0, 2), (1, 3)], [(0, 0), (1, 1), (1, 2)]]


@pytest.mark.parametrize("law", list(offload.LAWS))
def test_hits_are_simulated_and_logits_equal(folder, law):
    slots = 6
    room = slots * TINY.expert_bytes
    found = {
        who: offload.decode(who, str(folder), str(folder), law, budget=room, warm=5, tokens=20)
        for who in offload.CONTESTANTS
    }
    details = {who: row["details"] for who, row in found.items()}
    counts = simulate(details[offload.RESIDENT]["passes"], slots)[5:]
    hits, misses = (sum(count[index] for count in counts) for index in (0, 1))
    assert 0 < hits and 0 < misses
    for who in (OURS, offload.CACHED, offload.MAPPED):
        assert found[who]["hit_rate"] == hits / (hits + misses)
        assert found[who]["missed"] == misses / 20
        assert details[who]["digest"] == details[offload.RESIDENT]["digest"]
    # So small experts are read through the page cache, and without anything around them.
    assert found[OURS]["counted_bytes"] == pytest.approx(found[OURS]["missed"] * TINY.expert_bytes)
    assert torch.allclose(
        torch.tensor(details[offload.ACCELERATE]["first"]),
        torch.tensor(details[offload.RESIDENT]["first"]),
        atol=0.05,
    )


def test_a_contestant_that_fails_is_told(folder, monkeypatch):
    """Room for less than one expert."""
    programs.in_place_of_subprocess(monkeypatch, processes)
    given = {"folder": str(folder), "small": str(folder), "law": "even", "budget": 1, "warm": 1, "tokens": 1}
    assert "experts_memory=1 bytes" in processes.in_process("offload", "decode", who=OURS, **given)["skipped"]


def test_experts_on_disk_from_the_cases_to_the_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "LAWS", {"zipf": "Zipf"})
    groups = {"offload": lambda: offload.offload(TINY, (0.5,), warm=5, tokens=20)}
    clock, budget = ProcessorClock(cache_bytes=2**16), Budget(seconds=0.0, least=1, most=1)
    rates = dict(rounds=1, side=64, nbytes=2**20)
    done = command_line.run("cpu", groups, ["offload"], clock, torch.float32, tmp_path, budget, **rates)
    assert done == 0
    token, all_read = json.loads((tmp_path / "cpu.json").read_text())["cases"]
    assert set(token["contestants"]) == set(offload.CONTESTANTS)
    assert all(len(row["seconds"]) == 20 for row in token["contestants"].values())
    assert token["hit_rate_error"] == 0
    assert set(all_read["contestants"]) == {offload.DRIVE, OURS, offload.WITH_PRODUCTS}
    found = bars.Results({"cases": [token, all_read]})
    judged = {bar.text: bar.value(found) for bar in bars.CPU if bar.text.startswith(bars.ON_DISK)}
    assert len(judged) == 7
    assert all(number is not None for number in judged.values())
    assert "% hits, " in (tmp_path / "cpu.md").read_text()


PUBLISHED = dict(
    vocab_size=301, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, head_dim=32,
    num_key_value_heads=2,
)  # fmt: skip


def test_a_published_size_is_written_as_quantize_does(tmp_path):
    """Names, shapes, dtypes and small files; the numbers are drawn, and of the deviation of fresh weights."""
    config = llamoe.preset("mixtral-8x7b", **PUBLISHED)
    published_sizes.write(config, tmp_path / "drawn", "int4:64")
    llamoe.LlamoeMixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "made", to="int4", group_size=64, search=False)
    drawn, made = (load_file(tmp_path / name / "model.safetensors") for name in ("drawn", "made"))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in drawn.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in made.items()
    }
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("drawn", "made")]
    for each in configs:
        each["quantization_config"].pop("search", None)
    assert configs[0] == configs[1]
    model = llamoe.LlamoeMixtralForCausalLM.from_pretrained(tmp_path / "drawn")
    weight = model.model.layers[1].mlp.experts.dequantized_weight("gate_up_proj", torch.float32)
    assert weight.std().item() == pytest.approx(published_sizes.STD, rel=0.05) and abs(weight.mean()) < 1e-3
    assert not torch.equal(weight[0], weight[1])


def test_a_published_size_runs_as_a_user_runs_it(tmp_path, monkeypatch):
    programs.in_place_of_subprocess(monkeypatch, processes)
    rates = llamoe.Bandwidths()
    monkeypatch.setattr(published_sizes, "SETTLING", 0)
    monkeypatch.setattr(llamoe, "measure_bandwidths", lambda *_: rates)
    config = llamoe.preset("mixtral-8x7b", **PUBLISHED)
    # Memory for two fifths of the experts; so small ones come through the page cache.
    given = dict(ram="3.9MB", headroom="0GB", tokens=5, prompt=23, row=11, steps=2)
    written, found = published_sizes.measure(config, "int4:64", tmp_path, **given)
    assert list(tmp_path.iterdir()) == []
    assert 0 < found["experts_memory"] < found["offloaded"] < written["bytes"]
    assert found["decode"]["missed_bytes"] > 0 and found["reloaded_is_equal"]
    first, second = (step["loss"] for step in found["steps"])
    assert second < first
    judged = published_sizes.judge(found)
    assert set(judged) == set(published_sizes.TARGETS) and judged["load_seconds"][1]
    about = {**describe(torch.device("cpu")), "command": "c"}
    assert "| logits then | equal |" in published_sizes.page(about, "small", "int4", written, found)
