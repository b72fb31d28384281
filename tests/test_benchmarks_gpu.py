"""What whole models ask of a GPU, counted on cards that are not there, and the program that proves a real one."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks import fake_models
from benchmarks.cards import CARDS
from benchmarks.fake_cards import pretend

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


@pytest.mark.parametrize("name", ["A100", "H100", "RTX 5090"])
@pytest.mark.parametrize("family", FAMILIES)
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


def test_generate_waits_at_most_once_a_token(card):
    """In layers with chunks, too: positions that `generate` counts itself are not read."""
    recorder = card("H100")
    model, waits = fake_models.build("llama4"), []
    model.register_forward_pre_hook(lambda *_: waits.append(recorder.counts.waits))
    ids = fake_models.prompt(model, 40)["input_ids"]
    with recorder.counting() as counts:
        model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    steps = [after - before for before, after in zip(waits[1:], waits[2:], strict=False)]
    # transformers asks whether all rows have ended.
    assert steps == [1, 1, 1, 1] and not any("modeling" in each for each in counts.reasons[-4:])


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
    model = fake_models.build("llama4", dtype=dtype)
    scores = 40 * 8192 * 8192 * dtype.itemsize
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
