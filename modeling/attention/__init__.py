"""Attention: which tokens see each other, and the product itself.

Reading order: cache (length and keys of a KV cache before a pass), cache_checks (whether the cache fits the model),
mask_inputs (the facts of a pass: padding, segments, positions), varlen and chunked_sdpa (attention without a mask),
forms (which of them a pass takes), masks (positions, and the mask of each attention type), layer (the module).
"""

from .cache_checks import check_cache
from .layer import Attention, eager_attention_forward
from .mask_inputs import without_padding_positions
from .masks import (
    attention_masks,
    cached_length,
    mask_of_new_tokens,
    positions_from_lengths,
    positions_from_padding,
)

__all__ = [
    "Attention",
    "attention_masks",
    "cached_length",
    "check_cache",
    "eager_attention_forward",
    "mask_of_new_tokens",
    "positions_from_lengths",
    "positions_from_padding",
    "without_padding_positions",
]
