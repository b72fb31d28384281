"""Experts in RAM beside an accelerator: copies to it, and when it is cheaper to compute in RAM.

Bringing an expert costs its bytes over the link, whatever the number of rows. Computing it on the CPU costs its bytes
from RAM for few rows, and the products for many. Both rates are measured on the first expert that is missed.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass
class Costs:
    """Seconds of both ways for one expert's matrix.

    Attributes:
        bring: seconds to copy it to the accelerator.
        few_rows: seconds of a product of one row on the CPU.
        row: seconds that each further row adds there.
    """

    bring: float
    few_rows: float
    row: float

    def cheaper(self, num_rows: int) -> Literal["compute", "bring"]:
        """The way that costs less time."""
        return "compute" if self.few_rows + self.row * (num_rows - 1) < self.bring else "bring"


def measure(bring: Callable[[], object], compute: Callable[[int], object], rows: int = 64) -> Costs:
    """Time both ways.

    Args:
        bring: copies a matrix to the accelerator.
        compute: multiplies so many rows by the matrix on the CPU.
        rows: number of rows of a long product.
    """

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            work()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    one, many = seconds(lambda: compute(1)), seconds(lambda: compute(rows))
    return Costs(seconds(bring), one, max(0.0, many - one) / (rows - 1))


class Copies:
    """Copies into the slots of one memory, on an accelerator on a stream of their own.

    A copy begins when the products that read the slot before are through, and the products that read it next begin when
    the copy is.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        # Of each slot the last event of each stream that has read it.
        self._left: dict[int, dict[int, torch.Event]] = {}

    def leave(self, slot: int) -> None:
        """Record that the last product with a slot was put on the current stream."""
        if self._stream is not None:
            stream = torch.accelerator.current_stream(self._device)
            self._left.setdefault(slot, {})[stream.stream_id] = stream.record_event()

    def start(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], slot: int) -> "_Copy":
        """Begin to copy to a slot: targets and their sources."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return _Copy(self._device, None)
        for event in self._left.pop(slot, {}).values():
            self._stream.wait_event(event)
        with self._stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return _Copy(self._device, self._stream.record_event())


@dataclass
class _Copy:
    """A copy on its way; streams wait for it, not the host (`matrix_cache.Arrival`)."""

    device: torch.device
    event: torch.Event | None

    def done(self) -> bool:
        """Yes: a later copy to the same slot is behind this one on the stream."""
        return True

    def failed(self) -> bool:
        """No."""
        return False

    def result(self) -> None:
        """Let the products that come wait for the copy."""
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)
