"""Commands that write checkpoints, each in a process of its own that can be stopped at any moment.

A process that has imported everything and has no threads forks for every run, so that a run costs what it does and
not its imports. `ForkedRuns` speaks to it; this file is both sides.

`LLAMOE_KILLS` is the number of cases of each test that stops runs at random, `LLAMOE_SEED` the first one's seed; what
fails says how to repeat it: exactly where a run stopped at a line, nearly where it stopped by the clock.
"""

import atexit
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support import programs

_TRACED = {
    "io/write_checkpoint.py",
    "io/preallocated_files.py",
    "io/target_folder.py",
    "checkpoints/whole_folders.py",
}
_IN_A_TEST = 25


def batches(cases: int) -> list[range]:
    """Seeds of the cases, `cases` unless LLAMOE_KILLS says otherwise, as many together as a test should take."""
    first, count = int(os.environ.get("LLAMOE_SEED", 0)), int(os.environ.get("LLAMOE_KILLS", 0)) or cases
    stop = first + count
    return [range(begin, min(begin + _IN_A_TEST, stop)) for begin in range(first, stop, _IN_A_TEST)]


@contextmanager
def repeatable(seed: int, test: str):
    """Add to an error the line that repeats it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"again: LLAMOE_KILLS=1 LLAMOE_SEED={seed} python -m pytest {test}")
        raise


@dataclass(frozen=True)
class Ended:
    """How a run ended: the signal that killed it, or what it said ("finished", or its error)."""

    signal: int
    said: str

    @property
    def is_finished(self) -> bool:
        return not self.signal and self.said.startswith("finished")


class ForkedRuns:
    """Starts runs and waits for them.

    A run is a dictionary: `command` (a function of `llamoe.conversion`), `paths` and `options`. If wanted, it sends
    itself `signal` (SIGKILL) at the `line`-th line that it executes while writing, `after` so many bytes, or once so
    many `renames` of files in its target are done (for 0, before the first). It may `pause` for seconds after each
    block, `count` its lines, have files of `largest` bytes only, and in the middle `fork` a process that ends itself
    ("exit") or outlives it ("stay").
    """

    def __init__(self, *warm_up: dict):
        self.connection, theirs = multiprocessing.Pipe()
        self.server = programs.call("support.forked_runs", "_serve", theirs, warm_up)
        theirs.close()
        # Python waits for the process before it ends; the process waits for the end of the connection.
        atexit.register(self.connection.close)
        assert self.connection.recv() == "ready"

    def start(self, run: dict, until_writing: bool = False) -> int:
        """Process of a run that has begun, or with `until_writing` has everything ready to be written."""
        return self._ask("start", run, until_writing)

    def wait(self, process: int) -> Ended:
        """Wait for the end of a run."""
        return self._ask("wait", process)

    def run(self, run: dict) -> Ended:
        """Start a run and wait for its end."""
        return self.wait(self.start(run))

    def close(self) -> None:
        """End the process that forks."""
        self.connection.close()
        self.server.join(60)

    def _ask(self, *question):
        self.connection.send(question)
        return self.connection.recv()


class _Watched:
    """Progress that tells when writing begins, takes its time and does what a run asks for."""

    def __init__(self, run: dict, writer: int):
        self.given, self.writer = run, writer
        self.written = self.lines = 0
        self.fork = run.get("fork")
        self.replace = os.replace

    def start(self, total: int) -> None:
        os.write(self.writer, b"w")
        self.half = total // 2

    def advance(self, nbytes: int, file: str) -> None:
        time.sleep(self.given.get("pause", 0))
        self.written += nbytes
        if self.written > self.given.get("after", 1e18):
            self.stop()
        if self.fork and self.written > self.half:
            kind, self.fork = self.fork, None
            child = os.fork()
            if child == 0 and kind == "exit":
                raise SystemExit  # through all that the run has around this
            if child == 0:
                os.close(self.writer)
                time.sleep(60)
                os._exit(0)
            if kind == "exit":
                os.waitpid(child, 0)
            else:
                os.write(self.writer, f"forked {child} ".encode())
                self.stop()

    def stop(self) -> None:
        os.kill(os.getpid(), self.given.get("signal", signal.SIGKILL))

    def rename(self, old, new) -> None:
        is_counted = str(new).startswith(self.given["paths"][-1])
        if self.given["renames"] or not is_counted:
            self.replace(old, new)
        self.given["renames"] -= is_counted
        if is_counted and self.given["renames"] <= 0:
            self.stop()

    def trace(self, frame, event, argument):
        return self.trace_line if _is_traced(frame.f_code.co_filename) else None

    def trace_line(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if self.lines == self.given.get("line"):
                self.stop()
        return self.trace_line


# Asked at every call of a function.
@cache
def _is_traced(file: str) -> bool:
    return "/".join(Path(file).parts[-2:]) in _TRACED


def _execute(run: dict, writer: int) -> str:
    import llamoe.conversion

    watched = _Watched(run, writer)
    if "largest" in run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (run["largest"], run["largest"]))
    if "renames" in run:
        os.replace = watched.rename
    if "line" in run or "count" in run:
        sys.settrace(watched.trace)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        command = getattr(llamoe.conversion, run["command"])
        command(*run["paths"], progress=watched, **run.get("options", {}))
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {str(error) or repr(traceback.format_exc())}"
    finally:
        sys.settrace(None)
    return f"finished {watched.lines}"


def _questions(connection):
    try:
        while True:
            yield connection.recv()
    except EOFError:
        return


def _serve(connection, warm_up: tuple[dict, ...]) -> None:
    import llamoe.conversion

    for run in warm_up:
        getattr(llamoe.conversion, run["command"])(*run["paths"], **run.get("options", {}))
    connection.send("ready")
    readers: dict[int, int] = {}
    for question in _questions(connection):
        match question:
            case "start", run, until_writing:
                reader, writer = os.pipe()
                # An interrupt waits until the run can report it.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                process = os.fork()
                if process == 0:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    signal.alarm(300)  # rather than hang
                    said = ""
                    try:
                        said = _execute(run, writer)
                    finally:
                        os.write(writer, b"\n" + said.encode())
                        os._exit(0)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                os.close(writer)
                readers[process] = reader
                if until_writing:
                    os.read(reader, 1)
                connection.send(process)
            case "wait", process:
                with open(readers.pop(process), "rb") as file:
                    said = file.read().decode()
                status = os.waitpid(process, 0)[1]
                ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                connection.send(Ended(ended, said.rpartition("\n")[2] or said))
