"""The benchmarks' own machinery on tiny sizes; no figure is judged here, since a busy machine would fail it."""

import json
import os
import re
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support import programs

from benchmarks import (
    AGAIN,
    OURS,
    REFERENCE,
    bars,
    block,
    command_line,
    cpu,
    few_bits,
    gguf_files,
    gpu,
    harness,
    held,
    loading,
    mixtral,
    models,
    processes,
    qlora,
    readme,
    report,
    routing,
    saved_models,
    seven_billion,
    small_modules,
)
from benchmarks.clocks import ProcessorClock, WallClock
from benchmarks.hardware import Rates
from benchmarks.harness import Budget, Case, Contestant, Tolerance
from benchmarks.memory import peak_of
from benchmarks.roofline import Work, of_block, of_decoder
from benchmarks.shapes import Setting, Shape
from llamoe.modeling.kernels import cpp_kernels

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SETTING = Setting(CPU, torch.float32)
TINY = Shape(hidden=72, expert=52, experts=5, heads=6, key_value_heads=2, head_dim=20, vocabulary=101)
RATES = Rates(1e9, 1e10)
QUICK = Budget(seconds=0.0, least=2, most=2)
MB = 2**20


@pytest.fixture(scope="module")
def clock():
    made = ProcessorClock(cache_bytes=2**16)
    made.shortest = 1e-5
    return made


def test_memory_of_known_allocations():
    """Three tensors, the first gone before the last comes: the most is the first two."""

    def run():
        first = torch.empty(3 * MB, dtype=torch.uint8)
        second = torch.empty(5 * MB, dtype=torch.uint8)
        del first
        third = torch.empty(2 * MB, dtype=torch.uint8)
        return second, third

    result, peak = peak_of(run, CPU)
    assert peak == 8 * MB
    assert [tensor.numel() for tensor in result] == [5 * MB, 2 * MB]


def test_memory_counts_scratch_but_nothing_from_before():
    before = torch.randn(1, 4, 256, 32)
    attend = torch.nn.functional.scaled_dot_product_attention
    _, peak = peak_of(lambda: attend(before, before, before, is_causal=True), CPU)
    assert peak > before.nbytes
    held = torch.empty(MB, dtype=torch.uint8)
    assert peak_of(lambda: held.add_(1), CPU)[1] < 64  # the number one
    weight = torch.randn(300, 200, requires_grad=True)
    _, peak = peak_of(lambda: weight.exp().sum().backward(), CPU)
    assert peak >= 2 * weight.nbytes  # the saved result and the gradient
    memory = torch.frombuffer(bytearray(MB), dtype=torch.uint8)
    # What another library allocated counts once.
    assert peak_of(lambda: [memory, memory[5:], torch.zeros(MB, dtype=torch.uint8)], CPU)[1] == 2 * MB


@pytest.mark.parametrize("skew", ["uniform", "zipf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_go_where_they_are_steered(skew, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty(7, 96)
    routing.set_router(weight, generator)
    chosen = routing.draw_experts(2000, 7, skew, generator)
    x = routing.steer(torch.randn(2000, 96, generator=generator).to(dtype), weight, chosen)
    assert torch.equal((x @ weight.to(dtype).T).argmax(-1), chosen)
    assert routing.shares(chosen)["distinct"] == 7
    # Of seven the first has 1 / (1 + 1/2 + ... + 1/7) = 0.386 of Zipf's tokens.
    expected = 1 / 7 if skew == "uniform" else 0.386
    assert routing.shares(chosen)["largest_share"] == pytest.approx(expected, abs=0.04)


def test_work_is_counted_as_written_out():
    expert, router = 3 * 72 * 52, 5 * 72
    assert of_block(TINY, 11, 3, 4) == Work(
        4 * (4 * expert + router + 2 * 11 * 72), 2 * 11 * (2 * expert + router)
    )
    from benchmarks.shared_weights import text_config
    from llamoe import LlamoeForCausalLM, from_stock

    model = LlamoeForCausalLM(from_stock(text_config(TINY, 2)))
    attention_, head, norms = 72 * 120 * 2 + 72 * 40 * 2, 72 * 101, 5 * 72
    weights = 2 * (attention_ + router) + head + norms
    counted = of_decoder(model, 1, 7, 0, hit=[2, 3])
    layer_states = 2 * 2 * 7 * 40
    assert counted.nbytes == 4 * (weights + (2 + 3 + 2) * expert + layer_states + 7 * (72 + 101))
    assert counted.flops == 2 * 7 * (weights + 4 * expert) + 4 * 2 * (7 * 8 // 2) * 120


def make_case(given, **options):
    expected = torch.randn(50, generator=torch.Generator().manual_seed(0))
    contestants = {REFERENCE: Contestant(lambda: expected), OURS: Contestant(lambda: given(expected))}
    return Case("a case", contestants, Work(4e6, 0), Tolerance(1e-3, 1e-4, "rounding"), **options)


def fails(expected):
    raise RuntimeError("no such kernel\nand more")


def out_of_memory(expected):
    raise torch.OutOfMemoryError("too much")


def test_agreement_gives_no_failure(clock):
    result = harness.measure(make_case(lambda x: x * (1 + 1e-6)), clock, RATES, QUICK)
    assert result["failures"] == []
    assert 0 < result["contestants"][OURS]["difference"]["largest"] < 1e-5
    assert len(result["contestants"][OURS]["seconds"]) == 2
    assert result["work"]["ideal_seconds"] == 4e-3
    assert result["work"]["bound"] == "memory"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda x: x + 0.01, "llamoe differs from stock: largest difference of 0.0"),
        (lambda x: x * float("nan"), "llamoe differs from stock: largest difference of nan"),
        (lambda x: x[1:], "llamoe failed: ValueError: an output of shape"),
        (fails, "llamoe failed: RuntimeError: no such kernel"),
    ],
)
def test_other_numbers_fail_the_case(clock, given, message):
    (failure,) = harness.measure(make_case(given), clock, RATES, QUICK)["failures"]
    assert failure.startswith(message)


