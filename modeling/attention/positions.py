"""Positions of tokens: from the lengths of packed sequences, and without those of padding.

Left-padded, packed and single runs of the same tokens must give the same logits. So rotation, temperature and chunks
follow positions, which count a row's real tokens, and never the index in a cache.

Shapes: B batch, Q new tokens, T some tokens, W width of the padding mask, S sequences.
"""

from typing import Any

import torch


def positions_from_lengths(cu_seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`[1, T]`: tokens of packed sequences, each counted from zero.

    `cu_seq_lens` `[S + 1]` says where each sequence begins, and then the number T of all tokens.
    """
    index = torch.arange(num_tokens, device=cu_seq_lens.device)
    sequence = torch.searchsorted(cu_seq_lens, index.to(cu_seq_lens.dtype), right=True) - 1
    return (index - cu_seq_lens[sequence])[None]


def is_real(index: torch.Tensor, padding_mask: torch.Tensor | None, batch_size: int) -> torch.Tensor:
    """`[B, T]` bool: which indices `[T]` along the rows are real tokens; negative and past the mask are not."""
    if padding_mask is None:
        return (index >= 0).expand(batch_size, -1)
    width = padding_mask.shape[1]
    return padding_mask[:, index.clamp(0, width - 1)] & (index >= 0) & (index < width)


def without_padding_positions(
    position_ids: torch.Tensor, attention_mask: Any, past_length: int | torch.Tensor
) -> torch.Tensor:
    """`[B or 1, Q]`: the positions behind `past_length` cached tokens, zero where a mask `[B, W]` marks padding.

    Without a mask, or with one of other axes, they are returned unchanged.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
        return position_ids
    index = torch.arange(position_ids.shape[1], device=position_ids.device) + past_length
    padding_mask = attention_mask.to(device=position_ids.device, dtype=torch.bool)
    return torch.where(is_real(index, padding_mask, len(padding_mask)), position_ids, 0)
