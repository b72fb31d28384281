"""Measure the peak memory of a function by Linux's count for the process, which must do nothing else meanwhile."""

import ctypes
import gc
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def status(name: str) -> int:
    """Bytes of a field of /proc/self/status, as `RssAnon`, the memory that is no map of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def settle() -> None:
    """Return free memory to the system, and allocate large tensors by mmap from now on.

    Memory that is freed between other blocks of the heap may or may not be returned, by chance.
    """
    allocator, M_MMAP_THRESHOLD = ctypes.CDLL(None), -3
    assert allocator.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    gc.collect()
    allocator.malloc_trim(0)


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """What a function gives, and by how many bytes the process's own memory was larger than before at its peak."""
    # The numbers that `RssAnon` is computed from. Asking for all of status so often took half of the processor.
    statm = os.open("/proc/self/statm", os.O_RDONLY)

    def own() -> int:
        resident, shared = map(int, os.pread(statm, 200, 0).split()[1:3])
        return (resident - shared) * resource.getpagesize()

    base, highest, done = own(), [0], threading.Event()

    def poll():
        while not done.is_set():
            highest[0] = max(highest[0], own())
            time.sleep(0.0005)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        found = work()
    finally:
        done.set()
        thread.join()
        os.close(statm)
    return found, highest[0] - base
