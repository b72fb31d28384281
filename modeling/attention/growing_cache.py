"""Layers of transformers' `DynamicCache` that append without a copy of what is there.

transformers concatenates: each token reads and writes all keys and values before it, which in a long conversation takes
as long as the weights do. Here a layer's tensors are views of memory with spare places. A view that somebody else holds
never changes: only behind its end anything is written, and only while the layer has the tensors that were written last.
Otherwise new memory is taken.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..kernels import can_use_shortcut

_MIN_SPARE = 128
"""Tokens that new memory has place for, beside those that are appended."""
_SPARE_SHARE = 8
"""And at least an eighth of all."""
# Research on caches puts others in their places.
_UPDATES = {kind: kind.update for kind in (DynamicLayer, DynamicSlidingWindowLayer)}


class _Memory:
    """Keys and values, `[B, heads, places, D]`, of which the first `length` tokens are written.

    Copies of a layer share it. Of two that append, the second has fewer tokens than `length`.
    """

    def __init__(self, old: tuple[torch.Tensor, ...], length: int):
        places = length + max(_MIN_SPARE, length // _SPARE_SHARE)
        self.length = old[0].shape[2]
        self.tensors = [its.new_empty(*its.shape[:2], places, its.shape[3]) for its in old]
        for tensor, its in zip(self.tensors, old, strict=True):
            tensor[:, :, : self.length] = its

    def can_append(self, old: tuple[torch.Tensor, ...], length: int) -> bool:
        """Return whether `old` was written last, and there is place for `length` tokens in all."""
        return (
            length <= self.tensors[0].shape[2]
            # A tensor that was made in inference mode cannot be written outside of it.
            and self.tensors[0].is_inference() == torch.is_inference_mode_enabled()
            and all(
                its.data_ptr() == tensor.data_ptr()
                and its.stride() == tensor.stride()
                and its.shape[2] == self.length
                for its, tensor in zip(old, self.tensors, strict=True)
            )
        )


class GrowingLayer(DynamicLayer):
    """A layer that keeps every token, and in inference on a CPU grows in place."""

    llamoe_memory: _Memory | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values `[B, heads, Q, D]`; return those that the new tokens may see."""
        old, new = (self.keys, self.values), (key_states, value_states)
        if not can_use_shortcut(key_states) or not self._can_grow(old, new):
            self.llamoe_memory = None
            return super().update(key_states, value_states, *args, **kwargs)
        num_new = key_states.shape[2]
        end = num_new + old[0].shape[2]
        memory = self.llamoe_memory
        if memory is None or not memory.can_append(old, end):
            memory = self.llamoe_memory = _Memory(old, end)
        for tensor, its in zip(memory.tensors, new, strict=True):
            tensor[:, :, memory.length : end] = its
        memory.length = end
        self.keys, self.values = (tensor.narrow(2, 0, end) for tensor in memory.tensors)
        if isinstance(self, GrowingWindow):
            self.cumulative_length += num_new
        return self.keys, self.values

    def _can_grow(self, old: tuple[Any, ...], new: tuple[torch.Tensor, ...]) -> bool:
        """Return whether tokens appended in place are what the stock class returns."""
        if not self.is_initialized or any(kind.update is not update for kind, update in _UPDATES.items()):
            return False
        return all(
            type(its) is type(one) is torch.Tensor
            and (one.dtype, one.device) == (its.dtype, its.device)
            and one.dim() == its.dim() == 4
            and one.shape == (*its.shape[:2], new[0].shape[2], its.shape[3])
            and its.shape[2] == old[0].shape[2]
            for one, its in zip(new, old, strict=True)
        )


class GrowingWindow(GrowingLayer, DynamicSlidingWindowLayer):
    """A layer that keeps a window of tokens, and grows in place until it is full: then each token drops one."""

    def _can_grow(self, old: tuple[Any, ...], new: tuple[torch.Tensor, ...]) -> bool:
        is_full = self.cumulative_length + new[0].shape[2] >= self.sliding_window
        return not (is_full or self.record_past) and super()._can_grow(old, new)
