"""Writes the figures of speed into the README and docs/performance.md, from the committed results.

python -m benchmarks.readme
python -m benchmarks.readme --check    # exit status 1 if the pages do not match the results
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from . import OURS, REFERENCE, cpu, gpu, is_of, report
from .bars import BARS, PEERS, Results, ratio_of_fastest
from .report import ROOT, replaced

TOKENS = {"cpu": (1, 8, 32, 128, 1024, 8192), "gpu": (1, 8, 32, 128, 512, 4096, 8192)}
COPIES = "an expert's for each token"
"""End of the reason for which `batched_mm` is left out of many cases."""
GROUPS = {"cpu": cpu.GROUPS, "gpu": gpu.GROUPS}


def summary(
    of_cpu: dict | None,
    of_gpu: dict | None,
    others: Mapping[str, dict] | None = None,
) -> str:
    """The README's table of what stock does not do, a figure each.

    Args:
        of_cpu: results of `benchmarks.cpu`, or None.
        of_gpu: results of `benchmarks.gpu`, or None; no figure is taken from them.
        others: by name the results in `OTHERS` that there are.
    """
    figures = _figures(Results(of_cpu or {}), others or {})
    lines = ["| | what it is | one figure |", "|---|---|---|"]
    lines += [
        f"| {title} | {said} | {figures.get(title) or 'not measured'} |" for title, said in FEATURES.items()
    ]
    paragraphs = ["\n".join(lines)]
    if not of_cpu:
        paragraphs.append("No figures of a CPU are committed.")
    if table := _seven_billion(Results(of_cpu or {})):
        paragraphs += [textwrap.fill(SPEED_OF_LARGE_MODELS, 118), table]
    return "\n\n".join(paragraphs)


def _figures(found: Results, others: Mapping[str, dict]) -> dict[str, str]:
    """One figure by feature, where it was measured."""
    less, quantized, offloaded, adapted, converted = FEATURES
    figures = {}
    if (ratio := found.ratio("decoder", phase="decode", tokens=1)) is not None:
        figures[less] = (
            f"a token of a decoder with 16 experts in {1 / ratio:.2f} of stock's time, on one CPU core"
        )
    if (seconds := found.seconds_a_billion(f"{OURS}, int4")) is not None:
        figures[quantized] = f"a billion weights in int4 in {seconds:.0f} s, on one CPU core"
    if published := others.get(SCOUT):
        run = published["found"]
        figures[offloaded] = (
            f"Scout, 109 billion parameters, within {run['budget'] / 1e9:.0f} GB of RAM: "
            f"{run['decode']['tokens_per_second']:.2f} tokens a second, from a drive of "
            f"{run['rates']['drive'] / 1e9:.1f} GB/s"
        )
    step, memory = (measure("adapters-128", tokens=512) for measure in (found.ratio, found.memory))
    if step is not None and memory is not None:
        figures[adapted] = (
            f"128 experts: {1 / step:.2f} of the time and {memory:.2f} of the memory of peft's step"
        )
    case = next(
        (each for each in others.get(CONVERSION, {}).get("cases", ()) if "to Meta" in each["case"]), None
    )
    if case is not None:
        figures[converted] = (
            f"{others[CONVERSION]['bytes'] / 1e9:.1f} GB to Meta's files in {case['seconds']:.1f} s and "
            f"{case['peak_bytes'] / 1e9:.2f} GB of memory"
        )
    return figures


def _seven_billion(found: Results) -> str:
    """The table of times at the sizes of 7B models; empty where none was measured."""
    cases = found.find(("7b-mistral", "7b-mixtral"))
    names = list(dict.fromkeys(name for case in cases for name in case["contestants"]))
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case in cases:
        medians = [case["contestants"].get(name, {}).get("median") for name in names]
        cells = ["—" if median is None else report.milliseconds(median) for median in medians]
        lines.append(f"| {case['case']} | {' | '.join(cells)} |")
    return "\n".join(lines) if cases else ""


def section(of_cpu: dict | None, of_gpu: dict | None) -> str:
    """The figures of docs/performance.md.

    Args:
        of_cpu: results of `benchmarks.cpu`, or None.
        of_gpu: results of `benchmarks.gpu`, or None.
    """
    paragraphs = []
    missing = []
    for name, results in (("cpu", of_cpu), ("gpu", of_gpu)):
        if results:
            paragraphs += _measured(results, name)
            missing += _left_out(results, name)
    if not of_cpu:
        missing.append("No figures of a CPU are committed.")
    if not of_gpu:
        missing.append("No GPU was measured. `python -m benchmarks.gpu` measures one.")
    missing.append("Whole published models, several devices and servers such as vLLM were not measured.")
    paragraphs += ["What is missing:", "\n".join(f"- {line}" for line in missing)]
    return "\n\n".join(paragraphs)


def _measured(results: dict, name: str) -> list[str]:
    about = results["runs"][0]
    if name == "cpu":
        where = "Processor time of one thread of a CPU, in float32, with a hidden size of 512 and experts of 1,024"
    else:
        where = (
            f"Time between CUDA events on one {about['device']}, in bfloat16, with layers of Scout's and Maverick's "
            "sizes"
        )
    versions = about["versions"]
    found = Results(results)
    # A group that ran later may have run on another machine.
    commands = "\n".join(
        dict.fromkeys(f"- `{run['command']}`, {run['processor']}, {run['date']}" for run in results["runs"])
    )
    rows = [
        f"| tokens | {' | '.join(f'{count:,}' for count in TOKENS[name])} |",
        "|---" * (len(TOKENS[name]) + 1) + "|",
    ]
    for group, title, phases in _LINES[name]:
        cells = [_cell(found, group, phases, tokens) for tokens in TOKENS[name]]
        if any(cell != "—" for cell in cells):
            rows.append(f"| {title} | " + " | ".join(cells) + " |")
    figures = ["| | measured | noise |", "|---|---|---|"]
    for bar in BARS[name]:
        if bar.text not in DECISIVE.get(name, [bar.text]):
            continue
        noise = f"± {bar.allowance(found):.2g}" if bar.allowance else ""
        figures.append(f"| {bar.text} | {bar.measured(found)} | {noise} |")
    return [
        f"{where}. The other side is transformers {versions['transformers']} with torch {versions['torch']}, on the "
        f"same weights; the outputs are compared. Every case stands in [the results]"
        f"(../benchmarks/results/{name}.md), which these commands wrote:",
        commands,
        "Stock's time divided by llamoe's, each in its fastest mode. T tokens are a prompt of one row; B tokens are "
        "one token in each of B rows:",
        "\n".join(rows),
        "Ten more figures: stock's time divided by llamoe's; for LoRA and offloading llamoe's divided by the other's; "
        "and memory. Noise is how far stock differs from itself when it is measured twice. All other figures are in "
        f"[the results](../benchmarks/results/{name}.md#what-is-wanted):",
        "\n".join(figures),
    ]


DECISIVE = {
    "cpu": (
        "whole decoder, prefill, T = 1024",
        "whole decoder, decode, B = 1",
        "training step, 128 experts, T = 256",
        "LoRA on 128 experts, T = 512, step over peft's",
        "LoRA on 128 experts, T = 512, peak memory over peft's",
        "dense LLaMA, slowest case",
        "Mixtral's block, slowest case",
        "loading, peak memory over the checkpoint's bytes",
        "quantizing a billion weights to int4",
        "experts on disk, a token, time over accelerate's offload",
    )
}
"""Texts of the targets that docs/performance.md shows; of a machine that is not named all."""
FEATURES = {
    "**[Less work](docs/performance.md)**": "the same numbers by fewer and larger products",
    "**[Quantization](docs/quantization.md)**": "experts and linear layers in 8 or 4 bits, read at the memory's speed",
    "**[Expert offloading](docs/placement.md#expert-offloading)**": (
        "routed experts stay on disk or in RAM, and only chosen ones are read; results are bit-identical to those of "
        "the model in memory"
    ),
    "**[LoRA on the experts](docs/training.md#adapters)**": (
        "without peft's copy of all experts in each step, also on quantized and offloaded experts; router losses and "
        "balancing"
    ),
    "**[Converters](docs/checkpoints.md)**": (
        "between Meta's and Hugging Face's files, and from Mistral AI's; `llamoe verify` compares two checkpoints"
    ),
}
SCOUT, CONVERSION = "published_sizes_llama-4-scout-int4-128", "conversion"
SPEED_OF_LARGE_MODELS = (
    "How fast is a token on a CPU? Its products read the weights at the memory's speed, in 32, 16, 8 or 4 bits. Layers "
    "of published sizes, one row, one thread, processor time in milliseconds:"
)
OTHERS = (SCOUT, CONVERSION)
"""Files of results of which README has a figure, beside those of `benchmarks.cpu`."""

_BLOCK = ("decode", "prefill")
_LINES = {
    "cpu": [
        ("block-16", "mixture block, 16 experts", _BLOCK),
        ("block-128", "mixture block, 128 experts", _BLOCK),
        ("decoder", "whole decoder, 16 experts, a step of B rows", ("decode",)),
        ("decoder", "whole decoder, 16 experts, prefill of T tokens", ("prefill",)),
        ("dense", "dense LLaMA, a step of B rows", ("decode",)),
        ("dense", "dense LLaMA, prefill of T tokens", ("prefill",)),
    ],
    "gpu": [
        ("block-scout", "Scout-shaped block", _BLOCK),
        ("block-maverick", "Maverick-shaped block", _BLOCK),
        ("decoder", "Scout-shaped decoder, a step of B rows", ("decode",)),
        ("decoder", "Scout-shaped decoder, prefill of T tokens", ("prefill",)),
        ("dense", "dense LLaMA, a step of B rows", ("decode",)),
        ("dense", "dense LLaMA, prefill of T tokens", ("prefill",)),
    ],
}


def _cell(found: Results, group: str, phases: tuple[str, ...], tokens: int) -> str:
    for case in found.find(group, phase=phases.__contains__, tokens=tokens):
        ratio = ratio_of_fastest(case)
        is_plain = case.get("routing", "uniform") == "uniform" and not case.get("repeated")
        if is_plain and ratio is not None:
            return f"{ratio:.1f}" if ratio >= 1.5 else f"{ratio:.2f}"
    return "—"


def _left_out(results: dict, name: str) -> list[str]:
    """Groups that were not run, contestants that were skipped, and failures."""
    run = {case["group"] for case in results["cases"]}
    lines = []
    if missing := [f"`{group}`" for group in GROUPS[name] if group not in run]:
        lines.append(f"Of `benchmarks.{name}` these groups were not run: {', '.join(missing)}.")
    skipped: dict[tuple[str, str, str], list[str]] = {}
    for case in results["cases"]:
        for who, row in case["contestants"].items():
            if "skipped" in row and is_of(who, REFERENCE, OURS, *PEERS):
                skipped.setdefault((who, case["group"], row["skipped"]), []).append(case["case"])
    copied = 0
    for (who, group, reason), cases in skipped.items():
        if who == "batched_mm" and COPIES in reason:
            copied += len(cases)
        else:
            lines.append(f"`{who}` was left out of `{group}`, {'; '.join(cases)}: {reason}.")
    if copied:
        lines.append(
            f"`batched_mm` was left out of {copied} cases where it copies more weights than there is room for."
        )
    return lines + [f"**Failed**: {line}" for line in report.failures(results)]


PAGES = ("README.md", "docs/performance.md")


def main() -> int:
    """Write the figures, or check them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a page is stale"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    found = {
        name: json.loads(path.read_text())
        for name in ("cpu", "gpu", *OTHERS)
        if (path := options.results / f"{name}.json").exists()
    }
    results = [found.get(name) for name in ("cpu", "gpu")]
    pages = {name: (options.root / name).read_text() for name in PAGES}
    try:
        bodies = {"README.md": summary(*results, found), "docs/performance.md": section(*results)}
        wanted = {name: replaced(text, bodies[name], "speed", name) for name, text in pages.items()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    stale = [name for name in PAGES if pages[name] != wanted[name]]
    if options.check:
        for name in stale:
            print(f"{name} is stale: run `python -m benchmarks.readme`", file=sys.stderr)
        return int(bool(stale))
    for name in stale:
        (options.root / name).write_text(wanted[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
