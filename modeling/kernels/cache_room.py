"""A token's keys and values behind those that a cache has, without a copy of what is there.

transformers' `DynamicLayer` concatenates: each token reads and writes all keys and values before it, which in a long
conversation takes as long as the weights do. Here the tensors of a layer are views of memory with room for more. A view
that somebody else holds never changes: only behind its end anything is written, and only while the layer has the very
tensors that it was given here last. Whatever else was done to a layer meanwhile, it is copied to new memory.
"""

import weakref
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_LEAST = 128
"""Caches with fewer tokens are copied for each token, as transformers does: that costs little."""
_MORE = 8
"""New memory has room for an eighth more tokens than are there, and for `_LEAST` more at least."""


class _Held(NamedTuple):
    """What a layer was given, and the memory that these are views of, `[1, key heads, room, head_dim]`."""

    views: tuple[torch.Tensor, torch.Tensor]
    memory: tuple[torch.Tensor, torch.Tensor]


_HELD: weakref.WeakKeyDictionary[DynamicLayer, _Held] = weakref.WeakKeyDictionary()


def append(
    cache: Any, layer_index: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cache.update(key, value, layer_index)` of one token, `[1, key heads, 1, head_dim]` on the CPU."""
    layer = _layer(cache, layer_index)
    if layer is None or not (_fits(layer.keys, key) and _fits(layer.values, value)):
        return cache.update(key, value, layer_index)
    length, held = layer.keys.shape[2], _HELD.get(layer)
    is_ours = held is not None and held.views[0] is layer.keys and held.views[1] is layer.values
    # A tensor that was made in inference mode cannot be written outside of it.
    if (
        not is_ours
        or length == held.memory[0].shape[2]
        or held.memory[0].is_inference() != key.is_inference()
    ):
        memory = _with_room(layer.keys, length), _with_room(layer.values, length)
    else:
        memory = held.memory
    for each, new in zip(memory, (key, value), strict=True):
        each[:, :, length] = new[:, :, 0]
    layer.keys, layer.values = (each[:, :, : length + 1] for each in memory)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length + 1
    _HELD[layer] = _Held((layer.keys, layer.values), memory)
    return layer.keys, layer.values


def _layer(cache: Any, index: int) -> DynamicLayer | None:
    """The cache's layer, if it has `_LEAST` tokens, and one more does no more than to follow them; otherwise None."""
    if type(cache) is not DynamicCache or cache.offloading or index >= len(cache.layers):
        return None
    layer: Any = cache.layers[index]
    if not layer.is_initialized or layer.get_seq_length() < _LEAST:
        return None
    if type(layer) is DynamicSlidingWindowLayer:
        length = layer.keys.shape[2]
        # The last token that a window holds makes it drop the first one.
        is_plain = not layer.record_past and layer.cumulative_length == length < layer.sliding_window - 1
        return layer if is_plain else None
    return layer if type(layer) is DynamicLayer else None


def _fits(cached: torch.Tensor, new: torch.Tensor) -> bool:
    return (
        type(cached) is torch.Tensor
        and cached.is_cpu
        and cached.dtype == new.dtype
        and cached.shape[:2] == new.shape[:2]
        and cached.shape[3] == new.shape[3]
    )


def _with_room(cached: torch.Tensor, length: int) -> torch.Tensor:
    room = length + max(_LEAST, length // _MORE)
    memory = cached.new_empty(*cached.shape[:2], room, cached.shape[3])
    memory[:, :, :length] = cached
    return memory
