"""Choosing image-text pairs by MetaCLIP's algorithm."""

import json
import random
import re
import sys
from collections import Counter

import pytest

pytest.importorskip("ahocorasick", reason="pyahocorasick is not installed")

NAMES = ["dog", "cat", "golden retriever", "zebra", "okapi", "Größe", "new york city", "ape"]


@pytest.fixture
def curate(tmp_path, monkeypatch, capsys):
    """Runs the script on texts and names; returns what was kept and what was printed."""
    import curate_pairs

    def run(texts, names=NAMES, lines=None, **options):
        pairs, metadata, out = tmp_path / "pairs.jsonl", tmp_path / "names.txt", tmp_path / "out.jsonl"
        out.unlink(missing_ok=True)
        pairs.write_text(
            "".join(
                f"{line}\n"
                for line in lines
                or [json.dumps({"image": f"{n}.jpg", "text": t}) for n, t in enumerate(texts)]
            )
        )
        metadata.write_text("\n".join(names))
        words = ["curate_pairs.py", "--pairs", pairs, "--metadata", metadata, "--out", out]
        words += [word for name, value in options.items() for word in (f"--{name}", value)]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        curate_pairs.main()
        return [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out

    return run


def skewed(count=6000):
    """Captions in which dogs are 60 times as frequent as okapis."""
    rng = random.Random(0)
    weights = {"dog": 600, "cat": 250, "golden retriever": 90, "zebra": 30, "okapi": 10, "nothing known": 150}
    return [
        f"A photo of a {name}, no. {number}"
        for number, name in enumerate(rng.choices(list(weights), weights.values(), k=count))
    ]


def test_frequent_names_are_thinned_and_rare_ones_kept(curate):
    texts, threshold = skewed(), 300
    kept, printed = curate(texts, threshold=threshold)
    words = re.compile("dog|cat|golden retriever|zebra|okapi|nothing known")
    before, after = (
        Counter(words.findall(text)[0] for text in each) for each in (texts, [pair["text"] for pair in kept])
    )
    assert before["okapi"] < before["zebra"] < threshold < before["golden retriever"] < before["cat"]
    assert (
        after["okapi"] == before["okapi"]
        and after["zebra"] == before["zebra"]
        and "nothing known" not in after
    )
    for name in ("dog", "cat", "golden retriever"):
        # Four standard deviations of a binomial draw.
        chance = threshold / before[name]
        assert abs(after[name] - threshold) < 4 * (before[name] * chance * (1 - chance)) ** 0.5
    assert f"kept {len(kept)} of 6000 pairs; 5 of 8 names occur" in printed
    assert f"dog: {before['dog']} pairs, {after['dog']} kept" in printed
    rare = (before["okapi"] + before["zebra"]) / (6000 - before["nothing known"])
    assert f"names rarer than 300: {rare:.1%} of all matches" in printed


def test_the_draw_is_that_of_the_paper(curate):
    """A pair with two names is kept if either is drawn: its chance is that of the plain algorithm, pair by pair."""
    texts = ["a dog and a cat"] * 800 + ["a dog"] * 1200
    kept, _ = curate(texts, threshold=400)
    both = sum("cat" in pair["text"] for pair in kept)
    # dog occurs 2,000 times, cat 800 times.
    chance = 1 - (1 - 400 / 2000) * (1 - 400 / 800)
    assert abs(both - 800 * chance) < 4 * (800 * chance * (1 - chance)) ** 0.5
    assert abs(len(kept) - both - 240) < 4 * (1200 * 0.2 * 0.8) ** 0.5


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        ("My DOG.", True),
        ("dogs", False),
        ("hot-dog", True),
        ("die GRÖSSE", True),
        ("die Gro\u0308ße", True),
        ("a golden  retriever", True),
        ("golden, retriever", True),
        ("golden old retriever", False),
        ("NEW YORK CITY!", True),
        ("new york", False),
        ("a grape", False),
        ("", False),
    ],
)
def test_names_are_whole_words(text, is_kept, curate):
    assert bool(curate([text])[0]) is is_kept


def test_one_seed_one_choice(curate):
    first, second, other = (curate(skewed(), threshold=100, seed=seed)[0] for seed in (3, 3, 4))
    assert first == second != other


def test_names_of_the_same_words_are_one(curate):
    """The paper's list has "The" and "the", "C" and "C++"."""
    kept, printed = curate(["the dog", "C# code", "a code"], names=["The", "the", "C", "C++", "+", "dog"])
    assert [pair["text"] for pair in kept] == ["the dog", "C# code"]
    assert "3 of 3 names occur" in printed


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lines": ['{"text": "dog"}', "nonsense"]}, r"line 2 is not JSON"),
        ({"lines": ['{"caption": "dog"}']}, r'line 1 has no "text"'),
        ({"lines": ['{"text": 5}']}, r'line 1 has no "text"'),
        ({"lines": ["[1]"]}, r'line 1 has no "text"'),
        ({"names": ["?", ""]}, "has no name"),
        ({"threshold": 0}, "argument --threshold: must be at least 1, not 0"),
        ({"pairs": "{}/none"}, "no such file: {}/none"),
        ({"out": "{}/none/out"}, "no such folder: {}/none"),
        ({"out": "{}/names.txt"}, "names.txt is there already"),
    ],
)
def test_bad_input_is_told_in_a_line(given, says, curate, tmp_path, capsys):
    given = {
        name: value.format(tmp_path) if isinstance(value, str) else value for name, value in given.items()
    }
    with pytest.raises(SystemExit, match="2"):
        curate(["dog"], **given)
    error = capsys.readouterr().err
    assert re.search(says.format(tmp_path), error) and "Traceback" not in error
    assert not list(tmp_path.glob("out*"))
