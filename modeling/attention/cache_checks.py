"""Which KV cache a decoder's forward may read and write.

One that has forgotten tokens which a layer still needs is refused: its numbers would be wrong in silence. Other caches
of another model end in an error of torch or transformers. Under gradient checkpointing there is none: a layer that is
computed again in the backward pass would write its keys a second time, so transformers takes the cache away from layers
in `train()`. Without gradients nothing is computed again: `generate` in `train()` keeps its cache.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig
from transformers.utils import is_torchdynamo_compiling

from ..kernels import is_readable
from .cache import cached_length
from .visibility import rules_of


def check_cache(config: PreTrainedConfig, num_tokens: int, past_key_values: Any) -> None:
    """Check that a cache keeps what this decoder's layers need when `num_tokens` new tokens are written to it.

    A cache whose layers all keep every token fits chunked layers too; their mask applies the chunks.

    Raises:
        ValueError: layers that forget tokens which ours still need.
    """
    if past_key_values is None or is_torchdynamo_compiling() or torch.jit.is_tracing():
        return
    layers = getattr(past_key_values, "layers", None) or []
    # In a static cache shorter than a window, windows are as short as the cache.
    whole = [layer.max_cache_len for layer in layers if _is_static(layer) and not layer.is_sliding]
    rules = rules_of(config) if layers else {}
    for index, (layer, layer_type) in enumerate(zip(layers, config.attention_types(), strict=False)):
        if not getattr(layer, "is_sliding", False):
            continue
        wanted = rules[layer_type].local_size
        kept = layer.max_cache_len if _is_static(layer) else getattr(layer, "sliding_window", wanted)
        has_room = _is_static(layer) and _has_room(layer, num_tokens, whole)
        if wanted is None or (kept < wanted and not has_room):
            raise ValueError(
                f"past_key_values is a cache of another model, or too short: layer {index} keeps {kept} tokens; "
                f"expected: {wanted or 'all'}. Make it with DynamicCache(config=model.config)."
            )


def _is_static(layer: Any) -> bool:
    return hasattr(layer, "max_cache_len")


def _has_room(layer: Any, num_tokens: int, whole: list[int]) -> bool:
    """Whether a static window forgets nothing: it is as long as the cache, and the new tokens fit into it."""
    if whole and layer.max_cache_len < max(whole):
        return False
    written = layer.cumulative_length
    # A GPU is not waited for.
    return not is_readable(written) or int(written) + num_tokens <= layer.max_cache_len


def _drops_caches(decoder: Any) -> bool:
    """Whether layers of a decoder would be computed again, and so get no cache."""
    return any(layer.training and getattr(layer, "gradient_checkpointing", False) for layer in decoder.layers)


def recomputed_with_gradients_only(forward: Callable) -> Callable:
    """Wrap a decoder's forward, so that it checkpoints layers only where gradients are wanted."""

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not _drops_caches(self):
            return forward(self, *args, **kwargs)
        modules = [module for module in self.modules() if getattr(module, "gradient_checkpointing", False)]
        for module in modules:
            module.gradient_checkpointing = False
        try:
            return forward(self, *args, **kwargs)
        finally:
            for module in modules:
                module.gradient_checkpointing = True

    return run


def cache_to_write(decoder: Any, past_key_values: Cache | None) -> Cache | None:
    """Return the cache that a forward reads and writes: none under gradient checkpointing.

    Raises:
        ValueError: there are tokens in it, which the layers would not see.
    """
    if past_key_values is None or not _drops_caches(decoder):
        return past_key_values
    length = int(cached_length(past_key_values))
    if length:
        raise ValueError(
            f"past_key_values holds {length} tokens, which no layer would see: under gradient checkpointing layers in "
            "train() get no cache where gradients are computed. Run under torch.no_grad() or in eval(), or turn it "
            "off: model.gradient_checkpointing_disable()."
        )
    return None
