"""A static cache for chunked layers whose steps compile into one graph.

transformers' static layer for windows counts its tokens in a Python integer: a compiled step is compiled again for the
second token and when the window is full, and from then on every step moves the whole window by one place. Here the
window is a ring, written at one place a step, and the count is a tensor. Keys come back in the ring's order; which
token each one is, `masks` asks with `key_index`.

Shapes: W tokens of the window, Q new tokens, K returned keys.
"""

import torch
from transformers import Cache
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
