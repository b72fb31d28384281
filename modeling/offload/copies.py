"""Copies of matrices from RAM to an accelerator."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


class Copies:
    """Copies of matrices into slots, on an accelerator by a stream of their own.

    A copy waits for earlier products with the slot, and later products wait for the copy. The first copy also waits
    until the slots are allocated, and the allocator does not give their memory away during a copy.

    Args:
        device: device of the slots.
        memory: memory of all slots, allocated on the current stream.
    """

    def __init__(self, device: torch.device, memory: Iterable[torch.Tensor]):
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(device))
            for slots in memory:
                slots.record_stream(self._stream)
        # For each slot, by each stream with products that read it, an event after the last of these products.
        self._ends: dict[int, dict[int, torch.Event]] = {}

    def record_use(self, slot: int) -> None:
        """Record that a product with a slot has been launched on the current stream."""
        if self._stream is not None:
            stream = torch.accelerator.current_stream(self._device)
            self._ends.setdefault(slot, {})[stream.stream_id] = stream.record_event()

    def start(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], slot: int) -> "_Copy":
        """Begin to copy the parts of a matrix, pairs (target, source), into a slot."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return _Copy(self._device, None)
        for event in self._ends.pop(slot, {}).values():
            self._stream.wait_event(event)
        with self._stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return _Copy(self._device, self._stream.record_event())


@dataclass
class _Copy:
    """A running copy, the `arrival` of an entry of `MatrixCache`: streams wait for the copy, the host does not."""

    device: torch.device
    event: torch.Event | None

    def done(self) -> bool:
        return True

    def failed(self) -> bool:
        return False

    def result(self) -> None:
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)
