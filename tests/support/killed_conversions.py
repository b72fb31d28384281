"""Run conversions in processes that are killed halfway."""

import os
import signal
from collections.abc import Callable
from typing import Any

from support import programs
from support.progress import Progress


def _kill_halfway(write: Callable[..., Any], args: tuple, options: dict, share: float) -> None:
    write(*args, **options, progress=Progress(lambda: os.kill(os.getpid(), signal.SIGKILL), share))


def kill_halfway(write: Callable[..., Any], *args: Any, share: float = 0.6, **options: Any) -> None:
    """Call a command of `llamoe.conversion` in a new process, killed when a share of its bytes is written."""
    process = programs.call(__name__, "_kill_halfway", write, args, options, share)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, process.exitcode
