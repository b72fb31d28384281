"""transformers' `sdpa`, with one query a row attended to without copies of the keys that heads share."""

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..kernels import are_single_queries, attend_to_single_queries


def attend_by_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The same as transformers' `sdpa_attention_forward`."""
    if are_single_queries(query, attention_mask, dropout, **kwargs):
        return attend_to_single_queries(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
