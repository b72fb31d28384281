"""Draws the results: ratio of the block over the number of tokens T, ratio of the models, peak memory.

python -m benchmarks.plot benchmarks/results/cpu.json
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullFormatter

from . import OURS, REFERENCE

# Okabe and Ito's colours, distinct for colour-blind eyes; each line also has a marker of its own.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vX"
STYLE = {
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "llamoe",
}


def draw(results: dict, path: Path) -> None:
    """Draw three panels into an SVG file."""
    cases = results["cases"]
    with pyplot.rc_context(STYLE):
        figure, (blocks, models, memory) = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
        _draw_ratios(blocks, _block_lines(cases, "ratio"), "mixture block: stock's time / ours")
        _draw_ratios(models, _model_lines(cases), "whole models: stock's time / ours")
        _draw_memory(memory, cases)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _block_lines(cases: list[dict], field: str, who: str = OURS) -> dict[str, list[tuple]]:
    lines: dict[str, list[tuple]] = {}
    for case in cases:
        row = case["contestants"].get(who, {})
        if (
            case["group"].startswith("block-")
            # A logarithmic axis has no zero.
            and row.get(field)
            and case["routing"] == "uniform"
            and not case["repeated"]
        ):
            spread = row.get("ratio_quartiles") if field == "ratio" else None
            label = f"{case['experts']} experts"
            lines.setdefault(label, []).append((case["tokens"], row[field], spread))
    return lines


def _model_lines(cases: list[dict]) -> dict[str, list[tuple]]:
    lines: dict[str, list[tuple]] = {}
    names = {"decoder": "mixture", "dense": "dense"}
    for case in cases:
        row = case["contestants"].get(OURS, {})
        if case["group"] in names and case.get("phase") in ("prefill", "decode") and "ratio" in row:
            label = f"{names[case['group']]}, {case['phase']}"
            lines.setdefault(label, []).append((case["tokens"], row["ratio"], row["ratio_quartiles"]))
    return lines


def _draw_ratios(axes, lines: dict[str, list[tuple]], title: str) -> None:
    for (label, points), colour, marker in zip(lines.items(), COLOURS, MARKERS, strict=False):
        tokens, values, spreads = zip(*sorted(points), strict=True)
        below = [value - min(spread[0], value) for value, spread in zip(values, spreads, strict=True)]
        above = [max(spread[1], value) - value for value, spread in zip(values, spreads, strict=True)]
        axes.errorbar(
            tokens,
            values,
            yerr=(below, above),
            color=colour,
            marker=marker,
            markersize=4,
            label=label,
            capsize=2,
        )
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    _finish(axes, title, bool(lines))


def _draw_memory(axes, cases: list[dict]) -> None:
    number = 0
    for who, style in ((REFERENCE, "--"), (OURS, "-")):
        for position, (label, points) in enumerate(_block_lines(cases, "peak_bytes", who).items()):
            tokens, values, _ = zip(*sorted(points), strict=True)
            axes.plot(
                tokens,
                [value / 1e6 for value in values],
                style,
                color=COLOURS[position],
                marker=MARKERS[position],
                markersize=4,
                label=f"{who}, {label}",
            )
            number += 1
    _finish(axes, "mixture block: peak memory above weights, MB", number > 0)


def _finish(axes, title: str, has_lines: bool) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("tokens (T, or B when decoding)")
    if has_lines:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:.0f}")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(fontsize=8)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        source = Path(name)
        draw(json.loads(source.read_text()), source.with_suffix(".svg"))
