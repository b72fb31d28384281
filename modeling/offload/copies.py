"""Copies of matrices from RAM to an accelerator."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


class Copies:
    """Copies matrices into slots; on an accelerator in a separate stream.

    A copy waits for earlier products with the slot, and later products wait for the copy. The first copy also waits
    until the slots are allocated, and the allocator does not reuse their memory during a copy.

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
        # By slot, then by id of each stream whose products read the slot: an event after the last such product.
        self._ends: dict[int, dict[int, torch.Event]] = {}

    def record_use(self, slot: int) -> None:
        """Record that a product with a slot has been launched on the current stream."""
        if self._stream is not None:
            stream = torch.accelerator.current_stream(self._device)
            self._ends.setdefault(slot, {})[stream.stream_id] = stream.record_event()

    def start(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], slot: int) -> "_Copy":
        """Begin to copy a matrix into a slot; `pairs` are (target, source) of each of its tensors."""
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
    """A running copy, the `arrival` of an `Entry` of `MatrixCache`: streams wait for it, the host does not."""

    device: torch.device
    event: torch.Event | None

    def done(self) -> bool:
        return True

    def failed(self) -> bool:
        return False

    def result(self) -> None:
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)
