"""Conversions in processes of their own that are killed, forked off the server of all programs."""

import os
import signal
from collections.abc import Callable
from typing import Any

from support import programs
from support.progress import Progress


def _kill_halfway(write: Callable[..., Any], args: tuple, options: dict, share: float) -> None:
    write(*args, **options, progress=Progress(lambda: os.kill(os.getpid(), signal.SIGKILL), share))


def kill_halfway(write: Callable[..., Any], *args: Any, share: float = 0.6, **options: Any) -> None:
    """Call a command of `llamoe.conversion` and kill its process when a share of the bytes is written."""
    process = programs.call(__name__, "_kill_halfway", write, args, options, share)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, process.exitcode
