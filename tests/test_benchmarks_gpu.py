"""What whole models ask of a GPU, counted on cards that are not there, and the program that proves a real one."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks import fake_models, gpu_budgets, prove_gpu
from benchmarks.cards import CARDS
from benchmarks.fake_cards import pretend
from llamoe.modeling.moe import dispatch
from llamoe.modeling.quantization import quantizer

pytestmark = pytest.mark.slow

FAMILIES = tuple(fake_models.FAMILIES)


@pytest.fixture
def card():
    """A function that begins to pretend that a card is there, until the test ends."""
    import contextlib

    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(pretend(CARDS[name]))


def test_the_recorder_counts_what_torch_launches(card):
    """Against a few lines whose kernels, waits and bytes are known: also what reads values, and what is a view."""
    recorder = card("A100")
    weight = torch.empty(70, 30, device="cuda", dtype=torch.bfloat16)
    with recorder.counting() as counts:
        x = torch.ones(5, 30, device="cuda", dtype=torch.bfloat16)  # one
        y = F.linear(x.view(5, 30), weight)[1:].T.contiguous()  # two, and views
        mask = torch.arange(5, device="cuda") > 2  # two
        assert bool(mask.any()) and mask.nonzero().shape == (2, 1)  # one, and two waits
        assert mask.long().tolist() == [0, 0, 0, 1, 1]  # one, and a wait
        y.cpu()
        assert torch.ones(3).sum().ndim == 0
    assert (counts.launches, counts.waits) == (8, 4), (counts.operators, counts.reasons)
    assert counts.on_host == 1
    assert counts.operators["aten::mm"] == 1
    size = weight.nbytes + 3 * x.nbytes + 2 * 70 * 5 * 2 + 2 * 70 * 4 * 2
    assert size < counts.moved < size + 500
    with pytest.raises(NotImplementedError, match="reads numbers"):
        y.sum().item()
    held = recorder.live
    with recorder.counting() as counts:
        large = torch.empty(1000, device="cuda")
        other = large.view(10, 100)
        del large
        assert recorder.live == held + 4000
        del other
        torch.empty(700, device="cuda")
    assert counts.peak == 4000 and recorder.live == held


@pytest.mark.parametrize(
    ("family", "name"), [*zip(FAMILIES, ("A100", "RTX 5090", "H100", "A100"), strict=True)]
)
def test_a_decode_step_asks_the_host_nothing(card, family, name):
    """With nothing but tokens; with mask and positions, as transformers' users give them, it waits once for both."""
    recorder = card(name)
    model = fake_models.build(family)
    found = fake_models.decode_step(recorder, model)
    counts = found["counts"]
    assert counts.waits == counts.on_host == 0, counts.reasons
    assert found["launches_a_layer"] <= 45
    assert found["bytes_a_weight"] <= 2.05
    length = 41 + (144 if "pictures" in family else 0)
    given = {
        "attention_mask": torch.ones(1, length, device="cuda", dtype=torch.long),
        "position_ids": torch.full((1, 1), length - 1, device="cuda"),
    }
    counts = fake_models.decode_step(recorder, model, **given)["counts"]
    assert counts.waits <= 1 and counts.kernels["math"] == 0, counts.reasons


