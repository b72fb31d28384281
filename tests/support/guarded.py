"""A process of little memory and time that opens files which may be made to take all of either."""

import faulthandler
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import programs

import llamoe
from llamoe.conversion import inspect

MEGABYTES = 1024
SECONDS = 20.0


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        kinds: names of the error's class and its bases; none if there was no error.
        message: of the error.
    """

    kinds: list[str]
    message: str = ""


class Guard:
    """Runs jobs one after the other, in one process for as long as it lives."""

    def __init__(self):
        self.process = None

    def run(self, job: str, limit: float = SECONDS, **arguments) -> Outcome:
        """Run a job for `limit` seconds at most; one that kills the process, or hears no signal, fails the test."""
        if self.process is None:
            self.jobs, theirs = multiprocessing.Pipe()
            self.process = programs.call("support.guarded", "answer", theirs)
            theirs.close()
        try:
            self.jobs.send((job, arguments, limit))
            return self.jobs.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            status, self.process = self.process.exitcode, None
            pytest.fail(f"{job} {arguments} ended the process (status {status})")

    def refused(self, job: str, says: str, **arguments) -> str:
        """Run a job that must end with a `CheckpointError` or `ConfigurationError` that says something, and soon."""
        outcome = self.run(job, **arguments)
        assert {"CheckpointError", "ConfigurationError"} & {*outcome.kinds}, outcome
        assert re.search(says, outcome.message), outcome
        # Names of temporary folders may be long.
        message = outcome.message
        for value in arguments.values():
            message = message.replace(str(value), "")
        assert len(message) < 700, "a message, not a dump"
        return outcome.message

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.jobs.close()
            self.process.join(30)


# In the process


class OutOfTime(BaseException):
    """Raised in whatever runs when the time is up; nothing catches it."""


def load(folder, name="LlamoeDenseForCausalLM", **options):
    getattr(llamoe, name).from_pretrained(folder, **options)


JOBS = {
    "load": load,
    "look": lambda folder: inspect(folder),
    "allocate": lambda gigabytes: bytearray(gigabytes << 30),
    "wait": lambda seconds: time.sleep(seconds),
}


def run(job: str, arguments: dict, seconds: float) -> Outcome:
    """Run one job."""

    def end(*_):
        raise OutOfTime(f"{seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(3 * seconds, exit=True)  # where no signal is heard
    try:
        JOBS[job](**arguments)
        return Outcome([])
    except BaseException as error:
        return Outcome([kind.__name__ for kind in type(error).__mro__], str(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def answer(jobs) -> None:
    """Run the jobs that come through a connection, each with the seconds that it may take, until it is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdout = sys.stderr
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = taken + (MEGABYTES << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            jobs.send(run(*jobs.recv()))
        except EOFError:
            return
