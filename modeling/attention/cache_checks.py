"""A check of the KV cache that a decoder's forward gets.

A cache that has forgotten tokens which a layer still needs is refused: results would be silently wrong. So is a cache
with tokens under gradient checkpointing: transformers then gives layers no cache, since a recomputed layer would write
its keys twice. Other mismatches raise errors in torch or transformers.
"""

from typing import Any

import torch
from transformers.utils import is_torchdynamo_compiling

from ..kernels import is_readable
from .cache import cached_length
from .visibility import rules_of


def check_cache(decoder: Any, num_tokens: int, past_key_values: Any) -> None:
    """Check that a cache holds all tokens that the layers need for `num_tokens` new tokens.

    A cache whose layers all keep every token fits chunked layers, too: their mask applies the chunks.

    Raises:
        ValueError: the cache forgets tokens that layers still need, or has tokens under gradient checkpointing.
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
    is_checkpointed = torch.is_grad_enabled() and any(
        layer.training and getattr(layer, "gradient_checkpointing", False) for layer in decoder.layers
    )
    if is_checkpointed and (length := int(cached_length(past_key_values))):
        raise ValueError(
            f"past_key_values holds {length} tokens, which no layer would see: under gradient checkpointing layers in "
            "train() get no cache where gradients are computed. Run under torch.no_grad() or in eval(), or turn it "
            "off: model.gradient_checkpointing_disable()."
        )


def _keeps_all(past_key_values: Any, layer: Any, num_tokens: int) -> bool:
    """Return whether a static window keeps every token: it is as long as the cache, and the new tokens fit into it."""
    length = getattr(layer, "max_cache_len", 0)
    if length == 0 or length < past_key_values.get_max_length():
        return False
    written = layer.cumulative_length
    # On a GPU skip the check, which would wait for the device.
    return not is_readable(written) or int(written) + num_tokens <= length
