"""The measurement of how often the small model's experts are in memory."""

import re
import sys

import pytest
from support.paths import EXAMPLES


def test_hit_rates_are_counted_and_the_page_written(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    import expert_hit_rates

    page = tmp_path / "rates.md"
    page.write_text(f"Before.\n\n{expert_hit_rates.BEGIN}\n\nold\n\n{expert_hit_rates.END}\n\nBehind.\n")
    words = ["--model", str(EXAMPLES / "llamoe-tiny"), "--count", "1", "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["expert_hit_rates.py", *words])
    expert_hit_rates.main()
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("Behind.\n") and "old" not in text
    assert capsys.readouterr().out.strip() in text
    rows = re.findall(
        r"^\| (\d) of 8 \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+)% \|$", text, re.MULTILINE
    )
    assert [row[0] for row in rows] == list("12345678")
    answers = [float(row[1]) for row in rows]
    # With room for all, what a prompt brought is there; with room for one, two layers push each other's out.
    assert answers[0] == 0 and answers[-1] == 100
    assert answers == sorted(answers)
    assert [float(row[3]) for row in rows][-1] == 100
    assert (tmp_path / "rates.svg").read_text().startswith("<?xml")
