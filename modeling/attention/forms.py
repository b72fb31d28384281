"""Forms of attention that replace a mask, and which of them a pass takes.

Flash attention takes `Sequences` in all layers. Under torch's `scaled_dot_product_attention` (`sdpa`) the same
sequences are folded into batches once a mask would be larger than a chunk's (chunked layers) or than a constant
(full layers). Rows without padding become `EqualRows`, known from sizes alone. So no mask grows with the square of
the tokens.

Shapes: B batch, Q query tokens, K key tokens (cached and new).
"""

from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig
from transformers.utils import is_torchdynamo_compiling
from transformers.utils.import_utils import is_torchdynamo_exporting

from ..kernels import is_tracing
from .cache import cached_length, extent, first_layer, keys_in_ring
from .chunked_sdpa import Fold, fold
from .mask_inputs import check_window, is_real, packed_segments, position_of_first_query, positions_along
from .varlen import EqualRows, Sequences, cut_equal_rows, sequences_of_equal_rows, sequences_of_groups


def flash_sequences(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    has_lengths: bool,
) -> dict[str, Sequences | None]:
    """Sequences of each attention type for flash attention; arguments as in `masks.attention_masks`.

    Raises:
        ValueError: a 4-D mask.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"{config._attn_implementation} takes an attention_mask of two axes, [batch, tokens] with zeros on "
            f"padding; got {list(attention_mask.shape)}. For a mask of four axes set another implementation: "
            'model.set_attn_implementation("sdpa").'
        )
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    sequences: dict[str, Sequences | None] = {}
    if has_lengths:
        sequences["full_attention"] = None
        types.discard("full_attention")
    segments = packed_segments(attention_mask, past_key_values, position_ids) if types else None
    for attention_type in types:
        chunk_size = config.attention_chunk_size if attention_type == "chunked_attention" else None
        sequences[attention_type] = sequences_of_type(
            chunk_size, inputs_embeds, attention_mask, past_key_values, position_ids, segments
        )
    return sequences


def sequences_of_type(
    chunk_size: int | None,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> Sequences | None:
    """Sequences of one attention type.

    Args:
        chunk_size: tokens of a chunk; None for full layers.
        inputs_embeds: `[B, Q, ...]`.
        attention_mask: None, or `[B, K]` with zeros on padding.
        past_key_values: the cache.
        position_ids: `[B or 1, Q]` as the caller gave them, or None.
        segments: `[B or 1, Q]`, each token's packed segment, or None.

    Returns:
        None where each row's queries see all keys of the row, or where every token is padding.
    """
    batch_size, query_length = inputs_embeds.shape[:2]
    device = inputs_embeds.device
    padding_mask = attention_mask.to(device=device, dtype=torch.bool) if attention_mask is not None else None
    layer_idx = first_layer(past_key_values, is_sliding=chunk_size is not None)
    if segments is not None:
        past_key_values = None
    query_offset, key_length, key_offset = extent(query_length, padding_mask, past_key_values, layer_idx)
    positions_matter = segments is not None or (position_ids is not None and chunk_size is not None)
    if padding_mask is None and not positions_matter and not isinstance(query_offset, torch.Tensor):
        return sequences_of_equal_rows(
            batch_size, query_offset, query_length, key_offset, key_length, chunk_size, device
        )

    query_index = torch.arange(query_length, device=device) + query_offset
    key_index = keys_in_ring(past_key_values, layer_idx, query_length, device)
    if key_index is None:
        key_index = torch.arange(key_length, device=device) + key_offset
    real_queries = is_real(query_index, padding_mask, batch_size)
    real_keys = is_real(key_index, padding_mask, batch_size) & (key_index <= query_index[-1])
    if segments is not None:
        assert position_ids is not None
        groups = segments
        if chunk_size is not None:
            begins = (segments.diff(dim=1) != 0) | ((position_ids // chunk_size).diff(dim=1) != 0)
            groups = nn.functional.pad(begins.cumsum(1), (1, 0))
        query_groups = key_groups = groups.expand(batch_size, -1)
    elif chunk_size is not None:
        position_at = positions_along(
            padding_mask, position_ids, query_offset, query_length, batch_size, device, chunk_size
        )
        if padding_mask is not None and past_key_values is not None:
            check_window(position_at, padding_mask, key_index, query_offset, chunk_size)
        rows = torch.arange(batch_size, device=device)[:, None]
        query_groups = position_at(rows, query_index) // chunk_size
        key_groups = position_at(rows, key_index) // chunk_size
    else:
        query_groups, key_groups = torch.zeros_like(real_queries.long()), torch.zeros_like(real_keys.long())
    return sequences_of_groups(real_queries, real_keys, query_groups, key_groups)


def first_position_of_equal_rows(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
) -> int | None:
    """Position of the first new token, if it is the same in all rows and `sdpa` needs masks for chunk borders only.

    Reads the values of mask and positions, but not while a graph is traced: then sizes alone decide.

    Returns:
        None for other implementations, for padded or packed rows, and for a static cache that already holds tokens:
        its decode steps need masks of one shape.
    """
    if config._attn_implementation != "sdpa" or not getattr(config, "is_causal", True):
        return None
    past_length, query_length = cached_length(past_key_values), inputs_embeds.shape[1]
    if isinstance(past_length, torch.Tensor):
        return None
    if getattr(past_key_values, "is_compileable", False) and (query_length == 1 or past_length > 0):
        return None
    if attention_mask is None and position_ids is None:
        if torch.jit.is_tracing() or is_torchdynamo_exporting():
            # An exported program serves all lengths.
            return None
        # Compiled: only the first pass. Behind cached tokens every length would be cut differently.
        return past_length if past_length == 0 or not is_torchdynamo_compiling() else None
    if is_tracing(inputs_embeds):
        return None
    return position_of_first_query(attention_mask, position_ids, query_length, past_length)


def equal_rows_of_type(
    chunk_size: int | None, query_length: int, past_key_values: Cache | None, first_position: int
) -> EqualRows | None:
    """Rows without padding for `sdpa`, whose causal attention aligns the first query with the first key.

    Args:
        chunk_size: tokens of a chunk; None for full layers.
        query_length: Q.
        past_key_values: the cache.
        first_position: position of the first new token, the same in all rows.

    Returns:
        None where plain causal attention is right.
    """
    layer_idx = first_layer(past_key_values, is_sliding=chunk_size is not None)
    query_offset, key_length, key_offset = extent(query_length, None, past_key_values, layer_idx)
    assert isinstance(query_offset, int | torch.SymInt)
    key_offset += first_position - query_offset
    rows = cut_equal_rows(first_position, query_length, key_offset, key_length, chunk_size)
    return None if rows.is_plain(query_length) and (rows.begun == 0 or query_length == 1) else rows


def folded(
    chunk_size: int | None,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> Fold | EqualRows | None:
    """Folded sequences, for rows that sizes alone do not describe; arguments as in `sequences_of_type`.

    Returns:
        None where plain causal attention is right.
    """
    batch_size, query_length = inputs_embeds.shape[:2]
    sequences = sequences_of_type(
        chunk_size, inputs_embeds, attention_mask, past_key_values, position_ids, segments
    )
    layer_idx = first_layer(past_key_values, is_sliding=chunk_size is not None)
    past_key_values = None if segments is not None else past_key_values
    _, key_length, _ = extent(query_length, attention_mask, past_key_values, layer_idx)
    if sequences is not None:
        return fold(sequences, batch_size * query_length, key_length)
    begun = key_length - query_length
    return EqualRows(None, query_length, begun, 0, key_length) if begun else None
