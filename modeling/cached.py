"""What a cache says before a pass is written to it: how many tokens it holds, and which keys a layer will be given.

Shapes: Q new tokens, K keys that a layer is given (cached and new).
"""

from typing import Any

import torch
from transformers import Cache, PreTrainedConfig

from .ring_cache import RingLayer


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