def test_cases_without_room_are_skipped(clock):
    result = harness.measure(make_case(out_of_memory), clock, RATES, QUICK)
    assert result["failures"] == []
    assert result["contestants"][OURS]["skipped"] == "out of memory"
    assert "seconds" not in result["contestants"][OURS]
    left_out = make_case(fails, skipped={OURS: "needs 90 GB"})
    result = harness.measure(left_out, clock, RATES, QUICK)
    assert (result["failures"], result["contestants"][OURS]["skipped"]) == ([], "needs 90 GB")


GROUPS = {
    "block-16": partial(block.inference, SETTING, TINY, (1, 3), (9,), (9,)),
    "training-16": partial(block.training, SETTING, TINY, 9),
    "adapters-16": partial(block.lora, SETTING, TINY, (9,)),
    "adapters-decode": partial(block.lora_decoding, SETTING, TINY, 2, (3,)),
    "decoder": partial(models.mixture, SETTING, TINY, 2, prefill=(9,), decode=(3,), training=(9,)),
    "dense": partial(models.dense, SETTING, TINY, 2, prefill=(9,), decode=(3,), training=(9,)),
    "chunked": partial(models.chunked, SETTING, TINY, chunk=8, counts=(2,), long=40, patience=60.0),
    "mixtral": partial(block.mixtral, SETTING, TINY, (1, 9), 9, copies=2),
    "window": partial(models.windowed, SETTING, TINY, 8, (5,)),
    "vision": partial(small_modules.vision, SETTING, hidden=64, layers=1, heads=4, output=32, tiles=(1,)),
    "parts": partial(small_modules.small, SETTING, TINY, 9, compiled=False),
}


def run_session(folder, clock, chosen, rounds=2):
    budget = Budget(seconds=0.0, least=rounds, most=rounds)
    rates = dict(rounds=1, side=64, nbytes=MB)
    return command_line.run("cpu", GROUPS, chosen, clock, torch.float32, folder, budget, **rates)


def test_late_failures_cost_their_own_samples(clock):
    runs = iter(range(100))

    def late(expected):
        if next(runs) > 2:
            raise RuntimeError("late")
        return expected

    result = harness.measure(make_case(late), clock, RATES, QUICK)
    assert result["failures"] == ["llamoe failed: RuntimeError: late"]
    assert "seconds" not in result["contestants"][OURS]
    assert len(result["contestants"][REFERENCE]["seconds"]) == 2


def test_rounds_are_the_cases_or_the_budgets(clock):
    def rounds(budget):
        result = harness.measure(make_case(lambda x: x, least=4), clock, RATES, budget)
        return len(result["contestants"][OURS]["seconds"])

    assert rounds(Budget(seconds=0)) == 4
    assert rounds(Budget(seconds=0, least=1)) == 1
    assert rounds(Budget(seconds=0, least=17)) == 17


