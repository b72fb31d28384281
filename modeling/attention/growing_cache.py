"""Cache layers that grow without a copy of what is there.

transformers' `DynamicLayer` concatenates: each token reads and writes all keys and values before it, which in a long
conversation takes as long as the weights do. Here the tensors of a layer are views of memory with room for more. A view
that somebody else holds never changes: only behind its end anything is written, and only while the layer has the
tensors that were written last. Otherwise the layer concatenates.
"""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..kernels import can_use_shortcut

_LEAST = 128
"""New memory has room for so many more tokens at least."""
_MORE = 8
"""And for an eighth more than are there."""
# Somebody may put others in their places.
_UPDATES = {kind: kind.update for kind in (DynamicLayer, DynamicSlidingWindowLayer)}


class _Room:
    """Memory for keys and values, `[B, heads, room, D]`, of which the first `length` tokens are written.

    Copies of a layer share it; of two that write, the second finds another length than its own.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.length = keys.shape[2]
        more = max(_LEAST, self.length // _MORE)
        self.memory = [
            each.new_empty(*each.shape[:2], self.length + more, each.shape[3]) for each in (keys, values)
        ]
        for memory, each in zip(self.memory, (keys, values), strict=True):
            memory[:, :, : self.length] = each

    def holds(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether these are the tensors that were written last."""
        return all(
            each.data_ptr() == memory.data_ptr() and each.stride() == memory.stride() and each.shape[2] == self.length
            for each, memory in zip((keys, values), self.memory, strict=True)
        )  # fmt: skip

    def append(self, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values `[B, heads, Q, D]`, for which there must be room; returns all of both."""
        end = self.length + new[0].shape[2]
        for memory, each in zip(self.memory, new, strict=True):
            memory[:, :, self.length : end] = each
        self.length = end
        keys, values = (memory.narrow(2, 0, end) for memory in self.memory)
        return keys, values


class _Grows(DynamicLayer):
    """A base class to name before transformers' own."""

    _room: _Room | None = None
    _last: tuple[int, int] | None = None

    def _grow(self, *new: torch.Tensor) -> bool:
        """Append new keys and values in place if that is possible."""
        if not (self.is_initialized and can_use_shortcut(new[0]) and self.keys.dim() == 4):
            return False
        now: Any = self.keys, self.values
        if not all(
            type(each) is type(its) is torch.Tensor
            and (each.dtype, each.device) == (its.dtype, its.device)
            and (each.shape[:2], each.shape[2], each.shape[3])
            == (its.shape[:2], new[0].shape[2], its.shape[3])
            for each, its in zip(new, now, strict=True)
        ):
            return False
        room = self._room
        # A tensor that was made in inference mode cannot be written outside of it.
        is_ours = room is not None and room.holds(*now)
        is_ours = is_ours and room.memory[0].is_inference() == torch.is_inference_mode_enabled()
        if not is_ours or room.length + new[0].shape[2] > room.memory[0].shape[2]:
            # Beams take other tensors for each token: then a copy with room for more would be in vain.
            if not is_ours and self._last != (now[0].data_ptr(), now[0].shape[2]):
                return False
            room = self._room = _Room(*now)
            if new[0].shape[2] > room.memory[0].shape[2] - room.length:
                return False
        self.keys, self.values = room.append(*new)
        return True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens `[B, heads, Q, D]`; returns all keys and values."""
        if self._grow(key_states, value_states):
            return self.keys, self.values
        found = super().update(key_states, value_states, *args, **kwargs)
        self._last = self.keys.data_ptr(), self.keys.shape[2]
        return found


class GrowingLayer(_Grows):
    """A `DynamicLayer`."""


class GrowingWindow(_Grows, DynamicSlidingWindowLayer):
    """A `DynamicSlidingWindowLayer`, which grows in place until the window is full."""

    def _grow(self, *new: torch.Tensor) -> bool:
        end = self.cumulative_length + new[0].shape[2]
        if self.record_past or end >= self.sliding_window or not super()._grow(*new):
            return False
        self.cumulative_length = end
        return True


_GROWING = {DynamicLayer: GrowingLayer, DynamicSlidingWindowLayer: GrowingWindow}


def let_grow(past_key_values: Cache | None, x: torch.Tensor) -> None:
    """Let the layers of transformers' dynamic cache grow in place, where a pass of `x` can write so.

    Layers of other classes, and of classes whose `update` somebody replaced, stay as they are.
    """
    layers: Any = getattr(past_key_values, "layers", None)
    if (
        layers is None
        or not can_use_shortcut(x)
        or any(kind.update is not its for kind, its in _UPDATES.items())
    ):
        return
    for layer in layers:
        # Research on caches gives layers an `update` of their own.
        if type(layer) in _GROWING and "update" not in vars(layer):
            layer.__class__ = _GROWING[type(layer)]
    if (kind := getattr(past_key_values, "layer_class_to_replicate", None)) in _GROWING:
        past_key_values.layer_class_to_replicate = _GROWING[kind]
