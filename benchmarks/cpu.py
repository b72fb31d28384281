"""Measure speed and memory against transformers and peft on this CPU, in one thread; also `make bench`.

    python -m benchmarks.cpu
    python -m benchmarks.cpu --cases block-16 offload
    make bench CPU=avx2 ARGS="--cases decoder"      # without AVX-512 instructions

A case times contestants (llamoe, transformers, …); a ratio is a contestant's time over the reference contestant's.
Results go to `benchmarks/results`, in a file for each kind of processor; results of cases that are not run stay there.
The exit status is 1 if outputs differ or a contestant fails. A missed limit is only marked in the results.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

from . import block, decoder, offload
from .harness import Case, LeftOut, ProcessorClock, measured
from .machine import about_line, describe, is_held_to_avx2, kind_of_processor
from .weights import Setting

RESULTS = Path(__file__).parent / "results"
FLOAT32 = Setting(torch.device("cpu"), torch.float32)
BFLOAT16 = Setting(torch.device("cpu"), torch.bfloat16)

GROUPS: dict[str, Callable[[], Iterator[Case | dict]]] = {
    "block-16": partial(block.forward, FLOAT32, 16, {1: 1 / 5.5, 8: 1 / 3.3, 64: 1 / 3.4, 768: 1 / 7}),
    "block-128": partial(block.forward, FLOAT32, 128, {1: 1 / 30, 8: 1 / 18, 64: 1 / 13, 768: 1 / 24}),
    "training-16": partial(block.training, FLOAT32, 16, 256, 1 / 4.5),
    "training-128": partial(block.training, FLOAT32, 128, 256, 1 / 8),
    "mixtral": partial(block.mixtral, FLOAT32, {1: 1 / 1.3, 32: 1.05, 1024: 1.05}, 256),
    "mixtral-bfloat16": partial(block.mixtral, BFLOAT16, {1: 1.05, 32: 1.05, 1024: 1.05}, 256),
    "lora-16": partial(block.lora, FLOAT32, 16, {512: 0.4, 4096: 0.85}),
    "lora-128": partial(block.lora, FLOAT32, 128, {512: 0.15, 4096: 0.4}, memory=0.1),
    "decoder": decoder.sizes_of_7b,
    "offload": partial(offload.offload, offload.LargeMixture(hidden=1024, expert=1024, layers=6, experts=64)),
}
TITLES = {
    "block": "Llama 4's block beside stock's",
    "training": "A step of training of the block",
    "mixtral": "Mixtral's block beside stock's with `grouped_mm`",
    "lora": "A step of LoRA on the experts of a frozen block beside peft's own",
    "decoder": "Decoders at the sizes of 7B models",
    "offload": "Experts on disk",
}


def run(names: list[str], path: Path, clock: ProcessorClock, rounds: int) -> int:
    """Run groups of cases, write all results after each group, and return the number of failures."""
    results = json.loads(path.read_text()) if path.exists() else {}
    failures = 0
    for name in names:
        begun, rows = time.perf_counter(), []
        try:
            for result in measured(GROUPS[name](), clock, rounds):
                rows.append(result)
                failures += len(result["failures"])
                print(f"{name}: {line_of(result)}", flush=True)
        except LeftOut as reason:
            print(f"{name} is left out: {reason}", flush=True)
            continue
        print(f"({name}: {time.perf_counter() - begun:.0f} s)", flush=True)
        results[name] = {"about": describe(clock.device), "cases": rows}
        results = {group: results[group] for group in GROUPS if group in results}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(results))
    return failures


def line_of(result: dict) -> str:
    """Return a case's result in one line."""
    parts = [f"{who} {1e3 * row['median']:.3g} ms, {row['ratio']:.3f}" for who, row in result["rows"].items()]
    return "; ".join([result["case"], *parts, *(f"FAILED: {failure}" for failure in result["failures"])])


def page(results: dict) -> str:
    """Return the results as a Markdown page."""
    lines = [
        "# Speed on a CPU",
        "",
        "One thread. A ratio is a contestant's time, or peak memory, over the reference's,",
    ]
    lines += ["the median of the rounds; a limit that is missed is bold.", ""]
    for name, group in results.items():
        lines += [f"## {TITLES[name.partition('-')[0]]} ({name})", ""]
        lines += [
            "| case | | ms | ratio | at most | MB | ratio | at most |",
            "|---|---|--:|--:|--:|--:|--:|--:|",
        ]
        for case in group["cases"]:
            for who, row in case["rows"].items():
                memory = f"{row['peak_bytes'] / 1e6:.1f}" if "peak_bytes" in row else ""
                cells = [
                    case["case"],
                    who,
                    f"{1e3 * row['median']:.3g}",
                    *_judged(row, "ratio", who, case["at_most"]),
                ]
                cells += [memory, *_judged(row, "memory_ratio", who, case["memory_at_most"])]
                lines.append(f"| {' | '.join(cells)} |")
            lines += [f"| {case['case']} | **{failure}** | | | | | | |" for failure in case["failures"]]
        lines += ["", f"`python -m benchmarks.cpu --cases {name}`: {about_line(group['about'])}", ""]
    return "\n".join(lines)


def _judged(row: dict, field: str, who: str, limits: dict[str, float]) -> list[str]:
    value, limit = row.get(field), limits.get(who)
    if value is None:
        return ["", ""]
    text = f"{value:.3f}"
    return [text, ""] if limit is None else [text if value <= limit else f"**{text}**", f"{limit:.3f}"]


def main(arguments: list[str] | None = None) -> int:
    """Run the groups named on the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.cpu", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=list(GROUPS),
        default=list(GROUPS),
        metavar="GROUP",
        help=", ".join(GROUPS),
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="most repetitions of each case; default: %(default)s"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    name = kind_of_processor() + ("_held" if is_held_to_avx2() else "")
    path = options.output / f"{name}.json"
    failures = run(options.cases, path, ProcessorClock(), options.rounds)
    print(f"results in {path}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
