"""Runs cases in separate processes; a case may crash, hang or use too much memory without ending the others."""

import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from .differential import Outcome

# Seconds that a case may take; the slowest, which compiles, needs a small part of it even on a busy machine.
LONGEST = 900


@dataclass
class Summary:
    """Results of many cases."""

    counts: Counter = field(default_factory=Counter)
    by_kind: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    seconds: Counter = field(default_factory=Counter)
    failures: list[tuple[int, Outcome]] = field(default_factory=list)

    def add(self, seed: int, outcome: Outcome, seconds: float) -> None:
        self.counts[outcome.verdict] += 1
        self.by_kind[outcome.kind][outcome.verdict] += 1
        self.seconds[outcome.kind] += seconds
        if outcome.verdict in ("failed", "judge"):
            self.failures.append((seed, outcome))

    def causes(self) -> Iterator[str]:
        """Similar failures, the most frequent first."""
        alike = defaultdict(list)
        for seed, outcome in self.failures:
            text = re.sub(r"/tmp/\S+", "…", outcome.text)
            alike[outcome.kind, re.sub(r"\d[\d.]*", "#", text)[:110]].append(seed)
        for (kind, text), seeds in sorted(alike.items(), key=lambda item: -len(item[1])):
            yield f"  {len(seeds)} x {kind}: {text}; seeds {', '.join(map(str, seeds[:6]))}"

    def lines(self, first: int, last: int, seconds: float) -> Iterator[str]:
        """The summary: a line for each kind, and one for all."""
        for kind in sorted(self.by_kind):
            counts, total = self.by_kind[kind], self.by_kind[kind].total()
            yield f"  {kind:14} {_words(counts)}; {1000 * self.seconds[kind] / total:.0f} ms each"
        yield f"{self.counts.total()} cases, seeds {first} to {last}: {_words(self.counts)}; {seconds:.0f} s"


def _words(counts: Counter) -> str:
    order = ["passed", "payload", "refused", "library", "too close", "judge", "failed"]
    names = [name for name in order if counts[name]] + sorted(set(counts) - set(order))
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])


def run_cases(
    run: Callable[[int], Outcome],
    seeds: Sequence[int],
    workers: int,
    seconds: float | None = None,
    say: Callable[[str], None] = print,
) -> Summary:
    """Run a case for each seed.

    Args:
        run: returns a seed's outcome; must be importable.
        seeds: the seeds.
        workers: number of processes; 0 runs all cases in this one.
        seconds: no case begins after this time.
        say: called with each line of output.
    """
    begun, summary = time.monotonic(), Summary()
    last = seeds[0]
    for seed, outcome, taken in _outcomes(run, seeds, workers, begun, seconds):
        summary.add(seed, outcome, taken)
        last = max(last, seed)
        if outcome.verdict in ("failed", "judge"):
            say(f"{outcome.verdict}: {outcome.kind}: {outcome.text} {outcome.notes}\n    {repeat(seed)}")
    for line in summary.causes():
        say(line)
    for line in summary.lines(seeds[0], last, time.monotonic() - begun):
        say(line)
    return summary


def repeat(seed: int) -> str:
    """The command that runs one case again."""
    return f"make fuzz SEED={seed}"


def _outcomes(run, seeds, workers, begun, seconds) -> Iterator[tuple[int, Outcome, float]]:
    left = iter(seeds)

    def next_seed() -> int | None:
        is_late = seconds is not None and time.monotonic() - begun > seconds
        return None if is_late else next(left, None)

    if workers == 0:
        while (seed := next_seed()) is not None:
            start = time.monotonic()
            yield seed, run(seed), time.monotonic() - start
        return
    pool = [Worker(run) for _ in range(min(workers, len(seeds)))]
    try:
        busy = [worker for worker in pool if worker.start(next_seed())]
        while busy:
            ready = wait([worker.connection for worker in busy], timeout=1)
            for worker in list(busy):
                if worker.connection in ready or worker.is_late():
                    yield worker.take()
                    if not worker.start(next_seed()):
                        busy.remove(worker)
    finally:
        for worker in pool:
            worker.end()


class Worker:
    """A process that runs one case after another, and is replaced when it dies."""

    def __init__(self, run: Callable[[int], Outcome]):
        self.run, self.process, self.seed = run, None, None

    def start(self, seed: int | None) -> bool:
        self.seed = seed
        if seed is None:
            return False
        if self.process is None:
            # Forked from a process that has imported everything and computed nothing yet.
            context = multiprocessing.get_context("fork")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(self.run, theirs), daemon=True)
            self.process.start()
            theirs.close()
        self.begun = time.monotonic()
        self.connection.send(seed)
        return True

    def is_late(self) -> bool:
        return time.monotonic() - self.begun > LONGEST

    def take(self) -> tuple[int, Outcome, float]:
        taken = time.monotonic() - self.begun
        try:
            if not self.connection.poll():
                raise EOFError
            return self.seed, self.connection.recv(), taken
        except (EOFError, ConnectionResetError):
            late = self.is_late()
            self.end(kill=late)
            how = f"took more than {LONGEST} s" if late else f"ended the process ({self.status})"
            return self.seed, Outcome("crash", "failed", f"the case {how}"), taken

    def end(self, kill: bool = False) -> None:
        if self.process is None:
            return
        self.connection.close()
        if kill:
            self.process.kill()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        self.status = signal.Signals(-code).name if code is not None and code < 0 else f"exit {code}"
        self.process = None


def _serve(run: Callable[[int], Outcome], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            seed = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            outcome = run(seed)
        # A fault of the fuzzer itself.
        except BaseException:
            outcome = Outcome("fuzzer", "failed", traceback.format_exc(limit=-4))
        connection.send(outcome)
        sys.stdout.flush()