def test_from_the_cases_to_the_reports(tmp_path, clock, capsys):
    """Every group on tiny sizes: outputs agree, and all that was measured stands in JSON, page and README."""
    assert run_session(tmp_path, clock, list(GROUPS)) == 0
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert [case["group"] for case in results["cases"]] == sorted(
        (case["group"] for case in results["cases"]), key=list(GROUPS).index
    )
    assert {case["group"] for case in results["cases"]} == set(GROUPS)
    for case in results["cases"]:
        for name, row in case["contestants"].items():
            assert len(row["seconds"]) == 2
            assert row["ratio"] > 0
            # Of some the least work is not counted.
            assert case["group"].startswith(("adapters", "mixtral", "window")) or row["roofline"] > 0
            assert row["peak_bytes"] > 0
            assert ("difference" in row) == (name not in (REFERENCE, "nn.LayerNorm", block.FROZEN))
    found = {case["case"]: case for case in results["cases"] if case["group"] == "block-16"}
    assert set(found) == {"B = 1", "B = 3", "T = 9", "T = 9, Zipf"}
    assert set(found["B = 1"]["contestants"]) == {"stock", "llamoe", "grouped_mm", "batched_mm"}
    assert found["B = 1"]["distinct"] == 1

    page = (tmp_path / "cpu.md").read_text()
    assert all(f"| {case['case']}" in page for case in results["cases"])
    assert "| mixture block, 16 experts, T = 1, layers in turn | at least 8× |" in page
    assert "not measured" in page  # the bars at T = 1024
    capsys.readouterr()

    text = readme.section(results, None)
    assert "No GPU was measured" in text
    ratio = found["B = 1"]["contestants"][OURS]["ratio"]
    assert f"| mixture block, 16 experts | {f'{ratio:.1f}' if ratio >= 1.5 else f'{ratio:.2f}'} |" in text

    # A second run of one group takes the place of its cases, and of no others.
    assert run_session(tmp_path, clock, ["vision"], rounds=3) == 0
    again = json.loads((tmp_path / "cpu.json").read_text())
    assert len(again["cases"]) == len(results["cases"])
    assert {
        len(case["contestants"][OURS]["seconds"]) for case in again["cases"] if case["group"] == "vision"
    } == {3}
    assert len(again["runs"]) == 2
    assert (tmp_path / "cpu.svg").exists() == _has_matplotlib()


def _has_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def test_a_failing_group_does_not_stop_the_others(tmp_path, clock, capsys):
    def broken():
        facts = dict(phase="decode", tokens=1, experts=5, routing="uniform", repeated=False)
        yield make_case(lambda x: x, skipped={OURS: "no room"}, facts=facts)
        raise RuntimeError("no data")

    def whole():
        yield make_case(lambda x: x + 1)

    groups = {"block-16": broken, "dense": whole}
    rates = dict(rounds=1, side=64, nbytes=MB)
    assert command_line.run("cpu", groups, list(groups), clock, torch.float32, tmp_path, QUICK, **rates) == 1
    said = capsys.readouterr().err
    assert "the group failed: RuntimeError: no data" in said
    assert "FAILED: dense, a case: llamoe differs from stock" in said
    assert "llamoe differs from stock" in (tmp_path / "cpu.md").read_text()
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert [(case["group"], len(case["contestants"])) for case in results["cases"]] == [
        ("block-16", 2),
        ("block-16", 0),
        ("dense", 2),
    ]
    assert "RuntimeError: no data" in (tmp_path / "cpu.md").read_text()
    text = readme.section(results, None)
    assert "these groups were not run: `block-128`, `training-16`" in text
    assert "`llamoe` was left out of `block-16`, a case: no room." in text
    assert "**Failed**: block-16, the group, from here on: the group failed: RuntimeError: no data" in text
    assert all(f"| {each} | " in text for each in readme.DECISIVE["cpu"])
    assert set(readme.DECISIVE["cpu"]) <= {bar.text for bar in bars.CPU}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, and is 0"),
        (["--seconds", "-1"], "--seconds must be a number of at least 0, and is -1.0"),
        (["--seconds", "nan"], "--seconds must be a number"),
        (["--output", "{folder}/file"], "file is a file"),
        (["--output", "{folder}/file/below"], "file is a file"),
        (["--output", "{folder}"], "cpu.json holds no results of a benchmark"),
    ],
)
def test_bad_options_are_refused(tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "cpu.json").write_text('{"cases": [')
    monkeypatch.setattr(sys, "argv", ["cpu", *(word.format(folder=tmp_path) for word in words)])
    monkeypatch.setattr(command_line, "RESULTS", tmp_path / "none")
    with pytest.raises(SystemExit) as stopped:
        cpu.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_bars_take_the_worst_case_of_ours():
    def case(group, tokens, **rows):
        contestants = {
            name.replace("_compiled", ", max-autotune"): {
                "ratio": ratio,
                "median": 1 / ratio,
                "peak_bytes": peak,
            }
            for name, (ratio, peak) in rows.items()
        }
        return {
            "group": group,
            "case": "",
            "tokens": tokens,
            "routing": "uniform",
            "repeated": False,
            "contestants": contestants,
        }

    results = {
        "cases": [
            case("block-16", 1, stock=(1, 100), llamoe=(9, 5), grouped_mm=(12, 10)),
            case("block-16", 1024, stock=(1, 100), llamoe=(6, 30), grouped_mm=(3, 40)),
            case("block-128", 1024, stock=(1, 100), llamoe=(40, 4), grouped_mm=(3, 1)),
        ]
    }
    found = bars.Results(results)
    assert found.ratio("block-16") == 6
    assert found.ratio("block-16", tokens=1) == 9
    assert found.ratio_of_peers(("block-16", "block-128")) == pytest.approx(9 / 12)
    assert found.memory("block-128", (REFERENCE,), tokens=1024) == 0.04
    # Compiled stock counts against compiled ours; another contestant whose name begins like one does not.
    ways = dict(
        stock=(1, 1),
        stock_compiled=(2, 1),
        stocky=(9, 1),
        llamoe=(3, 1),
        llamoe_compiled=(5, 1),
        llamoes=(8, 1),
    )
    assert bars.Results({"cases": [case("block-16", 1, **ways)]}).ratio("block-16") == 2.5
    lean = {"cases": [case("block-16", 1, llamoe=(1, 12e5), grouped_mm=(1, 4e5))]}
    assert bars.Results(lean).memory("block-16", bars.PEERS, bars.ASIDE) == pytest.approx(0.5)
    rows = bars.table(results, "cpu")
    assert "| mixture block, 16 experts, T = 1024 | at least 7.5× | 6× | **no** |" in rows
    assert "| mixture block, 128 experts, T = 1024 | at least 35× | 40× | yes |" in rows
    assert any(row.endswith("at most 0.05× | 0.04× | yes |") for row in rows)
    assert not any("layers in turn" in bar.text for bar in bars.GPU)


