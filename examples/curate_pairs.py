"""Curate pairs of pictures and captions as MetaCLIP does (Xu et al. 2023, "Demystifying CLIP Data").

    python examples/curate_pairs.py pairs.jsonl metadata.json curated.jsonl --t 20000

`pairs.jsonl` has a line of JSON with a "caption" for each pair, `metadata.json` a list of entries (WordNet's synsets,
titles and frequent words of Wikipedia). A caption matches each entry that it has as whole words. An entry that `count`
captions match keeps each with probability t / count if count > t; other entries keep all. A pair is kept if any entry
keeps its caption, so never without a match. `pairs.jsonl` is read twice, so that it may be larger than memory.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

WRAPPED = (",", ".", ";", ":", "?", "!", "`")


class Matcher:
    """Finds the metadata entries that a caption has as whole words."""

    def __init__(self, entries: Sequence[str]):
        self.ids = {tuple(entry.split(" ")): number for number, entry in enumerate(entries)}
        self.lengths = sorted({len(words) for words in self.ids})

    def __call__(self, caption: str) -> list[int]:
        """Return the indices of entries in a caption, each once, in ascending order."""
        for sign in WRAPPED:
            caption = caption.replace(sign, f" {sign} ")
        words = caption.replace("\t", " ").replace("\n", " ").replace("\r", " ").split(" ")
        runs = (tuple(words[i : i + n]) for n in self.lengths for i in range(len(words) - n + 1))
        return sorted({self.ids[run] for run in runs if run in self.ids})


def count_entries(matches: Iterator[list[int]], num_entries: int) -> list[int]:
    """Return for each entry the number of captions that match it."""
    counts = [0] * num_entries
    for entries in matches:
        for entry in entries:
            counts[entry] += 1
    return counts


def keep_probabilities(counts: Sequence[int], t: int) -> list[float]:
    """Return for each entry the probability with which it keeps a caption, t / max(count, t)."""
    return [t / max(count, t) for count in counts]


def is_kept(entries: Sequence[int], probabilities: Sequence[float], rng: random.Random) -> bool:
    """Draw whether a pair is kept: each metadata entry that its caption matches keeps it with its probability."""
    return any(rng.random() < probabilities[entry] for entry in entries)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the pairs twice, and write those that are kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("pairs", "metadata", "curated"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--t", type=int, default=20_000, help="captions that an entry keeps on average")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    entries = json.loads(given.metadata.read_text())
    match, rng = Matcher(entries), random.Random(given.seed)
    with given.pairs.open() as lines:
        counts = count_entries((match(json.loads(line)["caption"]) for line in lines), len(entries))
    probabilities = keep_probabilities(counts, given.t)
    kept = 0
    with given.pairs.open() as lines, given.curated.open("w") as curated:
        for line in lines:
            if is_kept(match(json.loads(line)["caption"]), probabilities, rng):
                kept += 1
                curated.write(line)
    print(
        f"{kept:,} pairs kept; {sum(count > given.t for count in counts):,} entries were cut to {given.t:,}"
    )


if __name__ == "__main__":
    main()
