"""The command line of both benchmarks: which groups to run, and where to write the results."""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from transformers.utils import logging

from . import report
from .clocks import Clock
from .hardware import describe, measure_rates
from .harness import Budget, Group, LeftOut, free, reason_of, run_group

RESULTS = Path(__file__).parent / "results"


def parser(
    name: str,
    groups: Mapping[str, Group],
    description: str | None,
    seconds: float = Budget.seconds,
    by_name: Collection[str] = (),
) -> argparse.ArgumentParser:
    """The argument parser of a benchmark; groups in `by_name` run only when they are named."""
    by_default = [group for group in groups if group not in by_name]
    asked_for = f"; by name alone: {', '.join(by_name)}" if by_name else ""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(
        f"python -m benchmarks.{name}", description=description, formatter_class=form
    )
    made.add_argument(
        "--cases", nargs="+", choices=sorted({*groups, *map(family, groups)}), default=by_default, metavar="GROUP",
        help=f"groups to run, or what several begin with; by default all of these: {', '.join(by_default)}{asked_for}",
    )  # fmt: skip
    made.add_argument("--seconds", type=float, default=seconds, help="how long a case is measured, at least")
    made.add_argument(
        "--rounds", type=int, help="the least number of rounds; by default each case has its own"
    )
    made.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="groups that are not run keep what this folder's file has of them",
    )
    return made


def family(group: str) -> str:
    """What the names of a group and of those like it begin with."""
    return group.partition("-")[0]


def options(
    made: argparse.ArgumentParser, name: str, groups: Collection[str]
) -> tuple[argparse.Namespace, Budget]:
    """Parse the command line; refuse impossible options before anything is measured."""
    given = made.parse_args()
    given.cases = [group for group in groups if {group, family(group)} & {*given.cases}]
    if not (math.isfinite(given.seconds) and given.seconds >= 0):
        made.error(f"--seconds must be a number of at least 0, and is {given.seconds}")
    if given.rounds is not None and given.rounds < 1:
        made.error(f"--rounds must be at least 1, and is {given.rounds}")
    for place in (given.output, *given.output.parents):
        if place.exists() and not place.is_dir():
            made.error(f"--output must be a folder, and {place} is a file")
    try:
        earlier_results(given.output / f"{name}.json")
    except (ValueError, LookupError, TypeError) as error:
        made.error(
            f"{given.output / name}.json holds no results of a benchmark ({error}): name another folder"
        )
    return given, Budget(seconds=given.seconds, least=given.rounds)


def earlier_results(path: Path) -> dict:
    """The results in a file; empty if the file does not exist."""
    found = json.loads(path.read_text()) if path.exists() else {"runs": [], "cases": []}
    for case in found["cases"]:
        found["runs"][case["run"]], case["group"], case["case"], case["contestants"], case["failures"]
    return found


def command(name: str, words: list[str]) -> str:
    """The command of a run, without its output folder."""
    kept, is_folder = [], False
    for word in words:
        if not is_folder and not word.startswith("--output"):
            kept.append(word)
        is_folder = word == "--output"
    return " ".join(["python", "-m", f"benchmarks.{name}", *kept])


def _write(results: dict, path: Path) -> None:
    unfinished = path.with_suffix(".json.new")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    unfinished.replace(path)


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
        **vars(measured),
    }
    failures: list[str] = []
    print(report.about_line(about), flush=True)
    for group in chosen:
        rows = []
        begun, worked = time.perf_counter(), time.process_time()
        try:
            for result in run_group(groups[group], clock, measured, budget):
                rows.append({"group": group, **result})
                print(report.case_line(rows[-1]), flush=True)
                # A run that is ended keeps what it has measured.
                results = report.merge(
                    results, {"about": about, "group": group, "results": rows}, list(groups)
                )
                _write(results, path)
        except LeftOut as reason:
            # The file keeps what it has of the group.
            print(f"{group} is left out: {reason}.", flush=True)
            continue
        except Exception as error:
            # Later groups run all the same.
            traceback.print_exc()
            failed = {"case": "the group, from here on", "contestants": {}}
            rows.append({"group": group, **failed, "failures": [f"the group failed: {reason_of(error)}"]})
            free(clock.device)
        failures += [f"{group}, {row['case']}: {problem}" for row in rows for problem in row["failures"]]
        seconds, worked = time.perf_counter() - begun, time.process_time() - worked
        print(f"({group}: {seconds:.0f} s, {worked:.0f} s of processor time)", flush=True)
        results = report.merge(results, {"about": about, "group": group, "results": rows}, list(groups))
        _write(results, path)
        report.write_page(results, output, name)
    if results["cases"]:
        report.write(results, output, name)
    print(f"results in {path}", flush=True)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0
