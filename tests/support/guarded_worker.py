"""Opens what it is told to, and says how that ended: a process with little memory to take and little time to use.

Started by `guarded.Guard`. A job is a dictionary with the name of one of `JOBS` and its arguments; so is the answer.
"""

import faulthandler
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

import llamoe
from llamoe.conversion import inspect


class OutOfTime(BaseException):
    """Raised in whatever runs when the time is up; nothing catches it."""


def load(folder, name="LlamoeDenseForCausalLM", **options):
    getattr(llamoe, name).from_pretrained(folder, **options)


def load_config(folder, name="LlamoeDenseConfig"):
    getattr(llamoe, name).from_pretrained(folder)


def look(folder):
    inspect(folder)


def torch_load(path):
    """What `from_pretrained` does without llamoe's checks."""
    torch.load(path, map_location="cpu", weights_only=True)


def allocate(gigabytes):
    return len(bytearray(gigabytes << 30))


def wait(seconds):
    time.sleep(seconds)


JOBS = {
    job.__name__: job
    for job in (
        load, load_config, look, torch_load, allocate, wait,
    )
}  # fmt: skip


def run(job, seconds):
    """Run one job; its end as a dictionary."""

    def end(*_):
        raise OutOfTime(f"{seconds} s")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(3 * seconds, exit=True)  # where no signal is heard
    try:
        result = JOBS[job.pop("job")](**job)
        answer = {"kinds": [], "message": "", "result": result}
    except BaseException as error:
        answer = {"kinds": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    return answer


def main(jobs, megabytes):
    """Answer the jobs that come through a connection, each with the seconds that it may take, until it is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdout = sys.stderr
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = taken + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            job, seconds = jobs.recv()
        except EOFError:
            return
        jobs.send(run(job, seconds))
