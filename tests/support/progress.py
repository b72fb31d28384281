"""A progress object for conversions that counts bytes, and calls a function, raises or kills at some share of them."""

import os
import signal
from collections.abc import Callable
from typing import Any

from support import programs


class Progress:
    """Counts the bytes of a conversion.

    Attributes:
        total: bytes of the whole conversion.
        done: bytes so far.
    """

    def __init__(self, act: Callable | None = None, share: float = 0.5):
        """Call `act` once, when this share of all bytes is done; a share of 0 is at the start."""
        self.act, self.share = act, share
        self.total = self.done = 0

    def start(self, total: int) -> None:
        self.total = total
        self.advance(0, "")

    def advance(self, nbytes: int, file: str) -> None:
        self.done += nbytes
        if self.act and self.done >= self.share * self.total:
            act, self.act = self.act, None
            act()


def stops(error: BaseException, share: float) -> Progress:
    """Return a progress object that raises `error` when this share of all bytes is done."""

    def stop():
        raise error

    return Progress(stop, share)


def kill_halfway(write: Callable, *args: Any, share: float = 0.6, **options: Any) -> None:
    """Call a command of `llamoe.conversion` in a new process, killed when this share of its bytes is written."""
    process = programs.call(__name__, "_write_until_killed", write, args, options, share)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def _write_until_killed(write: Callable, args: tuple, options: dict, share: float) -> None:
    write(*args, **options, progress=Progress(lambda: os.kill(os.getpid(), signal.SIGKILL), share))
