"""A process of little memory and time that opens files which may be made to take all of either."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

MEGABYTES = 1024
SECONDS = 20.0


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        kinds: names of the error's class and its bases; none if there was no error.
        message: of the error.
        seconds: that it took.
        result: of the job.
    """

    kinds: list[str]
    message: str
    seconds: float
    result: object = None


class Guard:
    """Runs jobs of `guarded_worker` one after the other, in one process for as long as it lives."""

    def __init__(self):
        self.process = None

    def run(self, job: str, **arguments) -> Outcome:
        """Run a job; one that kills the process, or hangs where no signal reaches it, fails the test."""
        if self.process is None:
            worker = Path(__file__).with_name("guarded_worker.py")
            self.process = subprocess.Popen(
                [sys.executable, str(worker), str(MEGABYTES), str(SECONDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        values = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
        self.process.stdin.write(json.dumps({"job": job, **values}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.process = None
            pytest.fail(f"{job} {arguments} ended the process (status {status})")
        return Outcome(**json.loads(line))

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
            self.process.stdin.close()
            self.process.wait(30)
