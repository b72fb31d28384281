"""Facts of a pass: which tokens are real, their positions, and their packed segments.

Shapes: B batch, Q query tokens, K key tokens (cached and new), T either of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import is_torchdynamo_compiling

from ..kernels import is_tracing
from .cache import cached_length


def left_padding(attention_mask: torch.Tensor) -> torch.Tensor:
    """`[B]`: the number of zeros before the first one of each row."""
    return (attention_mask.cumsum(-1) == 0).sum(-1)


def packed_segments(
    attention_mask: Any, past_key_values: Cache | None, position_ids: torch.Tensor | None
) -> torch.Tensor | None:
    """`[B or 1, Q]`: the number of each token's packed segment; None where rows are not packed."""
    if attention_mask is not None or position_ids is None:
        return None
    if past_key_values is not None and (
        getattr(past_key_values, "is_compileable", False) or cached_length(past_key_values) > 0
    ):
        return None
    return find_packed_sequence_indices(position_ids)


def check_not_packed(
    attention_mask: Any, past_key_values: Cache | None, position_ids: torch.Tensor | None
) -> None:
    """Refuse packed rows with a static cache, which cannot tell segments apart; checked on the CPU only.

    Raises:
        ValueError: positions restart within a row.
    """
    if attention_mask is not None or position_ids is None or position_ids.shape[1] < 2:
        return
    if not getattr(past_key_values, "is_compileable", False) or is_torchdynamo_compiling():
        return
    if position_ids.is_cpu and not is_tracing(position_ids) and bool((position_ids.diff(dim=1) != 1).any()):
        raise ValueError(
            "position_ids restart within a row, as in packed rows, and past_key_values is a cache of fixed length, "
            "which takes one sequence a row: use DynamicCache(), or none. For padding give an attention_mask."
        )


def is_real(index: torch.Tensor, padding_mask: torch.Tensor | None, batch_size: int) -> torch.Tensor:
    """`[B, T]` bool: which indices `[T]` along the rows are real tokens; negative and past the mask are not."""
    if padding_mask is None:
        return (index >= 0).expand(batch_size, -1)
    width = padding_mask.shape[1]
    return padding_mask[:, index.clamp(0, width - 1)] & (index >= 0) & (index < width)


