"""The examination of quantized models: the same questions for all, likelihoods as the formula gives them."""

import dataclasses
import math
import re

import pytest
import torch
from support.paths import EXAMPLES

from benchmarks import quality
from llamoe.modeling.kernels import cpp_kernels

pytestmark = pytest.mark.slow

FOLDER = EXAMPLES / "llamoe-tiny"


@pytest.fixture(scope="module")
def exam():

    return quality.Examination(FOLDER, 5)


@torch.no_grad()
def test_surprise_is_each_answers_own(exam):
    """Row by row, without padding."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32).eval()
    inputs = exam.batches[0].to(dtype=torch.float32)
    expected = exam.expected[:5]
    found = quality.surprise_of(model, inputs, expected)
    assert {len(ids) for ids in expected} != {len(expected[0])}
    for row, ids in enumerate(expected):
        kept = inputs["attention_mask"][row].bool()
        prompt = inputs["input_ids"][row][kept]
        whole = torch.cat([prompt, torch.tensor(ids)])[None]
        logits = model(input_ids=whole, pixel_values=inputs["pixel_values"][row : row + 1]).logits[0]
        steps = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
        alone = -sum(step[token] for step, token in zip(steps, ids, strict=True))
        assert found[row].item() == pytest.approx(alone.item(), abs=1e-4)


def test_expected_tokens_are_what_the_chat_template_writes(exam):
    processor = exam.processor
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": exam.answers[0]}]},
    ]
    begin = processor.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=True)[0]
    whole = processor.apply_chat_template(turns, tokenize=True)[0]
    assert whole[len(begin) :][: len(exam.expected[0])] == exam.expected[0]


def test_variants_are_compared_question_by_question(exam):

    assert len(exam.answers) == len(exam.expected) == 15
    wanted = quality.variants()
    base, packed = (exam.ask(wanted[name]) for name in (quality.BASE, "int4, groups of 64"))
    assert packed.nbytes < 0.45 * base.nbytes
    row = quality.compare(exam, "int4, groups of 64", packed, base)
    right = [text == answer for text, answer in zip(packed.texts, exam.answers, strict=True)]
    before = [text == answer for text, answer in zip(base.texts, exam.answers, strict=True)]
    assert row.accuracy == pytest.approx(sum(right) / 15)
    assert row.change == pytest.approx((sum(right) - sum(before)) / 15)
    assert row.perplexity == pytest.approx(math.exp(packed.surprise.sum() / sum(map(len, exam.expected))))
    assert row.surprise_change == pytest.approx(
        math.log(row.perplexity) - math.log(quality.compare(exam, "", base, base).perplexity)
    )
    assert list(row.columns) == ["trained", "near", "far"]
    same = quality.compare(exam, quality.BASE, base, base)
    assert (same.change, same.change_error, same.same, same.surprise_change, same.surprise_error) == (
        0,
        0,
        1,
        0,
        0,
    )


@pytest.mark.skipif(cpp_kernels.library() is None, reason="needs the compiled kernels of a CPU")
def test_errors_of_rows_in_8_bits_are_those_of_rounding(monkeypatch):
    """A step is a 127th of the largest of 32 numbers, and the error of rounding has a twelfth of its square."""
    monkeypatch.setattr(quality.float32_blocks, "_HAS_AMX", False)
    rows = {(row["name"], row["factor"]): row for row in quality.errors_of_products(64, 256, 48)}
    for name in ("int8", "int4, groups of 32"):
        # Largest of 32 normal numbers: about 2.1 deviations in mean, 4.5 in mean square.
        assert rows[name, 1]["rows"] == pytest.approx((4.5 / 12) ** 0.5 / 127, rel=0.3)
        # Of one large number in 32 the step is a 127th, and the other 31 are rounded to it.
        assert rows[name, 100]["rows"] == pytest.approx((32 / 12 * 2 / 3.14) ** 0.5 / 127, rel=0.5)
        assert rows[name, 1]["rows"] < rows[name, 1]["both"]
    assert rows["int8", 1]["weights"] < 0.2 * rows["int4, groups of 32", 1]["weights"]


def test_a_missed_bar_is_told():

    fields = {field.name: 0 for field in dataclasses.fields(quality.Row)}
    rows = [{**fields, "name": name, "change": -0.011} for name in ("16 bit", "int8", "int4, groups of 32")]
    assert quality.missed(rows) == ["int8: 1.10 points lost, 0.2 were allowed"]


def test_hit_rates_are_counted_and_drawn(tmp_path):
    text = quality.hits(1, tmp_path / "rates.svg")
    rows = re.findall(
        r"^\| (\d) of 8 \| ([\d.]+)% \| [\d.]+% \| ([\d.]+)% \| ([\d.]+)% \|$", text, re.MULTILINE
    )
    assert [row[0] for row in rows] == list("12345678")
    answers = [float(row[1]) for row in rows]
    # With room for all, what a prompt brought is there; with room for one, two layers push each other's out.
    assert answers[0] == 0 and answers[-1] == 100
    assert answers == sorted(answers)
    assert float(rows[-1][2]) == 100
    assert (tmp_path / "rates.svg").read_text().startswith("<?xml")
