"""Open hostile files in a process with limited memory and time, as such files may be made to use up both."""

import faulthandler
import os
import re
import resource
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support import programs

import llamoe
from llamoe.conversion import inspect

# The memory that the process may allocate after its imports, and the time that a job may take by default.
MEGABYTES = 1024
SECONDS = 20.0


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        kinds: names of the error's class and its bases; empty if there was no error.
        message: the error's text.
    """

    kinds: list[str]
    message: str = ""


class Guard:
    """Runs jobs one after the other in one process, and starts another process when that one has ended."""

    def __init__(self):
        self.pool = None

    def run(self, job: str, limit: float = SECONDS, **arguments) -> Outcome:
        """Run an entry of `JOBS` for at most `limit` seconds; return its outcome.

        The test fails if the job ends the process, or blocks signals for three times the limit.
        """
        self.pool = self.pool or ProcessPoolExecutor(1, programs.PROCESSES, limit_memory)
        try:
            return self.pool.submit(run, job, arguments, limit).result()
        except BrokenProcessPool:
            self.pool = None
            pytest.fail(f"{job} {arguments} ended the process")

    def refused(self, job: str, says: str, **arguments) -> str:
        """Check that a job raises a `CheckpointError` or `ConfigurationError` that matches `says`; return its text."""
        outcome = self.run(job, **arguments)
        assert {"CheckpointError", "ConfigurationError"} & {*outcome.kinds}, outcome
        assert re.search(says, outcome.message), outcome
        # Paths of temporary folders, which may be long, do not count for the length.
        message = outcome.message
        for value in arguments.values():
            message = message.replace(str(value), "")
        assert len(message) < 700, "a message, not a dump"
        return outcome.message

    def close(self) -> None:
        """End the process."""
        if self.pool is not None:
            self.pool.shutdown()


# Runs in the process of a `Guard`.


class OutOfTime(BaseException):
    """Raised in a job when its time is up; no `except Exception` catches it."""


def load(folder, name="LlamoeDenseForCausalLM", **options):
    """Load a folder with one of our classes."""
    getattr(llamoe, name).from_pretrained(folder, **options)


# The last two jobs show that the limits work.
JOBS = {
    "load": load,
    "look": lambda folder: inspect(folder),
    "allocate": lambda gigabytes: bytearray(gigabytes << 30),
    "wait": lambda seconds: time.sleep(seconds),
}


def run(job: str, arguments: dict, seconds: float) -> Outcome:
    """Run one job for at most `seconds`, and return its outcome."""

    def end(*_):
        raise OutOfTime(f"{seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # End the process if the job keeps Python from handling the signal, as a loop in C does.
    faulthandler.dump_traceback_later(3 * seconds, exit=True)
    try:
        JOBS[job](**arguments)
        return Outcome([])
    except BaseException as error:
        return Outcome([kind.__name__ for kind in type(error).__mro__], str(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def limit_memory() -> None:
    """Limit what this process may allocate from now on, and discard its output."""
    # A forked process lacks its parent's threads, so torch must not use them.
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (MEGABYTES << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
