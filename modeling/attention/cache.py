"""Length and keys of a KV cache before a pass, and a static cache layer for chunked attention.

transformers' static sliding layer counts its tokens in a Python integer. A compiled step is therefore compiled
again for the second token and when the window is full, and each later step moves the whole window by one place.
`RingLayer` makes the window a ring: a step writes one place, and the count is a tensor. Keys are returned in ring
order; `key_index` maps each to its token.

Shapes: B batch, D head_dim, W tokens of the window, Q new tokens, K keys that a layer returns (cached and new).
"""

from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticSlidingWindowLayer
from transformers.utils import is_torchdynamo_compiling


class RingLayer(StaticSlidingWindowLayer):
    """The last `max_cache_len` tokens of a layer; token t is stored at place t modulo `max_cache_len`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens.

        Args:
            key_states: `[B, heads, Q, D]`.
            value_states: likewise.
            *args: unused.
            **kwargs: unused.

        Returns:
            keys and values `[B, heads, K, D]` that the new tokens may see: in the first pass the new ones; for a single
            token the updated ring; otherwise the ring before this pass, then the new ones.
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
        """K for `query_length` new tokens, and zero, the index of the first key."""
        if not self.is_initialized:
            return query_length, 0
        return self.max_cache_len + (query_length if query_length > 1 else 0), 0

    def key_index(self, query_length: int, device: torch.device) -> torch.Tensor:
        """`[K]`: the index along the row of each returned key; negative where a place is empty."""
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
        """Number of tokens written so far."""
        return self.cumulative_length if self.is_initialized else 0


def make_rings(past_key_values: Cache | None) -> None:
    """Turn a cache's empty static windows into rings, and its growing windows of one token into full layers, in place.

    transformers' growing window of one token keeps every token (`keys[-0:]`) but announces one. A full layer announces
    what it keeps, and the masks apply the chunk borders. All other layers stay as they are.
    """
    if is_torchdynamo_compiling():
        return
    layers = getattr(past_key_values, "layers", ())
    if not getattr(past_key_values, "is_compileable", False):
        for layer in layers:
            if type(layer) is DynamicSlidingWindowLayer:
                if layer.sliding_window != 1 or layer.is_initialized:
                    # All windows of a cache are alike.
                    return
                layer.__class__ = DynamicLayer  # pyright: ignore[reportAttributeAccessIssue]
        return
    for layer in layers:
        if type(layer) is StaticSlidingWindowLayer and layer.cumulative_length_int == 0:
            layer.__class__ = RingLayer


def first_layer(past_key_values: Cache | None, is_sliding: bool | None = None) -> int:
    """Index of the first cache layer that is written in this process.

    Under pipeline parallelism the layers of earlier stages stay empty here, so their length says nothing.

    Args:
        past_key_values: the cache.
        is_sliding: consider only layers that are (True) or are not (False) sliding.

    Returns:
        the index; if nothing is written yet, that of the first such layer; 0 if there is none.
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
    """Number of tokens in a cache; 0 without one."""
    return 0 if past_key_values is None else past_key_values.get_seq_length(first_layer(past_key_values))


class FixedLength:
    """Sizes of a static cache, as transformers asks for them, fixed before the layers write.

    The cache counts its tokens in place. Flex attention reads the count when a layer runs, after the layer has written
    its keys, so the index of every query would be too high.
    """

    is_compileable = True

    def __init__(self, past_key_values: Cache):
        self._past_key_values = past_key_values
        self._layer_idx = first_layer(past_key_values, is_sliding=False)

    @classmethod
    def of(cls, past_key_values: Cache | None, config: PreTrainedConfig) -> Any:
        """Wrap a static cache if flex attention is used; return any other cache unchanged."""
        is_static = getattr(past_key_values, "is_compileable", False)
        return (
            cls(past_key_values) if is_static and "flex" in config._attn_implementation else past_key_values
        )

    def get_query_offset(self, _: int) -> int | torch.Tensor:
        """Index of the first new token."""
        return extent(1, None, self._past_key_values, self._layer_idx)[0]

    def get_mask_sizes(self, query_length: int, _: int) -> tuple[int, int]:
        """Number of keys, and the index of the first."""
        return self._past_key_values.get_mask_sizes(query_length, self._layer_idx)


def extent(
    query_length: int, padding_mask: torch.Tensor | None, past_key_values: Cache | None, layer_idx: int
) -> tuple[int | torch.Tensor, int, int]:
    """Index of the first query, number of keys, and index of the first key."""
    if past_key_values is not None:
        query_offset = past_key_values.get_query_offset(layer_idx)
        if isinstance(query_offset, torch.Tensor):
            # The cache counts in place, and flex attention reads this later.
            query_offset = query_offset.clone()
        return query_offset, *past_key_values.get_mask_sizes(query_length, layer_idx)
    return 0, query_length if padding_mask is None else padding_mask.shape[-1], 0


def keys_in_ring(
    past_key_values: Cache | None, layer_idx: int, query_length: int, device: torch.device
) -> torch.Tensor | None:
    """`[K]`: the index of each key where keys are in ring order; None where they are in row order."""
    layers = getattr(past_key_values, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    return layer.key_index(query_length, device) if isinstance(layer, RingLayer) else None
