"""transformers' `sdpa`, so that torch takes a kernel that writes no scores, on every device.

torch chooses among its kernels by the arguments. FlashAttention takes 16 bits on a GPU from capability 8 on and shares
keys among query heads; the memory-efficient one takes float32, and float16 on older cards, and wants keys for every
query head. What neither takes is multiplied out: at 8192 tokens of Scout 20 GB of scores and repeated keys.

Shapes: B batch, H query heads, G key/value heads, Q query tokens, K key tokens (cached and new), D head_dim.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention.bias import CausalBias
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import is_torchdynamo_compiling

from .._private_api import causal_bias
from ..kernels import are_single_queries, attend_to_single_queries

_FLASH_MAX_HEAD_DIM = 256


def fused_kernel(query: torch.Tensor) -> Literal["flash", "efficient"] | None:
    """Which of torch's kernels computes causal attention without a mask on a GPU; None: neither, or another device."""
    if query.device.type != "cuda" or torch.version.hip is not None:
        return None
    is_ampere = torch.cuda.get_device_capability(query.device) >= (8, 0)
    if query.dtype in (torch.float16, torch.bfloat16) and is_ampere:
        return "flash" if query.shape[-1] <= _FLASH_MAX_HEAD_DIM else "efficient"
    return "efficient" if query.dtype in (torch.float16, torch.float32) else None


def lower_right(attend: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """What stands for the mask in which the last query sees the last key; None where a mask must be made.

    Args:
        attend: what is to be given it.
        query: `[B, H, Q, D]`.
        key: `[B, G, K, D]`.
    """
    is_ours = isinstance(attend, partial) and attend.func is attend_by_sdpa
    if not is_ours or is_torchdynamo_compiling() or fused_kernel(query) is None:
        return None
    return causal_bias(query.shape[2], key.shape[2])


def attend_by_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The same as transformers' `sdpa_attention_forward`; `attention_mask` may be what `lower_right` returned."""
    if are_single_queries(query, attention_mask, dropout, **kwargs):
        return attend_to_single_queries(query, key, value, attention_mask, scaling), None
    groups = query.shape[1] // key.shape[1]
    is_aligned_below = isinstance(attention_mask, CausalBias)
    if groups > 1 and (attention_mask is None or is_aligned_below) and fused_kernel(query) == "efficient":
        is_causal: Any = module.is_causal if kwargs.get("is_causal") is None else kwargs["is_causal"]
        if is_causal and not is_aligned_below:
            # Of a static cache that is filled just now.
            key, value = (states[:, :, : query.shape[2]] for states in (key, value))
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        # What transformers' function asks a module.
        module, groups = SimpleNamespace(is_causal=is_causal), 1  # pyright: ignore[reportAssignmentType]
    if is_aligned_below:
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=groups > 1
        )
        return output.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
