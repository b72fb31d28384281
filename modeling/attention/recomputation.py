"""KV caches under gradient checkpointing, whose layers write to none.

A layer that is computed again in the backward pass would write its keys a second time, so transformers takes the cache
away from layers in `train()`. Without gradients nothing is computed again: `generate` in `train()` keeps its cache.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Cache

from .cache import cached_length


def drops_caches(decoder: Any) -> bool:
    """Whether layers of a decoder would be computed again, and so get no cache."""
    return any(layer.training and getattr(layer, "gradient_checkpointing", False) for layer in decoder.layers)


def recomputed_with_gradients_only(forward: Callable) -> Callable:
    """Wrap a decoder's forward, so that it checkpoints layers only where gradients are wanted."""

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not drops_caches(self):
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
    if past_key_values is None or not drops_caches(decoder):
        return past_key_values
    length = int(cached_length(past_key_values))
    if length:
        raise ValueError(
            f"past_key_values holds {length} tokens, which no layer would see: under gradient checkpointing layers in "
            "train() get no cache where gradients are computed. Run under torch.no_grad() or in eval(), or turn it "
            "off: model.gradient_checkpointing_disable()."
        )
    return None
