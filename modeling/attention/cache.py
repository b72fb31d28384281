"""The number of tokens in a KV cache, the keys that it will return, and a static cache layer for chunks and windows.

transformers' static sliding layer counts its tokens in a Python integer, so that a compiled step is compiled again for
the second token and when the window is full. Then each step moves the whole window by one place. `RingLayer` is a ring
buffer: a step overwrites one place, and the count is a tensor. It returns keys in the order of places; `Keys.ring` has
the index along the row of each key's token.

Shapes: B batch, D head_dim, W tokens of the window, Q new tokens, K keys that a layer returns (cached and new).
"""

from typing import NamedTuple

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticSlidingWindowLayer
from transformers.utils import is_torchdynamo_compiling


class RingLayer(StaticSlidingWindowLayer):
    """A ring buffer of a layer's last `max_cache_len` tokens: token t is at place t modulo `max_cache_len`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens `[B, heads, Q, D]`, and return the keys and values `[B, heads, K, D]` that they may see.

        In the first forward these are the new ones; later, for one token, the ring (all stored tokens) after the
        update, and for several tokens the ring before the update, followed by the new ones.
        """
        is_first = not self.is_initialized
        if is_first:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        num_new = key_states.shape[-2]
        num_kept = min(num_new, self.max_cache_len)
        newest = self.cumulative_length.view(1)
        if num_new != 1:
            newest = torch.arange(num_new - num_kept, num_new, device=self.device) + newest
        places = newest % self.max_cache_len
        keys, values = key_states, value_states
        if not is_first and num_new > 1:
            keys, values = torch.cat((self.keys, keys), -2), torch.cat((self.values, values), -2)
        self.keys.index_copy_(2, places, key_states[..., -num_kept:, :])
        self.values.index_copy_(2, places, value_states[..., -num_kept:, :])
        self.cumulative_length.add_(num_new)
        return (self.keys, self.values) if not is_first and num_new == 1 else (keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys for `query_length` new tokens, and 0, their offset."""
        if not self.is_initialized:
            return query_length, 0
        return self.max_cache_len + (query_length if query_length > 1 else 0), 0

    def key_index(self, query_length: int, device: torch.device) -> torch.Tensor | None:
        """Return `[K]`, each key's index along the row, negative for an empty place; None if keys are in row order."""
        if not self.is_initialized:
            return None
        length = self.cumulative_length.to(device)
        places = torch.arange(self.max_cache_len, device=device)
        newest = length if query_length == 1 else length - 1
        ring = newest - (newest - places) % self.max_cache_len
        if query_length == 1:
            return ring
        return torch.cat([ring, torch.arange(query_length, device=device) + length])

    def get_seq_length(self) -> int | torch.Tensor:
        """Return the number of tokens written so far."""
        return self.cumulative_length if self.is_initialized else 0


def replace_windows(past_key_values: Cache | None, with_rings: bool) -> None:
    """Turn a cache's empty static sliding layers into `RingLayer`s, growing ones of one token into full ones, in place.

    transformers' growing layer with a window of one token keeps all (`keys[-0:]`), but its `get_mask_sizes` says one.
    """
    if is_torchdynamo_compiling():
        return
    for layer in getattr(past_key_values, "layers", ()):
        if with_rings and type(layer) is StaticSlidingWindowLayer and layer.cumulative_length_int == 0:
            layer.__class__ = RingLayer
        elif type(layer) is DynamicSlidingWindowLayer and layer.sliding_window == 1:
            layer.__class__ = DynamicLayer  # pyright: ignore[reportAttributeAccessIssue]


def keep_exported_tokens(past_key_values: Cache | None, position_ids: torch.Tensor | None) -> None:
    """Turn a cache's growing sliding layers into full ones, in place, for a program that is being exported.

    An exported program gets only the cache's keys and values, and takes the number of cached tokens from their length.
    So every layer must keep all tokens; masks still apply windows and chunks.

    Raises:
        ValueError: a sliding layer may have dropped tokens, and either the new tokens' positions are not given, or
            other layers keep all tokens.
    """
    layers = getattr(past_key_values, "layers", ())
    windows = {i: layer for i, layer in enumerate(layers) if isinstance(layer, DynamicSlidingWindowLayer)}
    for i, layer in windows.items():
        kept = layer.keys.shape[-2] if layer.is_initialized else 0
        if kept < layer.sliding_window - 1:
            # A new layer: a compiled graph cannot change an object's class.
            layers[i] = DynamicLayer()
            if kept:
                layers[i].update(layer.keys, layer.values)
        elif kept == layer.get_seq_length() and (position_ids is None or len(windows) < len(layers)):
            raise ValueError(
                f"past_key_values keeps the last {kept} tokens of layers with chunks or a window, and an exported "
                "program cannot know how many came before them. Export with a cache that keeps every token, "
                "DynamicCache() without a config."
            )


def first_layer(past_key_values: Cache | None, is_sliding: bool | None = None) -> int:
    """Return the index of the first cache layer that has tokens, or of the first layer if none has; 0 without layers.

    Under pipeline parallelism, layers that other processes compute stay empty. `is_sliding` restricts the search to
    layers that forget tokens (True) or keep all of them (False).
    """
    layers = getattr(past_key_values, "layers", ())
    numbers = [i for i in range(len(layers)) if is_sliding in (None, getattr(layers[i], "is_sliding", False))]
    written = [i for i in numbers if getattr(layers[i], "is_initialized", False)]
    return next(iter(written or numbers), 0)


def cached_length(past_key_values: Cache | None) -> int | torch.Tensor:
    """Return the number of tokens in a cache; 0 without one."""
    return 0 if past_key_values is None else past_key_values.get_seq_length(first_layer(past_key_values))


class Keys(NamedTuple):
    """The keys that the cache returns to sliding layers or to full ones, cached and new.

    Attributes:
        length: K, the number of keys.
        offset: index along the row of the first key.
        ring: `[K]`, each key's index along the row, if a `RingLayer` returns them; None: keys are in row order.
    """

    length: int
    offset: int
    ring: torch.Tensor | None = None

    def index(self, device: torch.device) -> torch.Tensor:
        """Return each key's index along the row, `[K]`; negative for an empty place of a `RingLayer`."""
        return torch.arange(self.length, device=device) + self.offset if self.ring is None else self.ring


def keys_of(past_key_values: Cache | None, is_sliding: bool, query_length: int, device: torch.device) -> Keys:
    """Describe the keys that sliding layers, or full ones, get from the cache for `query_length` new tokens."""
    if past_key_values is None:
        return Keys(query_length, 0)
    number = first_layer(past_key_values, is_sliding)
    layers = getattr(past_key_values, "layers", ())
    layer = layers[number] if number < len(layers) else None
    ring = layer.key_index(query_length, device) if isinstance(layer, RingLayer) else None
    return Keys(*past_key_values.get_mask_sizes(query_length, number), ring)
