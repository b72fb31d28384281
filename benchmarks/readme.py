"""Writes the README's section on speed from the committed results.

python -m benchmarks.readme
python -m benchmarks.readme --check    # exit status 1 if the section is not what the results say
"""

import argparse
import json
import sys
from pathlib import Path

from . import OURS, REFERENCE
from .bars import BARS, Results, best

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- speed: written by `python -m benchmarks.readme` -->"
END = "<!-- end of speed -->"
TOKENS = (1, 8, 32, 128, 1024, 8192)


def section(cpu: dict | None, gpu: dict | None) -> str:
    """The text between the markers.

    Args:
        cpu: results of `benchmarks.cpu`, or None.
        gpu: results of `benchmarks.gpu`, or None.
    """
    paragraphs = []
    if cpu:
        paragraphs += _measured(cpu, "cpu")
    if gpu:
        paragraphs += _measured(gpu, "gpu")
    missing = []
    if not cpu:
        missing.append("No figures of a CPU are committed.")
    if not gpu:
        missing.append(
            "No GPU was measured: `python -m benchmarks.gpu` is there for one, its figures are not."
        )
    missing += [line for results in (cpu, gpu) if results for line in _not_run(results)]
    paragraphs.append(
        " ".join(
            [*missing, "Whole published models, several devices and servers such as vLLM were not measured."]
        )
    )
    return "\n\n".join(paragraphs)


def _measured(results: dict, name: str) -> list[str]:
    about = results["runs"][0]
    if name == "cpu":
        where = f"One thread of a CPU ({about['processor']}), float32, hidden size 512, experts of 1024; processor time"
        command = "make bench"
    else:
        where = f"One {about['device']}, bfloat16, layers of Scout's and Maverick's sizes; time between CUDA events"
        command = "python -m benchmarks.gpu"
    versions = about["versions"]
    found = Results(results)
    rows = [
        f"| stock's time over ours, tokens: | {' | '.join(map(str, TOKENS))} |",
        "|---" * (len(TOKENS) + 1) + "|",
    ]
    for group, title in _LINES[name].items():
        cells = [_cell(found, group, tokens) for tokens in TOKENS]
        if any(cell != "—" for cell in cells):
            rows.append(f"| {title} | " + " | ".join(cells) + " |")
    bars = []
    for bar in BARS[name]:
        value = bar.value(found)
        if value is not None:
            verdict = "" if bar.reached_by(value) else ", **not reached**"
            limit = f"{'at most' if bar.at_most else 'at least'} {bar.limit:.3g}{bar.unit}"
            bars.append(f"| {bar.text} | {value:.3g}{bar.unit} | {limit}{verdict} |")
    return [
        f"{where}, against transformers {versions['transformers']} with torch {versions['torch']}, on the same "
        f"weights, outputs compared ([all figures](benchmarks/results/{name}.md), `{command}`).",
        "\n".join(rows),
        "\n".join(["| | measured | wanted |", "|---|---|---|", *bars]),
    ]


_LINES = {
    "cpu": {
        "block-16": "mixture block, 16 experts",
        "block-128": "mixture block, 128 experts",
        "decoder": "whole decoder, 16 experts",
        "dense": "dense LLaMA",
    },
    "gpu": {
        "block-scout": "Scout-shaped block",
        "block-maverick": "Maverick-shaped block",
        "decoder": "Scout-shaped decoder",
        "dense": "dense LLaMA",
    },
}


def _cell(found: Results, group: str, tokens: int) -> str:
    # Decoding and prefill of as many tokens differ in a decoder: decoding is shown where both were measured.
    for phase in ("decode", "prefill"):
        for case in found.find(group, phase=phase, tokens=tokens):
            ratio = best(case, "ratio", OURS)
            if case.get("routing", "uniform") == "uniform" and ratio is not None:
                return f"{ratio:.1f}" if ratio >= 1.5 else f"{ratio:.2f}"
    return "—"


def _not_run(results: dict) -> list[str]:
    lines = []
    for case in results["cases"]:
        row = case["contestants"].get(REFERENCE, {})
        if "skipped" in row:
            lines.append(f"Stock was left out of {case['case']} ({row['skipped']}).")
    return lines


def replaced(text: str, body: str) -> str:
    """A README with another body between the markers.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md needs the line {BEGIN} and after it {END}, once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"


def main() -> int:
    """Write the section, or check it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if it is stale")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    cpu, gpu = (
        json.loads(path.read_text()) if (path := options.results / f"{name}.json").exists() else None
        for name in ("cpu", "gpu")
    )
    text = options.readme.read_text()
    try:
        wanted = replaced(text, section(cpu, gpu))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if options.check:
        if text != wanted:
            print("README.md is stale: run `python -m benchmarks.readme`", file=sys.stderr)
        return int(text != wanted)
    options.readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
