"""Checks of the KV cache that a decoder's forward gets.

A cache that has forgotten tokens which a layer still needs is refused, since results would be silently wrong. Other
mismatches raise errors in torch or transformers. Under gradient checkpointing layers get no cache: a layer that is
recomputed in the backward pass would write its keys a second time.
"""

from typing import Any

import torch
from transformers.utils import is_torchdynamo_compiling

from ..kernels import is_readable
from .cache import cached_length
from .visibility import rules_of


class CheckpointedWithGradients:
    """A mixin for checkpointing only while gradients are computed, so that `generate` in `train()` keeps its cache.

    transformers does the same from 5.24 on.
    """

    _is_checkpointed = False

    @property
    def gradient_checkpointing(self) -> bool:
        """True if layers are recomputed in the backward pass; transformers sets and reads it."""
        return self._is_checkpointed and torch.is_grad_enabled()

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self._is_checkpointed = value


def check_cache(decoder: Any, num_tokens: int, past_key_values: Any) -> None:
    """Check that a cache holds all tokens that the layers need for `num_tokens` new tokens.

    A cache whose layers all keep every token fits chunked layers too; their mask applies the chunks.

    Raises:
        ValueError: the cache forgets tokens that layers still need, or has some that gradient checkpointing hides.
    """
    if past_key_values is None or is_torchdynamo_compiling() or torch.jit.is_tracing():
        return
    layers = getattr(past_key_values, "layers", None) or []
    rules = rules_of(decoder.config) if layers else {}
    for index, (layer, layer_type) in enumerate(zip(layers, decoder.config.attention_types(), strict=False)):
        if not getattr(layer, "is_sliding", False):
            continue
        wanted = rules[layer_type].local_size
        kept = getattr(layer, "max_cache_len", None) or getattr(layer, "sliding_window", wanted)
        if wanted is None or (kept < wanted and not _keeps_all(past_key_values, layer, num_tokens)):
            raise ValueError(
                f"past_key_values is a cache of another model, or too short: layer {index} keeps {kept} tokens; "
                f"expected: {wanted or 'all'}. Make it with DynamicCache(config=model.config)."
            )
    is_checkpointed = any(
        layer.training and getattr(layer, "gradient_checkpointing", False) for layer in decoder.layers
    )
    if is_checkpointed and (length := int(cached_length(past_key_values))):
        raise ValueError(
            f"past_key_values holds {length} tokens, which no layer would see: under gradient checkpointing layers in "
            "train() get no cache where gradients are computed. Run under torch.no_grad() or in eval(), or turn it "
            "off: model.gradient_checkpointing_disable()."
        )


def _keeps_all(past_key_values: Any, layer: Any, num_tokens: int) -> bool:
    """Return whether a static window keeps every token: it is as long as the cache, and the new tokens fit."""
    length = getattr(layer, "max_cache_len", 0)
    if length == 0 or length < past_key_values.get_max_length():
        return False
    written = layer.cumulative_length
    # On a GPU skip the check, which would wait for the device.
    return not is_readable(written) or int(written) + num_tokens <= length
