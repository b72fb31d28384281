"""Choose image-text pairs as MetaCLIP's data were chosen: keep what names something, and of each name not too many.

    python examples/curate_pairs.py --pairs pairs.jsonl --metadata names.txt --threshold 20000 --out curated.jsonl

`pairs.jsonl` has a pair in each line, any JSON object with a "text". `names.txt` has a name in each line; in the paper
these are WordNet's synsets and words and titles of Wikipedia. A pair matches the names that stand in its text as whole
words, in any letter case and whatever marks stand between them; Meta's own matching keeps case and most marks. Who
matches none is dropped. A name that c pairs match is drawn with probability threshold / c, or surely where c is less,
and a pair is kept as soon as one of its names is drawn (Xu et al. 2023, arXiv 2309.16671, algorithm 1): rare names keep
all of their pairs, frequent ones at least about `threshold`.

The paper's threshold is 20,000 for 400 million pairs, and 170,000 for 2.5 billion, so that the names that are rarer
make up about 6 % of all matches; that share is printed. Pairs are read line by line, twice; only names and their counts
are held in memory.
"""

import argparse
import json
import random
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn


def fail(message: object) -> NoReturn:
    """Print one line and exit with status 2, as argparse does."""
    print(f"curate_pairs: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


def read_arguments() -> argparse.Namespace:
    """Read the command line; what is wrong with it ends the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=Path, required=True, help="JSON lines with a text each")
    parser.add_argument("--metadata", type=Path, required=True, help="a name in each line")
    parser.add_argument("--out", type=Path, required=True, help="the lines that were chosen")
    parser.add_argument("--threshold", type=int, default=20000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.threshold < 1:
        parser.error(f"argument --threshold: must be at least 1, not {arguments.threshold}")
    for path in (arguments.pairs, arguments.metadata):
        if not path.is_file():
            fail(f"no such file: {path}")
    if arguments.out.exists():
        fail(f"{arguments.out} is there already; name another file with --out")
    if not arguments.out.absolute().parent.is_dir():
        fail(f"no such folder: {arguments.out.absolute().parent}")
    return arguments


if __name__ == "__main__":
    # Help and mistakes are shown first.
    read_arguments()

try:
    import ahocorasick  # pyright: ignore[reportMissingImports]
except ImportError:
    fail("it finds names with pyahocorasick, which is not installed: pip install pyahocorasick")


def as_words(text: str) -> str:
    """The text without letter case and marks, with one blank around every word."""
    text = unicodedata.normalize("NFC", text).casefold()
    # Letters, the marks that belong to them, and numbers.
    letters = (letter if unicodedata.category(letter)[0] in "LMN" else " " for letter in text)
    return f" {' '.join(''.join(letters).split())} "


def read_names(path: Path) -> list[str]:
    """The names of a file, one of those with the same words; ends the program if there is none."""
    seen: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if as_words(line).strip():
            seen.setdefault(as_words(line), line.strip())
    if not seen:
        fail(f"{path} has no name")
    return list(seen.values())


def find_names(names: Iterable[str]) -> Any:
    """An automaton that finds all names in a text in one pass, each by its number."""
    automaton = ahocorasick.Automaton()
    for number, name in enumerate(names):
        automaton.add_word(as_words(name), number)
    automaton.make_automaton()
    return automaton


def read_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Each line, and its text; ends the program at a line that is no pair."""
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                pair = json.loads(line)
            except json.JSONDecodeError as error:
                fail(f"{path}, line {number} is not JSON: {error}")
            if not isinstance(pair, dict) or not isinstance(pair.get("text"), str):
                fail(f'{path}, line {number} has no "text"')
            yield line, pair["text"]


def matches(automaton: Any, text: str) -> list[int]:
    """The numbers of the names in a text, each once, in ascending order."""
    return sorted({number for _, number in automaton.iter(as_words(text))})


def chances(counts: Counter[int], threshold: int) -> dict[int, float]:
    """The probability with which each name is drawn: that of the paper."""
    return {number: min(1.0, threshold / count) for number, count in counts.items()}


def main() -> None:
    """Count, draw, and write the pairs that were chosen."""
    arguments = read_arguments()
    names = read_names(arguments.metadata)
    automaton = find_names(names)
    counts: Counter[int] = Counter()
    total = 0
    for _, text in read_pairs(arguments.pairs):
        counts.update(matches(automaton, text))
        total += 1
    chance = chances(counts, arguments.threshold)
    rng, kept, chosen = random.Random(arguments.seed), Counter(), 0
    half = arguments.out.with_name(f"{arguments.out.name}.part")
    with half.open("w") as out:
        for line, text in read_pairs(arguments.pairs):
            found = matches(automaton, text)
            if any(rng.random() < chance[number] for number in found):
                out.write(line if line.endswith("\n") else f"{line}\n")
                kept.update(found)
                chosen += 1
    half.rename(arguments.out)
    rare = sum(count for count in counts.values() if count < arguments.threshold)
    print(f"kept {chosen} of {total} pairs; {len(counts)} of {len(names)} names occur")
    print(f"names rarer than {arguments.threshold}: {rare / max(1, counts.total()):.1%} of all matches")
    for number, count in counts.most_common(10):
        print(f"  {names[number]}: {count} pairs, {kept[number]} kept")


if __name__ == "__main__":
    main()
