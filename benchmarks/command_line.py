"""The command line of both benchmarks: which groups to run, and where to write the results."""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from transformers.utils import logging

from . import report
from .clocks import Clock
from .hardware import Rates, describe, measure_rates
from .harness import Budget, Group, LeftOut, free, reason_of, run_group

RESULTS = Path(__file__).parent / "results"


def parser(
    name: str,
    groups: Mapping[str, Group],
    description: str,
    seconds: float = Budget.seconds,
    by_name: Collection[str] = (),
) -> argparse.ArgumentParser:
    """The argument parser of a benchmark.

    Args:
        name: of the benchmark.
        groups: by name.
        description: its help.
        seconds: default time for measuring a case.
        by_name: groups that run only when they are named.
    """
    by_default = [group for group in groups if group not in by_name]
    asked_for = f"; by name alone: {', '.join(by_name)}" if by_name else ""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--cases",
        nargs="+",
        choices=list(groups),
        default=by_default,
        metavar="GROUP",
        help=f"groups to run, by default all of these: {', '.join(by_default)}{asked_for}",
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="how long a case is measured, at least; loads go by rounds alone (default: %(default)s)",
    )
    made.add_argument(
        "--rounds",
        type=int,
        help="the least number of rounds; by default each case has its own, and a load is a round of three",
    )
    made.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="folder of the results; groups that are not run keep what its file has of them (default: %(default)s)",
    )
    return made


def options(made: argparse.ArgumentParser, name: str) -> tuple[argparse.Namespace, Budget]:
    """Parse the command line; refuse impossible options before anything is measured."""
    given = made.parse_args()
    if not (math.isfinite(given.seconds) and given.seconds >= 0):
        made.error(f"--seconds must be a number of at least 0, and is {given.seconds}")
    if given.rounds is not None and given.rounds < 1:
        made.error(f"--rounds must be at least 1, and is {given.rounds}")
    for place in (given.output, *given.output.parents):
        if place.exists() and not place.is_dir():
            made.error(f"--output must be a folder, and {place} is a file")
    try:
        earlier_results(given.output / f"{name}.json")
    except ValueError as error:
        made.error(str(error))
    return given, Budget(seconds=given.seconds, least=given.rounds)


def earlier_results(path: Path) -> dict:
    """The results in a file; empty if the file does not exist.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        for case in found["cases"]:
            found["runs"][case["run"]], case["group"], case["case"], case["contestants"], case["failures"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} holds no results of a benchmark ({type(error).__name__}: {error}): "
            "remove it, or name another folder"
        ) from error
    return found


def command(name: str, words: list[str]) -> str:
    """The command of a run, without its output folder."""
    kept, is_folder = [], False
    for word in words:
        if not is_folder and not word.startswith("--output"):
            kept.append(word)
        is_folder = word == "--output"
    return " ".join(["python", "-m", f"benchmarks.{name}", *kept])


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
    """Run groups; the results and the page are written after each, the figure in the end.

    Args:
        name: name of the report files.
        groups: all groups, by name.
        chosen: names of the groups to run.
        clock: clock to measure with.
        dtype: dtype in which the rate of products is measured.
        output: folder for the results.
        budget: how long each case is measured.
        **rates: sizes for `measure_rates`.

    Returns:
        the exit status: 1 if a group, a case or a contestant of ours failed, or any contestant's outputs differed.
    """
    begun = time.perf_counter()
    path = output / f"{name}.json"
    results = earlier_results(path)
    output.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    measured = measure_rates(clock, dtype, **rates)
    about = {
        **describe(clock.device),
        "command": command(name, sys.argv[1:]),
        "dtype": str(dtype).removeprefix("torch."),
        "clock": clock.unit,
        "bytes_per_second": measured.bytes_per_second,
        "flops_per_second": measured.flops_per_second,
    }
    failures: list[str] = []
    is_new = False
    print(report.about_line(about), flush=True)
    for group in chosen:
        rows = []
        group_begun, group_worked = time.perf_counter(), time.process_time()
        try:
            for result in _results_of(groups[group], clock, measured, budget):
                rows.append({"group": group, **result})
                failures += [f"{group}, {result['case']}: {problem}" for problem in result["failures"]]
                print(report.case_line(rows[-1]), flush=True)
        except LeftOut as reason:
            # The file keeps what it has of the group.
            print(f"{group} is left out: {reason}.", flush=True)
            continue
        seconds, worked = time.perf_counter() - group_begun, time.process_time() - group_worked
        print(f"({group}: {seconds:.0f} s, {worked:.0f} s of processor time)", flush=True)
        results = report.merge(results, {"about": about, "group": group, "results": rows}, list(groups))
        unfinished = path.with_suffix(".json.new")
        unfinished.write_text(json.dumps(results, indent=1) + "\n")
        unfinished.replace(path)
        report.write_page(results, output, name)
        is_new = True
    if is_new:
        report.write(results, output, name)
    print(f"{time.perf_counter() - begun:.0f} s; results in {path}", flush=True)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _results_of(group: Group, clock: Clock, rates: Rates, budget: Budget) -> Iterator[dict]:
    """Results of a group; an error becomes the last result and does not stop later groups."""
    try:
        yield from run_group(group, clock, rates, budget)
    except LeftOut:
        raise
    except Exception as error:
        traceback.print_exc()
        yield {
            "case": "the group, from here on",
            "contestants": {},
            "failures": [f"the group failed: {reason_of(error)}"],
        }
    free(clock.device)
