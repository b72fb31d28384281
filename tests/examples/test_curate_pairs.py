"""Test that curation keeps pairs with the probabilities of MetaCLIP's paper."""

import json
import math
import random

import pytest

ENTRIES = ["cat", "a red cat", "dog", "St. Louis", "photo"]


@pytest.fixture
def curate_pairs():
    import curate_pairs

    return curate_pairs


@pytest.mark.parametrize(
    ("caption", "matched"),
    [
        ("a red cat", [0, 1]),
        ("concatenate dogs", []),
        ("photo: a dog, a red\tcat!", [0, 1, 2, 4]),
        ("St. Louis", []),
        ("a red  cat", [0]),
        ("", []),
    ],
)
def test_entries_are_matched_between_spaces(caption, matched, curate_pairs):
    assert curate_pairs.Matcher(ENTRIES)(caption) == matched
    # MetaCLIP's published code puts spaces around signs, and searches for substrings.
    text = f" {caption} "
    for sign in ",.;:?!`":
        text = text.replace(sign, f" {sign} ")
    text = text.replace("\t", " ")
    assert [number for number, entry in enumerate(ENTRIES) if f" {entry} " in text] == matched


def test_drawn_pairs_are_kept_as_often_as_written_out(tmp_path, curate_pairs):
    """Popular entries keep t captions on average, and a pair is kept if any of its entries keeps it."""
    rng, t, seeds = random.Random(5), 30, 60
    captions = rng.choices(["cat", "dog", "cat dog", "photo", "nothing"], [50, 40, 20, 2, 10], k=800)
    counts = {word: sum(word in caption.split() for caption in captions) for word in ("cat", "dog", "photo")}
    chance = {word: min(1.0, t / count) for word, count in counts.items()}
    (tmp_path / "pairs").write_text("".join(json.dumps({"caption": caption}) + "\n" for caption in captions))
    (tmp_path / "metadata").write_text(json.dumps(ENTRIES))
    kept = []
    for seed in range(seeds):
        words = [str(tmp_path / name) for name in ("pairs", "metadata", "curated")]
        curate_pairs.main([*words, "--t", str(t), "--seed", str(seed)])
        kept += [json.loads(line)["caption"] for line in (tmp_path / "curated").read_text().splitlines()]
    for caption in set(captions):
        chances = [chance[word] for word in caption.split() if word in chance]
        expected = 1 - math.prod(1 - share for share in chances)
        draws = seeds * captions.count(caption)
        # Allow five standard deviations of a binomial distribution.
        assert abs(kept.count(caption) / draws - expected) <= 5 * math.sqrt(expected * (1 - expected) / draws)
