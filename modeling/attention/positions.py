"""Positions of tokens: from left padding, from the lengths of packed sequences, and of cached tokens.

Left-padded, packed and single runs of the same tokens must give the same logits. So rotation, temperature and chunks
follow positions, which count a row's real tokens, and never the index in a cache.

Shapes: B batch, Q new tokens, T some tokens, W width of the padding mask, S sequences.
"""

from typing import Any

import torch

from ..kernels import is_readable
from .visibility import chunk_of


def left_padding(padding_mask: torch.Tensor) -> torch.Tensor:
    """`[B, 1]`: the number of zeros before the first one of each row."""
    return (padding_mask.cumsum(-1) == 0).sum(-1, keepdim=True)


def positions_from_padding(index: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """`[B or 1, T]`: tokens at these indices `[T]` along the rows, counted from each row's first real token.

    `padding` is what `left_padding` returns, None for rows that start at index 0. Left padding gets position 0; right
    padding continues the count.
    """
    return index[None] if padding is None else (index - padding).clamp(min=0)


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


def cached_positions(
    padding_mask: torch.Tensor,
    index_B1: torch.Tensor,
    position_B1: torch.Tensor,
    query_offset: int | torch.Tensor,
    chunk_size: int,
) -> torch.Tensor:
    """`[B, W]`: positions of the cached tokens, counted back from the index and position of each row's first new token.

    Padding in the middle of a row may be counted (`arange`) or not (`attention_mask.cumsum(-1) - 1`). To tell which,
    the row's first real token is given a position both ways: the right way yields a usual start, such as 0.

    Raises:
        ValueError: the first new token fits both ways of counting, and the two put cached tokens into different
            chunks; checked on the CPU only.
    """
    by_index_BW = torch.arange(padding_mask.shape[1], device=padding_mask.device) - index_B1 + position_B1
    counts_BW = padding_mask.cumsum(-1)
    by_count_BW = counts_BW - counts_BW.gather(1, index_B1) + position_B1
    # Both ways give the row's first real token a position; counting indices gives the lower one.
    begin_B1 = left_padding(padding_mask)
    first_by_index = position_B1 - index_B1 + begin_B1
    first_by_count = position_B1 - counts_BW.gather(1, index_B1) + 1
    fits_index = (first_by_index == 0) | (first_by_index == begin_B1)
    fits_count = (first_by_count == 0) | (first_by_count == 1) | (first_by_count == begin_B1)
    if is_readable(padding_mask):
        is_open = (first_by_index >= 0) & (fits_index == fits_count)
        is_cached = padding_mask & (torch.arange(padding_mask.shape[1]) < query_offset)
        chunk_B1 = chunk_of(position_B1, chunk_size)
        one, other = (chunk_of(each, chunk_size) == chunk_B1 for each in (by_index_BW, by_count_BW))
        wrong = (is_open & is_cached & (one != other) & padding_mask.gather(1, index_B1)).any(1).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"position_ids do not tell where the cached tokens of row {row} stand, which has padding behind them: "
                f"its next token has position {int(position_B1[row])}, so its first one had "
                f"{int(first_by_index[row])} if padding was counted, {int(first_by_count[row])} if not, and by that it "
                "falls into other chunks. Number real tokens from zero, attention_mask.cumsum(-1) - 1, or give all "
                "tokens in one pass."
            )
    return torch.where(fits_index, by_index_BW, by_count_BW)
