"""Run the cases of many seeds, in several processes or in this one."""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable

import torch
import transformers

from . import differential
from .differential import Outcome

FAULTS = ("failed", "judge")


def run_seeds(
    seeds: range,
    workers: int = 0,
    seconds: float = float("inf"),
    kinds: set[str] | None = None,
    say: Callable[[str], None] = print,
) -> Counter:
    """Run the cases of some seeds and count their verdicts.

    Args:
        seeds: the seeds.
        workers: number of processes; 0 runs all cases in this one.
        seconds: no case counts that ends after so much time.
        kinds: run the seeds of these kinds alone.
        say: called with a line for each fault, and a last line that counts.
    """
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    begun, counts = time.monotonic(), Counter()
    chosen = [seed for seed in seeds if kinds is None or differential.kind_of(seed) in kinds]
    if workers == 0:
        _count(map(_run, chosen), counts, begun + seconds, say)
    else:
        # Forked from a process that has imported everything and computed nothing yet.
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            _count(pool.imap_unordered(_run, chosen), counts, begun + seconds, say)
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    say(f"{counts.total()} cases from seed {seeds[0]} on: {words}; {time.monotonic() - begun:.0f} s")
    return counts


def _run(seed: int) -> tuple[int, Outcome]:
    return seed, differential.run(seed)


def _count(
    outcomes: Iterable[tuple[int, Outcome]], counts: Counter, end: float, say: Callable[[str], None]
) -> None:
    for seed, outcome in outcomes:
        counts[outcome.verdict] += 1
        if outcome.verdict in FAULTS:
            say(
                f"{outcome.verdict}: {outcome.kind}: {outcome.text} {outcome.notes}\n    make fuzz SEED={seed}"
            )
        if time.monotonic() > end:
            break