@pytest.mark.parametrize(("name", "holds"), [("A100", False), ("RTX 5090", False), ("H100", True)])
@pytest.mark.parametrize("family", ["mixtral", "llama4"])
def test_a_capture_before_the_check_is_refused_where_experts_ask_the_host(
    card, family, name, holds, monkeypatch
):
    """Torch's grouped product takes the kernel's place; on cards where it asks the host, no graph can hold it."""
    recorder = card(name)
    model = fake_models.build(family)
    assert fake_models.decode_step(recorder, model)["counts"].waits == 0
    monkeypatch.setattr(dispatch, "kernels_are_right", lambda *_, **__: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if holds:
        assert fake_models.decode_step(recorder, model)["counts"].waits == 0
    else:
        with pytest.raises(RuntimeError, match="a CUDA graph is being captured.* One pass of few tokens"):
            fake_models.decode_step(recorder, model)


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_card_without_a_kernel_is_named_when_packed_weights_are_loaded(card, weights, caplog):
    logging.Logger.warning_once.cache_clear()
    card("T4")
    quantizer.warn_without_gpu_kernel(fake_models.build("mixtral", weights))
    [said] = [record.message for record in caplog.records if record.name == "llamoe"]
    assert said.startswith("cuda:0: A GPU of compute capability 7.5 has no kernel") and "NF4" in said


def test_a_card_with_kernels_is_not_named(card, caplog):
    logging.Logger.warning_once.cache_clear()
    card("RTX 3090")
    quantizer.warn_without_gpu_kernel(fake_models.build("mixtral", "int4"))
    quantizer.warn_without_gpu_kernel(fake_models.build("mixtral"))
    assert not [record for record in caplog.records if record.name == "llamoe"]


@pytest.mark.parametrize("padding", [0, 3])
def test_generate_waits_at_most_once_a_token(card, padding):
    """In layers with chunks, too: positions that `generate` counts itself are not read. A mask with padding is."""
    recorder = card("H100")
    model, waits = fake_models.build("llama4"), []
    model.register_forward_pre_hook(lambda *_: waits.append(recorder.counts.waits))
    ids = fake_models.prompt(model, 40)["input_ids"]
    given = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    if padding:
        given["attention_mask"] = (torch.arange(40, device="cuda")[None] >= padding).long()
    with recorder.counting() as counts:
        model.generate(ids, **given)
    steps = [after - before for before, after in zip(waits[1:], waits[2:], strict=False)]
    # transformers asks whether all rows have ended.
    ours = [each for each in counts.reasons[-4 * steps[0] :] if "modeling" in each or "mask_inputs" in each]
    assert steps == [2 if padding else 1] * 4 and len(ours) == (4 if padding else 0), counts.reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_with_pictures_go_through_the_tower(card, dtype):
    """In a prompt and behind cached tokens; else the rows of pictures would be those of text."""
    recorder = card("H100")
    model, seen = fake_models.build("llama4-pictures", dtype=dtype), []
    model.vision_model.register_forward_hook(lambda tower, given, found: seen.append(found[0].shape))
    with_picture = fake_models.prefill(recorder, model, 300)
    assert len(seen) == 1
    fake_models.prefill(recorder, model, 300, behind=200)
    assert len(seen) == 3
    text = fake_models.prefill(recorder, fake_models.build("llama4", dtype=dtype), 300)
    assert with_picture.launches > text.launches + 20


@pytest.mark.parametrize(
    ("name", "dtype", "kernel"),
    [
        ("T4", torch.float16, "efficient"),
        ("T4", torch.float32, "efficient"),
        ("A100", torch.float32, "efficient"),
        ("A100", torch.float16, "flash"),
        ("RTX 5090", torch.bfloat16, "flash"),
    ],
    ids=str,
)
def test_no_card_multiplies_scores_out(card, name, dtype, kernel):
    """Shared keys in float32, and on cards before Ampere; a prompt, one behind cached tokens, and a token."""
    recorder = card(name)
    # Layers with chunks are in the committed file.
    model = fake_models.build("dense", dtype=dtype)
    scores = 64 * 8192 * 8192 * dtype.itemsize
    for behind in (0, 16384):
        counts = fake_models.prefill(recorder, model, 8192, behind)
        assert set(counts.kernels) == {kernel}
        assert counts.peak < 2 * scores
    assert set(fake_models.decode_step(recorder, model)["counts"].kernels) == {kernel}


def test_a_prompt_behind_cached_tokens_is_one_call_a_layer(card):
    """No mask, no block of queries, and keys are not repeated: memory is that of the tokens."""
    recorder = card("H100")
    model = fake_models.build("dense")
    first, behind = (fake_models.prefill(recorder, model, 4096, more) for more in (0, 32768))
    assert behind.kernels == {"flash": 2}
    layer = 2 * 8 * 128 * 2 * (4096 + 32768)  # keys and values of a layer
    assert behind.peak < first.peak + 4 * layer


def test_the_proof_runs_on_a_cpu_with_small_sizes(tmp_path, capsys, monkeypatch):
    """Each of its ten steps; results are written, and a check that fails decides of the exit status."""
    assert prove_gpu.main(["--small", "--output", str(tmp_path)]) == 0, capsys.readouterr().out[-3000:]
    found = json.loads((tmp_path / "prove_gpu.json").read_text())
    steps = {check["step"] for check in found["checks"]}
    assert steps == set(prove_gpu.STEPS) and len(steps) == 10
    judged = {check["step"] for check in found["checks"] if check["passed"] is not None}
    assert judged == set(prove_gpu.STEPS) - {"facts", "speed"}
    assert all(check["limit"] for check in found["checks"] if check["passed"] is not None)
    page = (tmp_path / "prove_gpu.md").read_text()
    assert page.count("\n| ") == len(found["checks"]) + 1 and "**failed**" not in page

    def fail(proof):
        proof.judge("a number", 3.0, most=2.0)
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(prove_gpu.STEPS, "speed", fail)
    assert prove_gpu.main(["--small", "--steps", "speed", "facts", "--output", str(tmp_path)]) == 1
    page = (tmp_path / "prove_gpu.md").read_text()
    assert (
        page.count("**failed**") == 2
        and "RuntimeError: no such kernel" in page
        and "| facts | date |" in page
    )
    if not torch.cuda.is_available():
        assert prove_gpu.main([]) == 2 and "needs a CUDA device" in capsys.readouterr().err


def test_budgets_of_the_proof_hold_on_a_card_that_is_not_there(card, monkeypatch, tmp_path):
    """The step's own body for cards, which no CPU takes, with the recorder in the place of CUDA's counters."""
    recorder = card("H100")

    def count(run):
        with recorder.counting() as counts:
            run()
        return counts

    def launches(run):
        counts = count(run)
        return counts.launches, {f"attention_{kernel}" for kernel in counts.kernels}

    monkeypatch.setattr(prove_gpu, "peak_of", lambda run, device: (None, count(run).peak))
    monkeypatch.setattr(prove_gpu, "_waits", lambda run: count(run).waits)
    monkeypatch.setattr(prove_gpu, "_launches", launches)
    monkeypatch.setattr(prove_gpu.qlora, "build", lambda *_: fake_models.build("llama4"))
    # peft cannot move fake tensors.
    with_lora = fake_models.build("llama4", lora=True)
    monkeypatch.setattr(
        prove_gpu, "adapted", lambda model: setattr(with_lora, "unload", lambda: model) or with_lora
    )
    ids = torch.arange(1 << 16, device="cuda")[None]
    monkeypatch.setattr(prove_gpu.Setting, "tokens", lambda self, batch, length, vocabulary: ids[:, :length])
    memory = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    proof = prove_gpu.Proof(torch.device("cuda", 0), False, tmp_path, step="budgets")
    prove_gpu.budgets(proof)
    assert [check for check in proof.checks if check.passed is not True] == []
    found = {check.what: check.value for check in proof.checks}
    assert found["peak of a prompt over what was counted"] == pytest.approx(1, abs=1e-3)
    assert found["attention multiplied out"] == found["waits a step"] == 0
    without, with_adapters = (found[name] for name in found if "launches a layer" in name)
    assert without < with_adapters < without + 12
    # The limit is not far above what is counted.
    assert prove_gpu.MOST_OF_LOSS < 1.3 * found["GB of a loss over 8192 tokens"]


def test_counted_numbers_are_within_their_limits(capsys, monkeypatch):
    """The committed file, the page, and some cases counted anew."""
    results = json.loads(gpu_budgets.RESULTS.read_text())
    assert gpu_budgets.exceeded(results) == []
    monkeypatch.setattr("sys.argv", ["gpu_budgets", "--check"])
    assert gpu_budgets.main() == 0, capsys.readouterr().err
    assert len(results["decode"]) == len(list(gpu_budgets.decode_cases()))
    some = [
        ("A100", "mixtral", "bf16", True),
        ("RTX 5090", "llama4-pictures", "int4", False),
        ("H100", "dense", "nf4", False),
        ("A100", "llama4", "int8", True),
    ]
    for row in results["decode"]:
        asked = (row["card"], row["family"], row["weights"], row["lora"])
        if asked in some and (row["attention"], row["cache"]) == ("sdpa", "dynamic"):
            some.remove(asked)
            assert gpu_budgets.decode({key: row[key] for key in row if key in gpu_budgets.KEYS}) == row
    assert not some
    wrong = dict(results["decode"][0], waits=2, bytes_a_weight=9.0, attention_kernels=["math"])
    assert len(gpu_budgets.exceeded({"decode": [wrong], "prefill": [], "compiled": []})) == 3
    # A fixed cache takes no more bytes either.
    fixed = next(row for row in results["decode"] if row["cache"] == "static")
    wrong = dict(fixed, bytes_a_weight=9.0)
    assert len(gpu_budgets.exceeded({"decode": [wrong], "prefill": [], "compiled": []})) == 1


@pytest.mark.parametrize("place", range(len(list(gpu_budgets.prefill_cases()))))
def test_memory_of_prompts_is_within_absolute_limits(place):
    """A tenth more of any peak is too much, also where all of a row grows alike."""
    row = json.loads(gpu_budgets.RESULTS.read_text())["prefill"][place]
    for more in (
        dict(peak_behind=2.2 * row["peak"][0]),
        dict(peak=[1.1 * peak for peak in row["peak"]]),
    ):
        found = gpu_budgets.exceeded({"decode": [], "prefill": [dict(row, **more)], "compiled": []})
        assert found and all("GB for" in each for each in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_prompts_and_graphs_are_fresh(family):
    """Of the committed file those in 16 bits, and graphs of int4 with adapters."""
    results = json.loads(gpu_budgets.RESULTS.read_text())
    rows = [case for case in gpu_budgets.prefill_cases() if case["family"] == family]
    ours = [row for row in results["prefill"] if row["family"] == family]
    assert [{key: row[key] for key in case} for row, case in zip(ours, rows, strict=True)] == rows
    plain = [row for row in ours if row["weights"] == "bf16"]
    assert plain == [gpu_budgets.prefill(row) for row in rows if row["weights"] == "bf16"]
    compiled = [row for row in results["compiled"] if row["family"] == family]
    assert len(compiled) == 8 * (family != "llama4-pictures")
    some = [row for row in compiled if (row["weights"], row["lora"]) in (("bf16", False), ("int4", True))]
    assert some == [gpu_budgets.graphs(family, row["weights"], row["lora"]) for row in some]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_of_prompts_and_graphs_are_fresh(family):
    results = json.loads(gpu_budgets.RESULTS.read_text())
    for row in results["prefill"]:
        if row["family"] == family:
            found = gpu_budgets.prefill(row)
            # bitsandbytes keeps a small table from the first use on.
            for peak in ("peak", "peak_behind"):
                assert found.pop(peak) == pytest.approx(row.pop(peak), rel=1e-6)
            assert found == row
    for row in results["compiled"]:
        assert row["family"] != family or gpu_budgets.graphs(family, row["weights"], row["lora"]) == row


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_decode_steps_are_fresh(family):
    """Of every combination on one card, which are in turn: all three take minutes."""
    rows = [row for row in json.loads(gpu_budgets.RESULTS.read_text())["decode"] if row["family"] == family]
    num_cards = len(gpu_budgets.DECODE_CARDS)
    assert len(rows) == 96
    some = [row for number, row in enumerate(rows) if number % num_cards == number // num_cards % num_cards]
    assert len(some) == 32 and {row["card"] for row in some} == set(gpu_budgets.DECODE_CARDS)
    for row in some:
        assert gpu_budgets.decode({key: row[key] for key in row if key in gpu_budgets.KEYS}) == row


@pytest.mark.parametrize(
    "card", [CARDS[name] for name in ("T4", *gpu_budgets.DECODE_CARDS)], ids=lambda card: card.name
)
def test_expectations_of_a_card_are_what_the_library_does(card):
    """The table of cards is written by hand; what it says of kernels is what models on such a card take."""
    expected = card.expects()
    dtype = torch.bfloat16 if expected["dtype"] == "bfloat16" else torch.float16
    with pretend(card) as recorder:
        model = fake_models.build("llama4", dtype=dtype)
        step = fake_models.decode_step(recorder, model)["counts"]
        prompt = fake_models.prefill(recorder, model, 300)
    kernel = "flash" if expected["attention"] == "flash" else "efficient"
    assert set(step.kernels) == set(prompt.kernels) == {kernel}
    has_kernel = "kernels" in expected["few rows of experts"]
    assert (step.operators["llamoe:packed_product"] > 0) == has_kernel
    waits = any("grouped product" in each or "tolist" in each for each in prompt.reasons)
    assert waits == ("on the device" not in expected["many rows of experts"])
