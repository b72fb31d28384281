"""Attention of one query per row, on every device, which reads each key once.

With a mask or under a compiler, torch's function copies the cached keys for each query head that shares them, or has no
fast kernel.

Shapes: B batch, H query heads, G key/value heads, K keys, D head_dim.
"""

from typing import Any

import torch
from torch import nn

from .cpp_kernels import cpp_attention
from .cpu import can_use_shortcut
from .tracing import is_exported


def are_single_queries(
    query: torch.Tensor, attention_mask: Any, dropout: float = 0.0, cache: Any = None, **_
) -> bool:
    """Return True if `attend_to_single_queries` computes what transformers' `sdpa` would for these arguments."""
    # An exported program must accept any number of queries.
    return (
        not is_exported()
        and query.shape[2] == 1
        and not dropout
        and cache is None
        and (
            attention_mask is None
            or (isinstance(attention_mask, torch.Tensor) and attention_mask.shape[1:3] == (1, 1))
        )
    )


def attend_to_single_queries(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attend with one query per row. Query heads that share keys become queries of one head, so each key is read once.

    Args:
        query: `[B, H, 1, D]`.
        key: `[B, G, K, D]`, of G key/value heads.
        value: likewise.
        attention_mask: None or `[B, 1, 1, K]`.
        scaling: factor of the scores.

    Returns:
        `[B, 1, H, D]`.
    """
    if attention_mask is None and can_use_shortcut(query):
        output = cpp_attention(query, key, value, scaling)
        if output is not None:
            return output
    batch_size, num_heads, _, head_dim = query.shape
    packed = query.reshape(batch_size, key.shape[1], -1, head_dim)
    output = nn.functional.scaled_dot_product_attention(packed, key, value, attention_mask, scale=scaling)
    return output.reshape(batch_size, 1, num_heads, head_dim)
