"""A token's keys and values behind those that a cache has, without a copy of what is there.

transformers' `DynamicLayer` concatenates: each token reads and writes all keys and values before it, which in a long
conversation takes as long as the weights do. Here the tensors of a layer are views of memory with room for more. A view
that somebody else holds never changes: only behind its end anything is written, and only while the layer has the very
tensors that it was given here last. Whatever else was done to a layer meanwhile, it is copied to new memory.
"""

import weakref
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_LEAST = 128
"""`append` copies a cache layer with fewer tokens for each new token, as transformers does: that is cheap."""
_MORE = 8
"""New memory has room for an eighth more tokens than are there, and for `_LEAST` more at least."""


class Room:
    """Memory of a cache layer. The layer's keys and values are views of it, with room behind them for more tokens.

    Attributes:
        memory: keys and values, `[1, key heads, room, head_dim]`.
        views: what the layer was given last.
        addresses: of keys and of values, and the numbers between two heads and two tokens.
    """

    __slots__ = ("addresses", "memory", "views")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.memory = _with_room(keys), _with_room(values)
        self.views = keys, values
        first, second = self.memory
        self.addresses = first.data_ptr(), second.data_ptr(), first.stride(1), first.stride(2)

    def advance(self, layer: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengthen the keys and values by the token that was written behind the first `length`; returns both."""
        views = self.memory[0].narrow(2, 0, length + 1), self.memory[1].narrow(2, 0, length + 1)
        layer.keys, layer.values = views
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length = length + 1
        # Last, so that after an interrupt the next token copies the layer to new memory.
        self.views = views
        return views


_UPDATE = DynamicCache.update
_UPDATES = {layer: layer.update for layer in (DynamicLayer, DynamicSlidingWindowLayer)}
_ROOMS: weakref.WeakKeyDictionary[DynamicLayer, Room] = weakref.WeakKeyDictionary()


def append(
    cache: Any, layer_index: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cache.update(key, value, layer_index)` of one token, `[1, key heads, 1, head_dim]` on the CPU."""
    found = None
    if key.shape == value.shape and key.dtype == value.dtype:
        found = room_for_token(cache, layer_index, key.shape[1], key.shape[3], key.dtype, least=_LEAST)
    if found is None:
        return cache.update(key, value, layer_index)
    layer, room, length = found
    for each, new in zip(room.memory, (key, value), strict=True):
        each[:, :, length] = new[:, :, 0]
    return room.advance(layer, length)


def room_for_token(
    cache: Any, index: int, heads: int, size: int, dtype: torch.dtype, least: int = 1
) -> tuple[DynamicLayer, Room, int] | None:
    """A cache's layer, memory with room for one more token, and the number of its tokens.

    None if the layer does anything else with a new token than to store it behind the others.

    Args:
        cache: any cache.
        index: of its layer.
        heads: of keys, and of values.
        size: numbers of a head.
        dtype: of keys and values, on the CPU.
        least: tokens that must be there.
    """
    if type(cache) is not DynamicCache or cache.offloading or index >= len(cache.layers):
        return None
    layer: Any = cache.layers[index]
    # Neither was replaced, as research on caches does.
    own = getattr(cache.update, "__func__", None), getattr(layer.update, "__func__", None)
    if own != (_UPDATE, _UPDATES.get(type(layer))):
        return None
    if not layer.is_initialized or layer.get_seq_length() < least:
        return None
    keys, values = layer.keys, layer.values
    length = keys.shape[2]
    if type(layer) is DynamicSlidingWindowLayer:
        # A full window drops its first token for each new one.
        if layer.record_past or not layer.cumulative_length == length < layer.sliding_window - 1:
            return None
    elif type(layer) is not DynamicLayer:
        return None
    room = _ROOMS.get(layer)
    is_ours = room is not None and room.views[0] is keys and room.views[1] is values
    is_ours = is_ours and (keys.data_ptr(), values.data_ptr()) == room.addresses[:2]
    if not is_ours and not all(_fits(each, (1, heads, length, size), dtype) for each in (keys, values)):
        return None
    # A tensor that was made in inference mode cannot be written outside of it.
    is_usable = is_ours and room.memory[0].is_inference() == torch.is_inference_mode_enabled()
    if room is None or not is_usable or length == room.memory[0].shape[2]:
        room = _ROOMS[layer] = Room(keys, values)
    # The cache may be of another model, or have another dtype.
    _, its_heads, _, its_size = room.memory[0].shape
    return (
        (layer, room, length) if (its_heads, its_size, room.memory[0].dtype) == (heads, size, dtype) else None
    )


def _fits(cached: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return type(cached) is torch.Tensor and cached.is_cpu and cached.dtype == dtype and cached.shape == shape


def _with_room(cached: torch.Tensor) -> torch.Tensor:
    length = cached.shape[2]
    memory = cached.new_empty(*cached.shape[:2], length + max(_LEAST, length // _MORE), cached.shape[3])
    memory[:, :, :length] = cached
    return memory
