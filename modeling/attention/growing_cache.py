"""Appending to a KV cache without copying its tokens.

transformers' `DynamicLayer` concatenates: each token copies all earlier keys and values, which in a long conversation
takes as long as reading the weights. Here a layer's keys and values are views of memory with spare places. New tokens
are written behind the end of the views, so that copies of the layer, whose views are shorter, do not change. A copy
whose views do not end with the last token written gets new memory when it appends.
"""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..kernels import can_use_shortcut

_MIN_SPARE = 128
"""The least number of spare places in new memory."""
_SPARE_SHARE = 8
"""New memory has a spare place for every eight tokens or more."""
# transformers' methods, to detect if other code replaced them.
_UPDATES = {kind: kind.update for kind in (DynamicLayer, DynamicSlidingWindowLayer)}
_CACHE_UPDATE = Cache.update


class _Memory:
    """Memory for keys and values, `[B, heads, places, D]`, of which the first `length` tokens are written.

    Copies of a layer share the memory. The first copy that appends raises `length`; then the others cannot append here.
    """

    def __init__(self, old: tuple[torch.Tensor, ...], length: int):
        places = length + max(_MIN_SPARE, length // _SPARE_SHARE)
        self.length = old[0].shape[2]
        self.tensors = [view.new_empty(*view.shape[:2], places, view.shape[3]) for view in old]
        for tensor, view in zip(self.tensors, old, strict=True):
            tensor[:, :, : self.length] = view

    def can_append(self, old: tuple[torch.Tensor, ...], length: int) -> bool:
        """Return True if the views `old` end with the last token written, and the memory has `length` places."""
        return (
            length <= self.tensors[0].shape[2]
            # A tensor that was made in inference mode cannot be written outside of it.
            and self.tensors[0].is_inference() == torch.is_inference_mode_enabled()
            and all(
                view.data_ptr() == tensor.data_ptr()
                and view.stride() == tensor.stride()
                and view.shape[2] == self.length
                for view, tensor in zip(old, self.tensors, strict=True)
            )
        )


def append_to_cache(
    cache: Cache, key: torch.Tensor, value: torch.Tensor, layer_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append keys and values `[B, heads, Q, D]` to a layer of a cache, and return what `cache.update` returns.

    In inference on a CPU the layers of transformers' `DynamicCache` grow in place.
    """
    layers: Any = getattr(cache, "layers", ())
    layer: Any = layers[layer_idx] if layer_idx < len(layers) else None
    new = key, value
    if not can_use_shortcut(key) or not _has_stock_update(cache, layer) or not _can_grow(layer, new):
        return cache.update(key, value, layer_idx)
    old = layer.keys, layer.values
    end = key.shape[2] + old[0].shape[2]
    memory = vars(layer).get("llamoe_memory")
    if memory is None or not memory.can_append(old, end):
        memory = layer.llamoe_memory = _Memory(old, end)
    for tensor, states in zip(memory.tensors, new, strict=True):
        tensor.narrow(2, memory.length, states.shape[2]).copy_(states)
    memory.length = end
    layer.keys, layer.values = (tensor.narrow(2, 0, end) for tensor in memory.tensors)
    if layer.is_sliding:
        layer.cumulative_length += key.shape[2]
    return layer.keys, layer.values


def _has_stock_update(cache: Cache, layer: Any) -> bool:
    """Return True if cache and layer use transformers' `update`; other code may have replaced it."""
    updates = [getattr(owner.update, "__func__", None) for owner in (layer, cache) if owner is not None]
    return updates == [_UPDATES.get(type(layer)), _CACHE_UPDATE] and not cache.offloading


def _can_grow(layer: Any, new: tuple[torch.Tensor, ...]) -> bool:
    """Return True if appending in place equals `update`: the layer keeps all tokens, and shapes and dtypes fit."""
    num_new = new[0].shape[2]
    if not layer.is_initialized:
        return False
    if layer.is_sliding and (layer.record_past or layer.cumulative_length + num_new >= layer.sliding_window):
        # The window is full: from now on each new token replaces an old one.
        vars(layer).pop("llamoe_memory", None)
        return False
    return all(
        type(old) is type(states) is torch.Tensor
        and (states.dtype, states.device) == (old.dtype, old.device)
        and states.dim() == old.dim() == 4
        and states.shape == (*old.shape[:2], num_new, old.shape[3])
        and old.shape[2] == layer.keys.shape[2]
        for states, old in zip(new, (layer.keys, layer.values), strict=True)
    )
