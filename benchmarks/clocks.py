"""Time of a run: the processor time of this process on a CPU, or wall time; between two events on a CUDA device."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class ProcessorClock:
    """Processor time, with other data in the caches before each sample.

    In a model, a layer's weights have left the caches before its next turn. In repeated runs of one layer they would
    stay, which favours contestants that read little. Processor time excludes other load on the machine.
    """

    unit = "seconds of processor time"
    # Length of one sample. Shorter runs are repeated within it, as steps of decoding follow one another.
    shortest = 50e-3
    now = staticmethod(time.process_time)

    def __init__(self, cache_bytes: int | None = None):
        self.device = torch.device("cpu")
        cache_bytes = last_cache_bytes() if cache_bytes is None else cache_bytes
        self._elsewhere = torch.zeros(2 * cache_bytes // 8, dtype=torch.int64)

    def sample(self, run: Callable[[], Any], repeats: int) -> float:
        """Seconds of one run, as the mean of `repeats` runs."""
        # Read, not written: writes would cost time later, when they are flushed to memory.
        self._elsewhere.sum()
        begun = self.now()
        for _ in range(repeats):
            run()
        return (self.now() - begun) / repeats


class WallClock(ProcessorClock):
    """Time that passes, for what several threads do; otherwise as `ProcessorClock`. Other load counts."""

    unit = "seconds of wall time"
    now = staticmethod(time.perf_counter)


class DeviceClock:
    """Time between two events around runs that follow one another without a pause.

    The host's launch time counts where it exceeds the device's time, as in a model of many layers. The device's cache
    is not flushed, since the layers' weights are many times larger.
    """

    unit = "seconds between CUDA events"
    shortest = 5e-3

    def __init__(self, device: torch.device):
        self.device = device

    def sample(self, run: Callable[[], Any], repeats: int) -> float:
        """Seconds of one run, as the mean of `repeats` runs."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1e3 / repeats


Clock = ProcessorClock | DeviceClock


def last_cache_bytes() -> int:
    """Size of the processor's last cache; 64 MiB where the system does not report it."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 2**10, "M": 2**20}
    found = [text.strip() for text in (path.read_text() for path in sizes)]
    return max((int(text[:-1]) * units[text[-1]] for text in found if text[-1:] in units), default=2**26)
