"""Conversions in processes of their own that are killed, forked off a server that has imported everything already."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from support.progress import Progress

_FORKS = multiprocessing.get_context("forkserver")


def _kill_halfway(write: Callable[..., Any], args: tuple, options: dict, share: float) -> None:
    write(*args, **options, progress=Progress(lambda: os.kill(os.getpid(), signal.SIGKILL), share))


def kill_halfway(write: Callable[..., Any], *args: Any, share: float = 0.6, **options: Any) -> None:
    """Call a command of `llamoe.conversion` and kill its process when a share of the bytes is written."""
    _FORKS.set_forkserver_preload(["llamoe.conversion", "support.killed_conversions"])
    process = _FORKS.Process(target=_kill_halfway, args=(write, args, options, share))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, process.exitcode
