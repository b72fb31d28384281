"""Which KV cache a decoder's forward may read and write.

One that has forgotten tokens which a layer still needs is refused: its numbers would be wrong in silence. Other caches
of another model end in an error of torch or transformers. Under gradient checkpointing there is none: a layer that is
computed again in the backward pass would write its keys a second time, so transformers takes the cache away.
"""

from typing import Any

import torch
from transformers.utils import is_torchdynamo_compiling

from ..kernels import is_readable
from .cache import cached_length
from .visibility import rules_of


class CheckpointedWithGradients:
    """Mixin of modules that checkpoint layers only where gradients are computed: `generate` in `train()` has a cache.

    transformers does the same from 5.24 on.
    """

    _is_checkpointed = False

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether layers are computed again in the backward pass; transformers sets and reads it."""
        return self._is_checkpointed and torch.is_grad_enabled()

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self._is_checkpointed = value


def check_cache(decoder: Any, num_tokens: int, past_key_values: Any) -> None:
    """Check that layers get from a cache what they need when `num_tokens` new tokens are written to it.

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
    # A GPU is not waited for.
    return not is_readable(written) or int(written) + num_tokens <= length
