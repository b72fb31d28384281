"""Appending to a KV cache without copying its tokens.

transformers' `DynamicLayer` concatenates: each token copies all earlier keys and values, which in a long conversation
takes as long as reading the weights. Here a layer's tensors are views of memory with spare places. New tokens are
written behind the end of a view, so other views never change, and only if the view holds the last tokens written.
Otherwise new memory is allocated.
"""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..kernels import can_use_shortcut

_MIN_SPARE = 128
"""Tokens that new memory has place for, beside those that are appended."""
_SPARE_SHARE = 8
"""And at least an eighth of all."""
# The stock methods, to detect whether they have been replaced.
_UPDATES = {kind: kind.update for kind in (DynamicLayer, DynamicSlidingWindowLayer)}
_CACHE_UPDATE = Cache.update


class _Memory:
    """Memory for keys and values, `[B, heads, places, D]`, of which the first `length` tokens are written.

    Copies of a layer share it. The first copy that appends raises `length`, so that the others cannot append to it.
    """

    def __init__(self, old: tuple[torch.Tensor, ...], length: int):
        places = length + max(_MIN_SPARE, length // _SPARE_SHARE)
        self.length = old[0].shape[2]
        self.tensors = [its.new_empty(*its.shape[:2], places, its.shape[3]) for its in old]
        for tensor, its in zip(self.tensors, old, strict=True):
            tensor[:, :, : self.length] = its

    def can_append(self, old: tuple[torch.Tensor, ...], length: int) -> bool:
        """Return True if `old` ends with the last token written, and the memory has places for `length` tokens."""
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


def append_to_cache(
    cache: Cache, key: torch.Tensor, value: torch.Tensor, layer_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append keys and values `[B, heads, Q, D]` to a layer of a cache and return all, as `cache.update` does.

    In inference on a CPU, the layers of transformers' `DynamicCache` grow in place.
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
    for tensor, its in zip(memory.tensors, new, strict=True):
        tensor.narrow(2, memory.length, its.shape[2]).copy_(its)
    memory.length = end
    layer.keys, layer.values = (tensor.narrow(2, 0, end) for tensor in memory.tensors)
    if layer.is_sliding:
        layer.cumulative_length += key.shape[2]
    return layer.keys, layer.values


def _has_stock_update(cache: Cache, layer: Any) -> bool:
    """Return whether cache and layers use transformers' `update`; research code may replace it."""
    updates = [getattr(owner.update, "__func__", None) for owner in (layer, cache) if owner is not None]
    return updates == [_UPDATES.get(type(layer)), _CACHE_UPDATE] and not cache.offloading


def _can_grow(layer: Any, new: tuple[torch.Tensor, ...]) -> bool:
    """Return whether appending in place equals `update`, and the layer keeps all tokens."""
    num_new = new[0].shape[2]
    if not layer.is_initialized:
        return False
    if layer.is_sliding and (layer.record_past or layer.cumulative_length + num_new >= layer.sliding_window):
        # The window is full: from now on each token drops one.
        vars(layer).pop("llamoe_memory", None)
        return False
    return all(
        type(its) is type(one) is torch.Tensor
        and (one.dtype, one.device) == (its.dtype, its.device)
        and one.dim() == its.dim() == 4
        and one.shape == (*its.shape[:2], num_new, its.shape[3])
        and its.shape[2] == layer.keys.shape[2]
        for one, its in zip(new, (layer.keys, layer.values), strict=True)
    )