@pytest.mark.parametrize(
    ("again", "noise", "ours", "verdict"),
    [(1.005, 0.02, 0.985, "yes"), (1.005, 0.02, 0.97, "**no**"), (0.95, 0.05, 0.955, "yes")],
)
def test_never_slower_allows_stocks_own_noise(again, noise, ours, verdict):
    rows = {REFERENCE: {"ratio": 1.0}, OURS: {"ratio": ours}, AGAIN: {"ratio": again}}
    results = {"cases": [{"group": "dense", "case": "", "contestants": rows}]}
    (row,) = (row for row in bars.table(results, "cpu") if row.startswith("| dense"))
    assert f"{noise:.2g} less is noise" in row
    assert row.endswith(f"| {ours:.3g}× | {verdict} |")


def test_figures_are_replaced_in_both_pages(tmp_path, monkeypatch, capsys):
    page = "# name\n\n<!-- speed: written by `me` -->{}<!-- end of speed -->\n\nmore\n"
    stale = page.format("\nold\n")
    assert report.replaced(stale, "new", "speed", "") == page.format("\n\nnew\n\n")
    for wrong in ("# name\n", stale + stale):
        with pytest.raises(ValueError, match="once each"):
            report.replaced(wrong, "new", "speed", "")
    pages = [tmp_path / name for name in readme.PAGES]
    (tmp_path / "docs").mkdir()
    for page in pages:
        page.write_text(stale)

    def run(*words):
        monkeypatch.setattr(
            sys, "argv", ["readme", "--root", str(tmp_path), "--results", str(tmp_path), *words]
        )
        return readme.main()

    assert run("--check") == 1
    assert [page.read_text() for page in pages] == [stale, stale]
    assert run() == 0
    assert all("No figures of a CPU are committed." in page.read_text() for page in pages)
    assert run("--check") == 0
    # A figure that was edited by hand, in either page.
    for page in pages:
        whole = page.read_text()
        page.write_text(whole.replace("No figures", "Splendid figures"))
        capsys.readouterr()
        assert run("--check") == 1
        assert capsys.readouterr().err.startswith(f"{page.relative_to(tmp_path)} is stale")
        page.write_text(whole)
    pages[0].write_text("# name\n")
    assert run() == 1


