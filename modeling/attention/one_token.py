"""Attention of one token on a CPU: a decode step's, from the norm before it to the residual sum, in two calls.

With one row, calls between products take as long as the products of small models in few bits. What is computed is what
`RMSNorm` and `Attention` compute, with their roundings; what this does not know, they do.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels import (
    Rotation,
    apply_linear,
    attend_to_single_queries,
    can_use_shortcut,
    cpp_attend,
    cpp_project,
    is_watched,
    matrices_of,
    norm_weight,
)
from ..layers import L2Norm, RMSNorm
from .layer import Attention


def attend_one_token(
    norm: nn.Module,
    attention: Any,
    x: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, ...],
    attention_mask: Any,
    position_ids: torch.Tensor,
    cache: Cache | None,
    options: Mapping[str, Any],
) -> torch.Tensor | None:
    """`x + attention(norm(x))` for one token that sees all cached ones; None where the modules must be called.

    Args:
        norm: the RMSNorm before the attention.
        attention: an `Attention`.
        x: `[1, 1, hidden_size]`.
        position_embeddings: tables, as in `Attention.forward`.
        attention_mask: as there.
        position_ids: `[1, 1]`.
        cache: the token's key and value are appended.
        options: all other arguments; any that asks for something is for the modules.
    """
    if (
        attention_mask is not None
        or cache is None
        or not can_use_shortcut(x)
        or x.numel() != x.shape[-1]
        or not x.is_contiguous()
        or any(option is not None and option is not False for option in options.values())
        or type(attention) is not Attention
        or type(norm) is not RMSNorm
        or attention.training
        or is_watched(attention)
        or ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation) is not sdpa_attention_forward
    ):
        return None
    rotation = None
    if attention.use_rope:
        rotation = _rotation(position_embeddings, attention.head_dim, attention.rope_interleave)
        if rotation is None:
            return None
    modules = attention._modules
    matrices = matrices_of((modules["q_proj"], modules["k_proj"], modules["v_proj"]), x)
    weight, qk_norm = norm_weight(norm, x), attention.qk_norm
    if matrices is None or weight is None or (qk_norm is not None and not _is_l2_norm(qk_norm)):
        return None
    head_dim = attention.head_dim
    projected = cpp_project(
        x,
        weight,
        norm.eps,
        matrices,
        head_dim,
        rotation,
        -1.0 if qk_norm is None else qk_norm.eps,
        _temperature(attention.config, position_ids) if attention.use_temperature_tuning else 1.0,
    )
    if projected is None:
        return None
    sizes = [matrix.codes.shape[0] for matrix in matrices]
    query, key, value = projected.split_with_sizes(sizes)
    key, value = cache.update(
        key.view(1, -1, 1, head_dim), value.view(1, -1, 1, head_dim), attention.layer_idx
    )
    output = matrices_of((modules["o_proj"],), query)
    if output is not None and _are_plain(key, value, x):
        attended = cpp_attend(query, key, value, attention.scaling, output[0], x)
        if attended is not None:
            return attended
    attended = attend_to_single_queries(query.view(1, -1, 1, head_dim), key, value, None, attention.scaling)
    return x + apply_linear(modules["o_proj"], attended.reshape(1, 1, -1))


def _is_l2_norm(module: nn.Module) -> bool:
    return type(module) is L2Norm and not is_watched(module)


def _are_plain(key: torch.Tensor, value: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a cache gave ordinary tensors of one row."""
    return all(
        type(tensor) is torch.Tensor
        and tensor.dtype == x.dtype
        and tensor.is_cpu
        and tensor.stride(3) == 1
        and len(tensor) == 1
        for tensor in (key, value)
    )


def _rotation(tables: tuple[torch.Tensor, ...], head_dim: int, is_interleaved: bool) -> Rotation | None:
    """The tables of `rotary_tables` for one position; None for others."""
    own, other = tables[0], tables[-1]
    if own.ndim != 4 or not all(table.is_contiguous() and table.is_cpu for table in tables):
        return None
    if own.dtype == torch.complex64 and own.numel() == head_dim // 2:
        # Cosine and sine of a pair stand side by side.
        return Rotation(own, 1, 2, True)
    if is_interleaved or own.dtype != torch.float32 or not own.numel() == other.numel() == head_dim:
        return None
    # Cosines twice; sines with the other sign, then sines. Two tensors.
    offset = (other.data_ptr() - own.data_ptr()) // 4 + head_dim // 2
    return Rotation(own, offset, 1, False)


def _temperature(config: Any, position_ids: torch.Tensor) -> float:
    """See `Attention`."""
    steps = max(math.floor((position_ids.item() + 1) / config.floor_scale), 0)
    return math.log1p(steps) * config.attn_scale + 1.0
