"""What a cache says before a pass is written to it, and a static cache for chunked layers.

A pass asks how many tokens the cache holds, and which keys a layer will be given.

transformers' static layer for windows counts its tokens in a Python integer: a compiled step is compiled again for the
second token and when the window is full, and from then on every step moves the whole window by one place. In
`RingLayer` the window is a ring, written at one place a step, and the count is a tensor. Keys come back in the ring's
order; `key_index` says which token each one is.

Shapes: W tokens of the window, Q new tokens, K keys that a layer is given (cached and new).
"""

from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticSlidingWindowLayer
from transformers.utils import is_torchdynamo_compiling


class RingLayer(StaticSlidingWindowLayer):
    """The last `max_cache_len` tokens of a layer; token t stands at place t modulo `max_cache_len`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens.

        Args:
            key_states: `[B, heads, Q, D]`.
            value_states: likewise.
            *args: not used.
            **kwargs: not used.

        Returns:
            keys and values `[B, heads, K, D]` that the new tokens may see: in the first pass the new ones; of a single
            token the ring, with the new one in it; else the ring as it was, and the new ones.
        """
        is_first = not self.is_initialized
        if is_first:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        num_new = key_states.shape[-2]
        num_kept = min(num_new, self.max_cache_len)
        places = torch.arange(num_new - num_kept, num_new, device=self.device) + self.cumulative_length
        places = places % self.max_cache_len
        keys, values = key_states, value_states
        if not is_first and num_new > 1:
            keys, values = torch.cat((self.keys, keys), -2), torch.cat((self.values, values), -2)
        self.keys.index_copy_(2, places, key_states[..., -num_kept:, :])
        self.values.index_copy_(2, places, value_states[..., -num_kept:, :])
        self.cumulative_length.add_(num_new)
        return (self.keys, self.values) if not is_first and num_new == 1 else (keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Give K for that many new tokens, and zero."""
        if not self.is_initialized:
            return query_length, 0
        return self.max_cache_len + (query_length if query_length > 1 else 0), 0

    def key_index(self, query_length: int, device: torch.device) -> torch.Tensor:
        """Give `[K]`: which token each returned key is, counted along the row; below zero where there is none."""
        if not self.is_initialized:
            return torch.arange(query_length, device=device)
        length = self.cumulative_length.to(device)
        places = torch.arange(self.max_cache_len, device=device)
        newest = length if query_length == 1 else length - 1
        ring = newest - (newest - places) % self.max_cache_len
        if query_length == 1:
            return ring
        return torch.cat([ring, torch.arange(query_length, device=device) + length])

    def get_seq_length(self) -> int | torch.Tensor:
        """Give the number of tokens written so far."""
        return self.cumulative_length if self.is_initialized else 0


def make_rings(past_key_values: Cache | None) -> None:
    """Turn the empty static windows of a cache into rings, in place; everything else is left as it is.

    But for growing windows of one token: transformers' keep every token (`keys[-0:]`) and announce one. They become
    layers that say what they do; our masks see to the chunks.
    """
    if is_torchdynamo_compiling():
        return
    layers = getattr(past_key_values, "layers", ())
    if not getattr(past_key_values, "is_compileable", False):
        for layer in layers:
            if type(layer) is DynamicSlidingWindowLayer:
                if layer.sliding_window != 1 or layer.is_initialized:
                    return  # all windows of a cache are alike
                layer.__class__ = DynamicLayer  # pyright: ignore[reportAttributeAccessIssue]
        return
    for layer in layers:
        if type(layer) is StaticSlidingWindowLayer and layer.cumulative_length_int == 0:
            layer.__class__ = RingLayer


def first_layer(past_key_values: Cache | None, is_sliding: bool | None = None) -> int:
    """Give the index of the first layer of a cache that is written to in this process.

    Under pipeline parallelism the layers of the stages before stay empty here and say nothing of the length.

    Args:
        past_key_values: the cache.
        is_sliding: look only at layers that are (True) or are not (False) sliding.

    Returns:
        the index; where nothing is written yet, of the first such layer; 0 where there is none.
    """
    first = None
    for i, layer in enumerate(getattr(past_key_values, "layers", ())):
        if is_sliding is not None and getattr(layer, "is_sliding", False) != is_sliding:
            continue
        if getattr(layer, "is_initialized", False):
            return i
        first = i if first is None else first
    return first or 0


def cached_length(past_key_values: Cache | None) -> int | torch.Tensor:
    """Give the number of tokens in a cache, 0 without one."""
    return 0 if past_key_values is None else past_key_values.get_seq_length(first_layer(past_key_values))


class FixedLength:
    """A static cache's sizes, as transformers asks for them, that do not change while the layers write to it.

    The cache counts its tokens in place, and flex attention reads the count when a layer runs: by then the layer has
    written its keys, and every query would stand too late.
    """

    is_compileable = True

    def __init__(self, past_key_values: Cache):
        self._past_key_values = past_key_values
        self._layer_idx = first_layer(past_key_values, is_sliding=False)

    @classmethod
    def of(cls, past_key_values: Cache | None, config: PreTrainedConfig) -> Any:
        """Wrap a cache where flex attention needs it; give others as they are."""
        is_static = getattr(past_key_values, "is_compileable", False)
        return (
            cls(past_key_values) if is_static and "flex" in config._attn_implementation else past_key_values
        )

    def get_query_offset(self, _: int) -> int | torch.Tensor:
        """Give the index of the first new token."""
        return extent(1, None, self._past_key_values, self._layer_idx)[0]

    def get_mask_sizes(self, query_length: int, _: int) -> tuple[int, int]:
        """Give the number of keys, and the index of the first."""
        return self._past_key_values.get_mask_sizes(query_length, self._layer_idx)


def extent(
    query_length: int, padding_mask: torch.Tensor | None, past_key_values: Cache | None, layer_idx: int
) -> tuple[int | torch.Tensor, int, int]:
    """Give the index of the first query, the number of keys, and the index of the first of them."""
    if past_key_values is not None:
        query_offset = past_key_values.get_query_offset(layer_idx)
        if isinstance(query_offset, torch.Tensor):
            query_offset = query_offset.clone()  # counted in place, and flex attention reads it later
        return query_offset, *past_key_values.get_mask_sizes(query_length, layer_idx)
    return 0, query_length if padding_mask is None else padding_mask.shape[-1], 0


def keys_in_ring(
    past_key_values: Cache | None, layer_idx: int, query_length: int, device: torch.device
) -> torch.Tensor | None:
    """Give `[K]`, the index of each key, where they do not stand in their order."""
    layers = getattr(past_key_values, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    return layer.key_index(query_length, device) if isinstance(layer, RingLayer) else None
