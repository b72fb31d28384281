"""A process of little memory and time that opens files which may be made to take all of either."""

import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import programs

MEGABYTES = 1024
SECONDS = 20.0


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        kinds: names of the error's class and its bases; none if there was no error.
        message: of the error.
        result: of the job.
    """

    kinds: list[str]
    message: str
    result: object = None


class Guard:
    """Runs jobs of `guarded_worker` one after the other, in one process for as long as it lives."""

    def __init__(self):
        self.process = None

    def run(self, job: str, limit: float = SECONDS, **arguments) -> Outcome:
        """Run a job for `limit` seconds at most; one that kills the process, or hears no signal, fails the test."""
        if self.process is None:
            self.jobs, theirs = multiprocessing.Pipe()
            self.process = programs.call("support.guarded_worker", "main", theirs, MEGABYTES)
            theirs.close()
        values = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
        try:
            self.jobs.send(({"job": job, **values}, limit))
            return Outcome(**self.jobs.recv())
        except (EOFError, ConnectionError):
            self.process.join()
            status, self.process = self.process.exitcode, None
            pytest.fail(f"{job} {arguments} ended the process (status {status})")

    def refused(self, job: str, says: str, **arguments) -> str:
        """Run a job that must end with a `CheckpointError` or `ConfigurationError` that says something, and soon."""
        import re

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