def without_padding_positions(
    position_ids: torch.Tensor, attention_mask: Any, past_length: int | torch.Tensor
) -> torch.Tensor:
    """`[B or 1, Q]`: the positions, with zeros where a 2-D mask marks padding; other masks change nothing.

    Args:
        position_ids: `[B or 1, Q]`.
        attention_mask: `[B, K]` with zeros on padding, or anything else.
        past_length: tokens already in the cache.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
        return position_ids
    index = torch.arange(position_ids.shape[1], device=position_ids.device) + past_length
    padding_mask = attention_mask.to(device=position_ids.device, dtype=torch.bool)
    return torch.where(is_real(index, padding_mask, len(padding_mask)), position_ids, 0)


def positions_along(
    padding_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    query_offset: int | torch.Tensor,
    query_length: int,
    batch_size: int,
    device: torch.device,
    chunk_size: int,
) -> Callable[[Any, Any], torch.Tensor]:
    """Function from row and key index (tensors that broadcast) to the token's position.

    For cached tokens only the padding is known: their positions are counted back from the first new token.

    Raises:
        ValueError: padding follows cached tokens, the first new position fits both ways of counting, and the two
            ways put cached tokens into different chunks; checked on the CPU only.
    """
    if position_ids is None:
        offset_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        return _shifted(offset_B if padding_mask is None else -left_padding(padding_mask))
    positions_BQ = position_ids.expand(batch_size, -1).to(device)
    if padding_mask is None:
        cached_position_at = _shifted(positions_BQ[:, 0] - query_offset)
    else:
        query_index = torch.arange(query_length, device=device) + query_offset
        column_B1 = is_real(query_index, padding_mask, batch_size).int().argmax(1, keepdim=True)
        index_B1 = (column_B1 + query_offset).clamp(max=padding_mask.shape[1] - 1)
        cached_position_at = _looked_up(
            _counted_back(padding_mask, index_B1, positions_BQ.gather(1, column_B1), query_offset, chunk_size)
        )
    new_position_at = _looked_up(positions_BQ)

    def position_at(row, index):
        is_cached = index < query_offset
        return torch.where(
            is_cached, cached_position_at(row, index), new_position_at(row, index - query_offset)
        )

    return position_at


def _counted_back(
    padding_mask: torch.Tensor,
    index_B1: torch.Tensor,
    position_B1: torch.Tensor,
    query_offset: int | torch.Tensor,
    chunk_size: int,
) -> torch.Tensor:
    """`[B, K]`: positions of the cached tokens, counted back from the index and position of each row's first new token.

    Padding in the middle of a row may be counted (`arange`) or not (`attention_mask.cumsum(-1) - 1`). To tell which,
    the row's first real token is given a position both ways: the right way yields a usual start, such as 0.
    """
    by_index_BK = torch.arange(padding_mask.shape[1], device=padding_mask.device) - index_B1 + position_B1
    counts_BK = padding_mask.cumsum(-1)
    by_count_BK = counts_BK - counts_BK.gather(1, index_B1) + position_B1
    # Both ways give the row's first real token a position; counting indices gives the lower one.
    begin_B1 = left_padding(padding_mask)[:, None]
    first_by_index = position_B1 - index_B1 + begin_B1
    first_by_count = position_B1 - counts_BK.gather(1, index_B1) + 1
    fits_index = (first_by_index == 0) | (first_by_index == begin_B1)
    fits_count = (first_by_count == 0) | (first_by_count == 1) | (first_by_count == begin_B1)
    if not (is_torchdynamo_compiling() or is_tracing(padding_mask)) and padding_mask.is_cpu:
        is_open = (first_by_index >= 0) & (fits_index == fits_count)
        is_cached = padding_mask & (torch.arange(padding_mask.shape[1]) < query_offset)
        chunk_B1 = position_B1 // chunk_size
        differs = (by_index_BK // chunk_size == chunk_B1) != (by_count_BK // chunk_size == chunk_B1)
        has_new = padding_mask.gather(1, index_B1)
        wrong = (is_open & is_cached & differs & has_new).any(1).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"position_ids do not tell where the cached tokens of row {row} stand, which has padding behind them: "
                f"its next token has position {int(position_B1[row])}, so its first one had "
                f"{int(first_by_index[row])} if padding was counted, {int(first_by_count[row])} if not, and by that it "
                "falls into other chunks. Number real tokens from zero, attention_mask.cumsum(-1) - 1, or give all "
                "tokens in one pass."
            )
    return torch.where(fits_index, by_index_BK, by_count_BK)


def _shifted(offset_B: torch.Tensor) -> Callable[[Any, Any], torch.Tensor]:
    return lambda row, index: index + offset_B[row]


def _looked_up(positions_BT: torch.Tensor) -> Callable[[Any, Any], torch.Tensor]:
    return lambda row, index: positions_BT[row, index.clamp(0, positions_BT.shape[1] - 1)]


def check_window(
    position_at: Callable,
    padding_mask: torch.Tensor,
    key_index: int | torch.Tensor,
    query_offset: int | torch.Tensor,
    chunk_size: int,
) -> None:
    """Refuse a sliding cache in which padding in the middle of a row has displaced tokens of the current chunk.

    Checked on the CPU only: elsewhere the check would synchronise with the device.

    Raises:
        ValueError: a token that the cache has dropped belongs to the chunk of the first new one.
    """
    if is_torchdynamo_compiling() or is_tracing(padding_mask) or not padding_mask.is_cpu:
        return
    key_index = torch.as_tensor(key_index)
    first_kept = int(key_index[key_index >= 0].min()) if key_index.ndim else int(key_index)
    begin = int(query_offset)
    if not 0 < first_kept <= padding_mask.shape[1] or begin >= padding_mask.shape[1]:
        return
    is_new = padding_mask[:, begin:]
    rows = torch.arange(len(padding_mask))[:, None]
    first_new = is_new.int().argmax(1, keepdim=True) + begin
    chunks = position_at(rows, torch.arange(first_kept)) // chunk_size
    lost = padding_mask[:, :first_kept] & (chunks == position_at(rows, first_new) // chunk_size)
    if bool((lost & is_new.any(1, keepdim=True)).any()):
        raise ValueError(
            "past_key_values has forgotten tokens that are still needed: it keeps the last tokens of each chunked "
            "layer, padding included, and a row has padding behind cached tokens. Use a cache that keeps every token, "
            "DynamicCache() without a config."
        )


def starts_late(
    position_at: Callable, query_offset: int | torch.Tensor, batch_size: int, device: torch.device
) -> bool:
    """Whether a row's first new token has a higher position than index, so that it meets chunk borders early."""
    rows = torch.arange(batch_size, device=device)
    index = torch.zeros_like(rows) + query_offset
    return bool((position_at(rows, index) > index).any())


def position_of_first_query(
    attention_mask: Any, position_ids: torch.Tensor | None, query_length: int, past_length: int
) -> int | None:
    """Position of the first new token, if no row has padding and all rows count on from the same position.

    Reads the values of mask and positions.

    Args:
        attention_mask: None, or `[B, K]` with zeros on padding; for a 4-D mask the result is None.
        position_ids: `[B or 1, Q]`, or None: positions are indices.
        query_length: Q.
        past_length: tokens already in the cache.

    Returns:
        None for all other rows.
    """
    if attention_mask is not None:
        if attention_mask.ndim != 2 or not attention_mask[:, : past_length + query_length].all():
            return None
    if position_ids is None:
        return past_length
    if query_length > 1:
        position_ids = position_ids - torch.arange(query_length, device=position_ids.device)
        position_ids = torch.stack(position_ids.aminmax())[:, None]
    first, *others = position_ids[:, 0].tolist()
    return first if all(other == first for other in others) else None


def positions_fall(
    padding_mask: torch.Tensor | None, position_ids: torch.Tensor | None, query_offset: int | torch.Tensor
) -> bool:
    """Whether positions fall between two neighbouring new tokens that are real; reads their values.

    Args:
        padding_mask: `[B, K]` bool, false on padding.
        position_ids: `[B or 1, Q]`.
        query_offset: index of the first new token.
    """
    if position_ids is None:
        return False
    falls = position_ids.diff(dim=1) < 0
    if padding_mask is not None:
        query_index = torch.arange(position_ids.shape[1], device=padding_mask.device) + query_offset
        real_queries = is_real(query_index, padding_mask, len(padding_mask))
        falls = falls & real_queries[:, 1:] & real_queries[:, :-1]
    return bool(falls.any())
