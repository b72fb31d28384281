"""Grouped-query attention with rotary or no position embedding, q/k norm and temperature tuning.

Several query heads may share a key/value head (Ainslie et al. 2023, arXiv 2305.13245); in LLaMA 1 none do. A Llama 4
layer normalizes each query and key head, without a weight, after rotation. Every fourth layer has neither rotation nor
norm: it scales queries by a temperature that grows with their position (Nakanishi 2025, arXiv 2501.19399).

The mask, or an object in its place, decides which keys a query sees (see `visibility` and `forms`). Attention itself is
computed by a function of transformers' attention interface.

Shapes: B batch, H heads, T or Q new tokens, K keys (cached and new), D head_dim.
"""

from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..layers import L2Norm, Linear, rotate
from .forms import attend_in_form
from .growing_cache import append_to_cache
from .implementation import implementation_on


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with plain operators, the softmax in float32 or float64: the implementation `eager`.

    `query` is `[B, H, Q, D]`; `key` and `value` are `[B, H / module.num_key_value_groups, K, D]`; `attention_mask` is
    None or additive and broadcasts to `[B, H, Q, K]`; `kwargs`, for other implementations, are unused. Returns the
    output `[B, Q, H, D]` and the attention weights `[B, H, Q, K]`.
    """
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    # Float32 would turn the lowest float64 of a mask into -inf, and a fully masked row into NaN.
    dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = nn.functional.softmax(scores, dim=-1, dtype=dtype).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class Attention(nn.Module):
    """Causal self-attention of one decoder layer, described by `config.layer_plan(layer_idx)`."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        plan = config.layer_plan(layer_idx)
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.use_rope = plan.use_rope
        self.rope_interleave = config.rope_interleave
        self.use_temperature_tuning = plan.use_temperature_tuning

        hidden_size, bias = config.hidden_size, config.attention_bias
        query_size = config.num_attention_heads * self.head_dim
        key_value_size = config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(hidden_size, query_size, bias=bias)
        self.k_proj = Linear(hidden_size, key_value_size, bias=bias)
        self.v_proj = Linear(hidden_size, key_value_size, bias=bias)
        self.o_proj = Linear(query_size, hidden_size, bias=bias)
        self.qk_norm = L2Norm(config.rms_norm_eps) if plan.use_qk_norm else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any,
        position_ids: torch.Tensor,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the cached and new tokens.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            position_embeddings: cos and sin from `RotaryEmbedding`.
            attention_mask: what `attention_masks` returned for this layer's type; None: causal attention.
            position_ids: `[B or 1, T]`.
            past_key_values: KV cache that rotated keys and values are appended to.
            **kwargs: passed unchanged to the attention implementation.

        Returns:
            `[B, T, hidden_size]`, and the attention weights if the implementation returns them, else None.
        """
        input_shape = hidden_states.shape[:-1]
        heads_shape = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads_shape)  # [B, T, H, D]
        key = self.k_proj(hidden_states).view(heads_shape)
        value = self.v_proj(hidden_states).view(heads_shape).transpose(1, 2)

        if self.use_rope:
            heads = query.shape[2], key.shape[2]
            rotated = rotate(torch.cat((query, key), 2), *position_embeddings, self.rope_interleave)
            query, key = rotated.split(heads, 2)
        if self.qk_norm is not None:
            query, key = self.qk_norm(query), self.qk_norm(key)
        if self.use_temperature_tuning:
            query = (query * self._temperature(position_ids)).to(query.dtype)
        query, key = query.transpose(1, 2), key.transpose(1, 2)  # [B, H, T, D]

        if past_key_values is not None:
            key, value = append_to_cache(past_key_values, key, value, self.layer_idx)
        elif (paged := kwargs.pop("paged_cache", None)) is not None:
            # Continuous batching's cache puts arguments for its attention function into `kwargs`.
            key, value = paged.update(key, value, self.layer_idx, kwargs=kwargs)

        implementation = implementation_on(query.device, self.config)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        kwargs["dropout"] = self.attention_dropout if self.training else 0.0
        kwargs["scaling"] = self.scaling
        output, weights = attend_in_form(
            attend, self, query, key, value, attention_mask, position_ids, **kwargs
        )
        return self.o_proj(output.reshape(*input_shape, -1).contiguous()), weights

    def _temperature(self, position_ids: torch.Tensor) -> torch.Tensor:
        # log1p(floor((position + 1) / floor_scale)) * attn_scale + 1: no effect below position floor_scale - 1.
        # Clamp: the logarithm of padding's negative positions could be NaN, which a mask does not remove.
        steps = torch.floor((position_ids.float() + 1.0) / self.config.floor_scale).clamp(min=0)
        return (torch.log1p(steps) * self.config.attn_scale + 1.0)[..., None, None]  # [B or 1, T, 1, 1]