def test_loading_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Of 30 MB of weights at least 27 have to be held, and the sum tells that they are the ones that were saved."""
    programs.in_place_of_subprocess(monkeypatch, processes)
    shape = Shape(hidden=256, expert=320, experts=25, heads=6, key_value_heads=2, head_dim=20, vocabulary=101)
    loading.save(SETTING, shape, 1, tmp_path / "checkpoint", "10MB")
    loading.save(SETTING, loading.SMALL, 1, tmp_path / "small", "10MB")
    shards = list((tmp_path / "checkpoint").glob("*.safetensors"))
    nbytes = sum(path.stat().st_size for path in shards)
    assert len(shards) > 1
    paths = {"folder": str(tmp_path / "checkpoint"), "small": str(tmp_path / "small")}
    found = processes.in_process("loading", "load", who=OURS, device="cpu", **paths)
    assert found["peak_bytes"] > 0.9 * nbytes
    assert len(found["seconds"]) == len(found["returned_seconds"]) == loading.LOADS
    assert all(
        0 < first < whole for first, whole in zip(found["returned_seconds"], found["seconds"], strict=True)
    )
    expected = sum(
        tensor.double().abs().sum().item() for path in shards for tensor in load_file(path).values()
    )
    assert found["checksum"] == pytest.approx(expected, rel=1e-12)


# Inputs are multiples of 32 and outputs of 16, as int4 needs; no two sizes are equal.
SMALL = dict(
    hidden_size=192, num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=256
)
SAVED = (
    replace(saved_models.DENSE, fields=dict(SMALL, intermediate_size=320, num_hidden_layers=2)),
    replace(
        saved_models.MIXTURE,
        fields=dict(
            SMALL,
            intermediate_size=128,
            intermediate_size_mlp=320,
            # llama.cpp needs one layer without rotary embedding, which is every fourth.
            num_hidden_layers=4,
            num_local_experts=5,
            interleave_moe_layer_step=2,
            attention_chunk_size=256,
        ),
    ),
)


def test_few_bits_from_the_cases_to_the_reports(tmp_path, monkeypatch, clock):
    monkeypatch.setitem(GROUPS, "few-bits", partial(few_bits.few_bits, SAVED, 9))
    monkeypatch.setattr(few_bits, "NEW", 3)
    assert run_session(tmp_path, clock, ["few-bits"]) == 0
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert [(case["phase"], case["model"]) for case in results["cases"]] == [
        ("decode", "dense"),
        ("decode", "mixture"),
        ("adapters", "dense"),
        ("adapters", "mixture"),
        ("prefill", "dense"),
        ("prefill", "mixture"),
        ("quantizing", "mixture"),
        ("training", "mixture"),
    ]
    for case in results["cases"]:
        assert all(len(row["seconds"]) == 2 for row in case["contestants"].values())
    for case in results["cases"][:2]:
        sixteen, eight, four = (case["nbytes_of"][f"{OURS}, {name}"] for name in ("bfloat16", "int8", "int4"))
        # Embedding and head, which stay, are most of these small models.
        assert sixteen > eight > four
        # Float32 ran first, and has its own tokens.
        assert case["first_tokens"][f"{OURS}, float32"] == few_bits.NEW
    # Two dense layers and two mixtures: attention and norms, feed-forward; five experts and the shared one, router.
    attention_, norms = 2 * 192 * 96 + 2 * 192 * 32, 2 * 192
    weights = 4 * (attention_ + norms) + 2 * (3 * 192 * 320 + 6 * 3 * 192 * 128 + 5 * 192)
    assert results["cases"][-2]["weights"] == weights
    found = bars.Results(results)
    assert found.seconds_a_billion(f"{OURS}, int4") > 0
    assert found.over(f"{OURS}, int4", f"{OURS}, bfloat16", groups="few-bits", phase="prefill") > 0
    assert found.over(f"{OURS}, int4", f"{OURS}, float32", groups="few-bits", phase="training") > 0
    assert f"int4 ({four / 1e6:.0f} MB, " in (tmp_path / "cpu.md").read_text()


def test_sizes_of_large_models_from_the_cases_to_the_readme(tmp_path, monkeypatch, clock):
    monkeypatch.setattr(seven_billion, "CACHED", (3,))
    monkeypatch.setattr(seven_billion, "PROMPTS", (9,))
    monkeypatch.setitem(GROUPS, "7b-mistral", partial(seven_billion.seven_billion, SAVED[0]))
    assert run_session(tmp_path, clock, ["7b-mistral"]) == 0
    results = json.loads((tmp_path / "cpu.json").read_text())
    facts = [(case["phase"], case["tokens"], case.get("cached")) for case in results["cases"]]
    assert facts == [("tokens", 1, 3), ("prompt", 9, None)]
    for case in results["cases"]:
        assert all(row["median"] > 0 for row in case["contestants"].values())
    page = readme.summary(results, None)
    assert "| dense, a token behind 3 | " in page
    assert "| stock, bfloat16 | llamoe, bfloat16 | llamoe, int8 | llamoe, int4 |" in page


class Recites:
    """A decoder that knows its tokens."""

    def __init__(self, tokens, offset=0.0):
        self.tokens, self.offset, self.nbytes = tokens, offset, 7

    def decode(self, new):
        time.sleep(1e-3)
        return self.tokens[:new]

    def logits(self, ids):
        return torch.arange(12.0).view(3, 4) + self.offset


def test_decoders_logits_and_first_tokens_are_compared(clock):
    tokens = list(range(few_bits.NEW))
    makers = {
        REFERENCE: lambda: Recites(tokens),
        f"{OURS}, float32": lambda: Recites(tokens, 1.0),
        f"{OURS}, int4": lambda: Recites([*tokens[:3], 99, *tokens[4:]], 1.0),
        "llama.cpp, q4_0": lambda: fails(None),
    }
    case = few_bits.decode_case("a case", makers, 1, clock=WallClock(cache_bytes=2**16))
    case.clock.shortest = 1e-5
    result = harness.measure(case, case.clock, RATES, QUICK)
    assert result["first_tokens"] == {
        REFERENCE: len(tokens),
        f"{OURS}, float32": len(tokens),
        f"{OURS}, int4": 3,
    }
    (failure,) = result["failures"]
    assert failure.startswith("llamoe, float32 differs from stock")
    rows = result["contestants"]
    assert rows["llama.cpp, q4_0"]["skipped"] == "RuntimeError: no such kernel"
    # A run sleeps, and its time is that of one token.
    assert 1e-3 <= rows[REFERENCE]["median"] * len(tokens) < 0.1
    assert (result["clock"], result["nbytes_of"][REFERENCE]) == ("seconds of wall time", 7)


@pytest.mark.parametrize(
    ("is_installed", "variable", "sentence"),
    [
        (False, "", "llama.cpp-token is left out: llama-cpp-python is not installed."),
        (True, "", "llama.cpp-token is left out: LLAMA_CPP_CONVERTER is not set to the path of"),
        (
            True,
            "nowhere/convert.py",
            "llama.cpp-token is left out: LLAMA_CPP_CONVERTER=nowhere/convert.py is not a file",
        ),
    ],
)
def test_a_group_that_cannot_be_run_keeps_its_results(
    tmp_path, monkeypatch, clock, capsys, is_installed, variable, sentence
):
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: is_installed or None)
    monkeypatch.setenv(gguf_files.VARIABLE, variable)
    group = "llama.cpp-token"
    monkeypatch.setitem(GROUPS, group, lambda: (case for case in [make_case(lambda x: x)]))
    assert run_session(tmp_path, clock, [group]) == 0
    before = (tmp_path / "cpu.json").read_text()
    GROUPS[group] = partial(few_bits.beside_llama_cpp, SAVED, "decode")
    assert run_session(tmp_path, clock, [group]) == 0
    assert sentence in capsys.readouterr().out
    assert (tmp_path / "cpu.json").read_text() == before


@pytest.mark.skipif(
    not (find_spec("llama_cpp") and os.environ.get(gguf_files.VARIABLE)),
    reason="llama-cpp-python or LLAMA_CPP_CONVERTER is missing",
)
def test_llama_cpp_computes_the_same(tmp_path, monkeypatch, clock):
    """Logits in float32, and the size of each type; the groups on tiny models."""
    groups = {"llama.cpp-token": "decode", "llama.cpp-prefill": "prefill", "llama.cpp-threads": "threads"}
    for group, phase in groups.items():
        monkeypatch.setitem(GROUPS, group, partial(few_bits.beside_llama_cpp, SAVED, phase))
    (tmp_path / "files").mkdir()
    monkeypatch.setenv(few_bits.KEPT, str(tmp_path / "files"))
    monkeypatch.setattr(few_bits, "PREFILLS", (9, 17))
    monkeypatch.setattr(few_bits, "MOST_OTHER_LOAD", 99)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert run_session(tmp_path, clock, list(groups)) == 0
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert [(case["phase"], case["model"], case["tokens"]) for case in results["cases"]] == [
        ("decode", "dense", 1),
        ("decode", "mixture", 1),
        *(("prefill", model, tokens) for model in bars.MODELS for tokens in (9, 17)),
        ("threads", "dense", 1),
        ("threads", "mixture", 1),
    ]
    # They were made once.
    assert len(list((tmp_path / "files").glob("*.gguf"))) == 2 * len(gguf_files.TYPES)
    found = bars.Results(results)
    assert found.gain(f"{OURS}, int4", "llama.cpp, q4_0", model="mixture") > 0
    for case in results["cases"]:
        assert all(len(row["seconds"]) == 2 for row in case["contestants"].values())
    for case in results["cases"][:6]:
        assert case["contestants"]["llama.cpp, f32"]["difference"]["largest"] < 1e-4
    for case in results["cases"][:2]:
        assert case["first_tokens"]["llama.cpp, f32"] == few_bits.NEW
        sizes = [case["nbytes_of"][f"llama.cpp, {kind}"] for kind in gguf_files.TYPES]
        assert sizes == sorted(sizes, reverse=True)


def test_time_over_anothers_is_the_rounds_median():
    def case(model, *seconds):
        rows = dict(zip((f"{OURS}, int4", "llama.cpp, q4_0"), seconds, strict=True))
        return {
            "group": "llama.cpp-token",
            "phase": "decode",
            "model": model,
            "contestants": {name: {"seconds": list(its)} for name, its in rows.items()},
        }

    # The third round was slow for both, the second for one.
    results = {"cases": [case("dense", (3, 9, 30), (2, 2, 20)), case("mixture", (8, 8), (2, 4))]}
    rows = bars.table(results, "cpu")
    assert "| a token, dense in int4, time over llama.cpp, q4_0 | at most 1.15× | 1.5× | **no** |" in rows
    found = bars.Results(results)
    assert found.over(f"{OURS}, int4", "llama.cpp, q4_0", groups="llama.cpp-token") == 3
    # Of wall time the fastest rounds count, whichever they are.
    results["cases"][0]["clock"] = WallClock.unit
    assert found.over(f"{OURS}, int4", "llama.cpp, q4_0", groups="llama.cpp-token", model="dense") == 3 / 2
    results["cases"][0]["contestants"][f"{OURS}, int4"]["seconds"] = [9, 9, 8]
    assert found.over(f"{OURS}, int4", "llama.cpp, q4_0", groups="llama.cpp-token", model="dense") == 4


def test_bars_are_rows_with_an_exit_status(tmp_path, monkeypatch, capsys):
    rows = {f"{OURS}, int8": [3.0, 1.5], f"{OURS}, int8, 2 threads": [2.0, 1.25]}
    rows |= {"llama.cpp, q8_0": [2.0, 3.0], "llama.cpp, q8_0, 2 threads": [1.0, 4.0]}
    contestants = {name: {"seconds": seconds} for name, seconds in rows.items()}
    case = {"group": "llama.cpp-threads", "phase": "threads", "model": "dense", "contestants": contestants}
    (tmp_path / "cpu_avx2.json").write_text(json.dumps({"cases": [case]}))

    def run(about):
        words = ["bars", "cpu_avx2", "--results", str(tmp_path), "--about", about]
        monkeypatch.setattr(sys, "argv", words)
        return bars.main()

    # The fastest rounds: 1.2 over 2.
    assert run("dense in int8, what two threads") == 1
    words = "a token, dense in int8, what two threads gain over llama.cpp's gain"
    assert capsys.readouterr().out == f"missed\t{words}\tat least 0.9×\t0.6×\n"
    assert run("prefill of 128 tokens, dense in int4") == 0
    assert capsys.readouterr().out.startswith("unknown\tprefill of 128 tokens, dense in int4")


def test_layers_of_a_published_size_are_drawn(clock):
    """Every part has numbers, and a token reads two of eight experts, and no embedding."""
    sizes = dict(hidden_size=192, intermediate_size=320, vocab_size=101, num_attention_heads=6)
    (case,) = mixtral.mixtral(SETTING, 2, **sizes, num_key_value_heads=2, head_dim=16)
    result = harness.measure(case, clock, RATES, QUICK)
    assert result["failures"] == []
    assert result["contestants"][f"{OURS}, int4"]["ratio"] > 0
    packed = 2 * (2 * 192 * 96 + 2 * 192 * 32) + 2 * 2 * 3 * 192 * 320
    others = 2 * 8 * 192 + 5 * 192 + 101 * 192
    assert result["nbytes"] == packed * 5 // 8 + 2 * others


def test_a_process_that_is_held_to_less_says_so(monkeypatch):
    told = "CPU : AVX2 = 1 | AVX512 = 1 | AVX_VNNI = 0 | REPACK = 1 | "
    monkeypatch.delenv("MKL_ENABLE_INSTRUCTIONS", raising=False)
    assert held.beyond(told) == []
    for name, value in held.VARIABLES["avx2"].items():
        monkeypatch.setenv(name, value)
    assert held.beyond(told) == ["AVX512"] and held.is_held() == "avx2"
    assert {"-mno-avx512f", "-mno-avxvnni"} <= set(cpp_kernels.flags_of_processor()) or (
        torch.backends.cpu.get_cpu_capability() != "AVX2"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_the_gpu_benchmark_refuses_without_a_device(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path)])
    assert gpu.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("weights", ["nf4", "int4"])
def test_qlora_from_packed_weights(weights, monkeypatch, capsys):
    words = ["qlora", "--tiny", "--weights", weights]
    monkeypatch.setattr(qlora, "STEPS", 1)
    monkeypatch.setattr(sys, "argv", words)
    if weights == "nf4":
        pytest.importorskip("bitsandbytes")
    # It fails if a loss is not a number, or a factor of an adapter has no gradient.
    assert qlora.main() == 0
    printed = capsys.readouterr().out
    found = re.findall(r"(\d+) layers, measured: .* loss (\S+); gradients in (\d+) of (\d+) factors", printed)
    # Of a layer: attention has four linear layers, the shared expert three, and there are two stacks; two factors each.
    assert [(row[0], *row[2:]) for row in found] == [("2", "36", "36"), ("4", "72", "72")]
    # A guess among 101 tokens has 4.6.
    assert all(4 < float(row[1]) < 5 for row in found)
    assert re.search(
        r"^48 layers, extrapolated, not measured: \S+ GB .*, \S+ tokens/s$", printed, re.MULTILINE
    )
    assert "at most 66 GB, at least 3,000 tokens/s" in printed

    # Few layers have their peak where the whole model has not.
    rows = [
        dict(layers=n, forward=9 + n, backward=2 + 2 * n, optimizer=3 + n, seconds=1 + n / 2) for n in (2, 4)
    ]
    whole = qlora.extrapolate(rows, 4096)
    assert (whole["GB"], whole["phase"]) == (pytest.approx(2 + 2 * 48), "backward")
    assert whole["tokens"] == pytest.approx(4096 / (1 + 48 / 2))
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", [word for word in words if word != "--tiny"])
        assert qlora.main() == 2
        assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_memory_on_a_device():
    device = torch.device("cuda")
    _, peak = peak_of(lambda: torch.empty(8 * MB, dtype=torch.uint8, device=device), device)
    assert peak == 8 * MB


def test_stock_is_compiled_where_ours_is(clock):
    setting = Setting(CPU, torch.float32, compile_modes=("default",), compiled_tokens=(2,))
    (case,) = block.inference(setting, TINY, (2,), (), ())
    names = {REFERENCE, OURS, *block.PEERS}
    assert set(case.contestants) == names | {f"{name}, default" for name in names}


def test_the_summary_has_the_ratios_of_the_results():
    def case(group, rows, **facts):
        return {"group": group, "case": "", "routing": "uniform", "contestants": rows, **facts}

    def beside_stock(ratio, ours=12, theirs=100):
        stock = {"ratio": 1.0, "peak_bytes": theirs}
        return {REFERENCE: stock, OURS: {"ratio": ratio, "peak_bytes": ours}}

    bits = {f"{OURS}, bfloat16": {"seconds": [4.0, 8.0]}, f"{OURS}, int4": {"seconds": [1.0, 2.0]}}
    results = {
        "cases": [
            case("decoder", beside_stock(5.04), phase="decode", tokens=1),
            case("few-bits", bits, phase="decode", model="mixture", nbytes_of={}),
            case("adapters-128", beside_stock(42.62), tokens=512),
        ]
    }
    run = {"budget": 20e9, "decode": {"tokens_per_second": 0.512}, "rates": {"drive": 1.83e9}}
    converted = {"bytes": 4.25e9, "cases": [{"case": "hf to Meta", "seconds": 4.36, "peak_bytes": 0.244e9}]}
    others = {readme.SCOUT: {"found": run}, readme.CONVERSION: converted}
    rows = readme.summary(results, None, others).splitlines()[2:7]
    figures = [re.findall(r"\d+\.\d+", row.strip("| ").rpartition(" | ")[2]) for row in rows]
    assert figures == [["0.20"], [], ["0.51", "1.8"], ["0.02", "0.12"], ["4.2", "4.4", "0.24"]]
    assert [row.endswith("| not measured |") for row in rows] == [False, True, False, False, False]
    assert readme.summary(None, None).count("not measured") == 5


def test_threads_are_given_back():
    before, seen = torch.get_num_threads(), []
    with pytest.raises(RuntimeError, match="no such kernel"), few_bits.on_threads(before + 1):
        fails(seen.append(torch.get_num_threads()))
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("processors", "load", "reason"),
    [
        (1, 0.0, "the machine has one processor"),
        (2, 0.2, None),
        (2, 0.9, "other load: 0.9 on 2 processors"),
        (8, 5.0, None),
    ],
)
def test_two_threads_are_measured_on_processors_that_nobody_uses(monkeypatch, processors, load, reason):
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    idle = SimpleNamespace(idle=100 * (1 - load / processors))
    monkeypatch.setattr(few_bits.psutil, "cpu_times_percent", lambda interval: idle)
    case = few_bits.two_threads(SAVED[0], None, dict.fromkeys(gguf_files.TYPES))
    on_two = {name for name in case.contestants if name.endswith("2 threads")}
    assert len(on_two) == 4 and len(case.contestants) == 8
    assert case.skipped == (dict.fromkeys(on_two, reason) if reason else {})


def test_groups_that_are_asked_for_by_name_do_not_run_by_default(tmp_path, monkeypatch):
    made = command_line.parser("cpu", cpu.GROUPS, "", by_name=cpu.BY_NAME)
    chosen = made.parse_args([]).cases
    assert [group for group in cpu.GROUPS if group not in chosen] == list(cpu.BY_NAME)
    monkeypatch.setattr(sys, "argv", ["cpu", "--cases", "llama.cpp", "vision", "--output", str(tmp_path)])
    given, _ = command_line.options(made, "cpu", cpu.GROUPS)
    assert given.cases == ["vision", *cpu.BY_NAME]
    assert "bynamealone:llama.cpp-token,llama.cpp-context," in "".join(made.format_help().split())
