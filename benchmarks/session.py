"""The command line of both benchmarks: which groups to run, and where the results go."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers.utils import logging

from . import report
from .clocks import Clock
from .hardware import describe, measure_rates
from .harness import Budget, Group, run_group

RESULTS = Path(__file__).parent / "results"


def parser(name: str, groups: Mapping[str, Group], description: str) -> argparse.ArgumentParser:
    """The arguments of a benchmark."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--cases",
        nargs="+",
        choices=list(groups),
        default=list(groups),
        metavar="GROUP",
        help=f"groups to run, by default all: {', '.join(groups)}",
    )
    made.add_argument("--seconds", type=float, default=Budget.seconds, help="how long a case is measured")
    made.add_argument("--rounds", type=int, default=Budget.least, help="the least number of rounds")
    made.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="folder of the results; groups that are not run keep what its file has of them (default: %(default)s)",
    )
    return made


def run(
    name: str,
    groups: Mapping[str, Group],
    chosen: list[str],
    clock: Clock,
    dtype: torch.dtype,
    output: Path,
    budget: Budget,
    **rates,
) -> int:
    """Run groups and write the reports after each.

    Args:
        name: of the files.
        groups: all of them, by name.
        chosen: names of those to run.
        clock: what time is taken with.
        dtype: what the rate of products is measured in.
        output: folder of the results.
        budget: how long each case is measured.
        **rates: sizes for `measure_rates`.

    Returns:
        the exit status: 1 if a contestant of ours failed, or any disagreed.
    """
    begun = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    measured = measure_rates(clock, dtype, **rates)
    about = {
        **describe(clock.device),
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "dtype": str(dtype).removeprefix("torch."),
        "clock": clock.unit,
        "bytes_per_second": measured.bytes_per_second,
        "flops_per_second": measured.flops_per_second,
    }
    path = output / f"{name}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    failures: list[str] = []
    print(report.about_line(about), flush=True)
    results = earlier
    for group in chosen:
        rows = []
        group_begun, group_worked = time.perf_counter(), time.process_time()
        for result in run_group(groups[group], clock, measured, budget):
            rows.append({"group": group, **result})
            failures += [f"{group}, {result['case']}: {problem}" for problem in result["failures"]]
            print(report.case_line(rows[-1]), flush=True)
        seconds, worked = time.perf_counter() - group_begun, time.process_time() - group_worked
        print(f"({group}: {seconds:.0f} s, {worked:.0f} s of processor time)", flush=True)
        results = report.merge(results, {"about": about, "group": group, "results": rows}, list(groups))
        path.write_text(json.dumps(results, indent=1) + "\n")
    report.write(results, output, name)
    print(f"{time.perf_counter() - begun:.0f} s; results in {path}", flush=True)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0
