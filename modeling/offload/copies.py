"""Copies of matrices from RAM to an accelerator, beside the products that run there."""

import torch

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Targets and their sources."""


class Copied:
    """A copy that is over when it was asked for (`matrix_cache.Job`)."""

    is_for_each = False

    def __init__(self, pairs: Pairs):
        for target, source in pairs:
            target.copy_(source)

    def is_done(self) -> bool:
        """Yes."""
        return True

    def finish(self) -> None:
        """Nothing is left to wait for."""


class Copies:
    """Copies into the slots of one memory, on a stream of their own.

    A copy begins when the products that read the slot before are through, and the products that read it next begin when
    the copy is.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.Stream(device=device)
        # Of each slot the last event of each stream that has read it.
        self._left: dict[int, dict[int, torch.Event]] = {}

    def leave(self, slot: int) -> None:
        """Record that the last product with a slot was put on the current stream."""
        stream = torch.accelerator.current_stream(self.device)
        self._left.setdefault(slot, {})[stream.stream_id] = stream.record_event()

    def start(self, pairs: Pairs, slot: int) -> "_Copy":
        """Begin to copy to a slot."""
        for event in self._left.pop(slot, {}).values():
            self._stream.wait_event(event)
        with self._stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return _Copy(self.device, self._stream.record_event())


class _Copy:
    """A copy on its way; streams wait for it, not the host (`matrix_cache.Job`)."""

    is_for_each = True

    def __init__(self, device: torch.device, event: torch.Event):
        self.device, self.event = device, event

    def is_done(self) -> bool:
        """Yes: a later copy to the same slot is behind this one on the stream."""
        return True

    def finish(self) -> None:
        """Let the products that come wait for the copy."""
        torch.accelerator.current_stream(self.device).wait_event(self.event)
