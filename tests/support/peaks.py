"""Measure the peak memory of a function by Linux's count for the process, so nothing else may run meanwhile."""

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
    """Return a field of /proc/self/status in bytes, for example `RssAnon`, the memory that maps no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def settle() -> None:
    """Return free memory to the system, and allocate tensors of 64 KB and more by mmap from now on.

    Memory that lies between used blocks of the heap is not returned to the system when it is freed; mapped memory is.
    """
    allocator, M_MMAP_THRESHOLD = ctypes.CDLL(None), -3
    assert allocator.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    gc.collect()
    allocator.malloc_trim(0)


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """Call `work`; return its result, and the growth of the process's own memory at its peak, in bytes."""
    # statm's two numbers give `RssAnon`. Reading the whole of /proc/self/status so often took half of a processor.
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
        result = work()
    finally:
        done.set()
        thread.join()
        os.close(statm)
    return result, highest[0] - base
