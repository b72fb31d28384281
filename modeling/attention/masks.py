"""Positions and attention masks of a decoder, all of them derived from `position_ids`.

Left-padded, packed and single runs of the same tokens must give the same logits. transformers' own helpers fail
this in two ways: they count chunk borders along the cache's index, and they miss packing when an (empty) cache is
passed or, in older releases, inside chunked layers. Hence the chunked mask is built here, on transformers' mask
interface, and the full one by transformers, which is told of packing. Flash attention takes no masks, and `sdpa` no
large ones: both take variable-length sequences instead (see `forms`).

Shapes: B batch, Q query tokens, K key tokens (cached and new), T tokens, S sequences.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.utils import is_torchdynamo_compiling
from transformers.utils.generic import is_flash_attention_requested

from ..kernels import is_tracing
from .cache import FixedLength, cached_length, extent, first_layer, keys_in_ring, make_rings
from .forms import equal_rows_of_type, first_position_of_equal_rows, flash_sequences, folded
from .mask_inputs import (
    check_not_packed,
    check_window,
    is_real,
    left_padding,
    packed_segments,
    positions_along,
    positions_fall,
    starts_late,
)

__all__ = [
    "attention_masks",
    "cached_length",
    "mask_of_new_tokens",
    "positions_from_lengths",
    "positions_from_padding",
]

# Elements per row of the largest mask that full layers take under `sdpa`; above it, tokens are gathered into sequences.
# Gathering is faster from some 300 tokens on, but waits for lengths on a GPU, which small passes do not repay.
LARGEST_FULL_MASK = 2**18


def positions_from_padding(
    attention_mask: Any, query_length: int, past_length: int | torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Number the new tokens of each row from its first real token.

    Args:
        attention_mask: `[B, K]` with zeros on padding, or anything else (None, a prepared mask): then rows start at
            index 0.
        query_length: Q.
        past_length: tokens already in the cache.
        device: where the positions are wanted.

    Returns:
        `[B or 1, Q]` int64. Left padding gets position 0; right padding continues the count.
    """
    positions = (torch.arange(query_length, device=device) + past_length)[None]
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        positions = (positions - left_padding(attention_mask)[:, None].to(device)).clamp(min=0)
    return positions


def positions_from_lengths(cu_seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Number the tokens of packed sequences, each from zero.

    Args:
        cu_seq_lens: `[S + 1]` integers: where each sequence begins, then the number of all tokens.
        num_tokens: T.

    Returns:
        `[1, T]` int64.
    """
    index = torch.arange(num_tokens, device=cu_seq_lens.device)
    sequence = torch.searchsorted(cu_seq_lens, index.to(cu_seq_lens.dtype), right=True) - 1
    return (index - cu_seq_lens[sequence])[None]


def mask_of_new_tokens(attention_mask: object, num_tokens: int) -> torch.Tensor | None:
    """`[B, T]` with zeros on padding for the last T tokens; None where `attention_mask` is not 2-D."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        return attention_mask[:, -num_tokens:]
    return None


def attention_masks(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    has_lengths: bool = False,
) -> dict[str, Any]:
    """Build the mask of every attention type that the model has.

    Args:
        config: a decoder's config, with `_attn_implementation` set.
        inputs_embeds: `[B, Q, ...]`; only sizes, dtype and device are read.
        attention_mask: None, `[B, K]` with zeros on padding, a ready 4-D mask, or a dict that an earlier call made
            (`generate` prepares it for compiled decoding).
        past_key_values: the cache, before this pass is written to it.
        position_ids: `[B or 1, Q]` as the caller gave them; None where they follow from the padding. Rows in which
            they restart are packed if there is neither a padding mask nor a cached token.
        has_lengths: whether the attention implementation also gets the lengths of packed sequences (`cu_seq_lens_q`);
            then full layers need nothing else under flash attention.

    Returns:
        for each attention type, a mask or one of the `forms`, as the attention implementation takes it; None is plain
        causal attention.

    Raises:
        ValueError: a 4-D mask for flash attention.
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    types = getattr(config, "layer_types", None) or ["full_attention"]
    is_chunked = "chunked_attention" in types
    if is_chunked:
        make_rings(past_key_values)
    if is_flash_attention_requested(config):
        return flash_sequences(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, has_lengths
        )
    check_not_packed(attention_mask, past_key_values, position_ids)
    query_length = inputs_embeds.shape[1]
    first_position = segments = None
    # Full layers need no mask, or a short one, for a single query.
    if is_chunked or query_length > 1:
        first_position = first_position_of_equal_rows(
            config, inputs_embeds, attention_mask, past_key_values, position_ids
        )
    if first_position is None:
        segments = packed_segments(attention_mask, past_key_values, position_ids)
    masks = {}
    if "full_attention" in types and (first_position is None or is_torchdynamo_compiling()):
        masks["full_attention"] = _full_mask(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, segments
        )
    elif "full_attention" in types:
        masks["full_attention"] = equal_rows_of_type(None, query_length, past_key_values, first_position)
    if is_chunked and first_position is None:
        masks["chunked_attention"] = _chunked_mask(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, segments
        )
    elif is_chunked:
        masks["chunked_attention"] = equal_rows_of_type(
            config.attention_chunk_size, query_length, past_key_values, first_position
        )
    return masks


def _full_mask(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> Any:
    layer_idx = None if past_key_values is None else first_layer(past_key_values, is_sliding=False)
    query_length = inputs_embeds.shape[1]
    if (
        config._attn_implementation == "sdpa"
        and getattr(config, "is_causal", True)
        and query_length > 1
        and not is_tracing(inputs_embeds)
        and (attention_mask is None or attention_mask.ndim == 2)
    ):
        past = None if segments is not None else past_key_values
        _, key_length, _ = extent(query_length, attention_mask, past, layer_idx or 0)
        if query_length * key_length > LARGEST_FULL_MASK:
            return folded(None, inputs_embeds, attention_mask, past_key_values, position_ids, segments)
    return create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        past_key_values=FixedLength.of(past_key_values, config) if segments is None else None,
        position_ids=position_ids,
        layer_idx=layer_idx,
    )


def _chunked_mask(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> Any:
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4:
        return attention_mask
    implementation = config._attn_implementation
    # The underlying mapping: dynamo cannot trace `in` on the interface object.
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping:
        # vLLM and others build masks of their own.
        return None

    batch_size, query_length = inputs_embeds.shape[:2]
    device = inputs_embeds.device
    chunk_size = config.attention_chunk_size
    is_sdpa = implementation == "sdpa"
    padding_mask = attention_mask.to(device=device, dtype=torch.bool) if attention_mask is not None else None
    layer_idx = first_layer(past_key_values, is_sliding=True)
    past = None if segments is not None else past_key_values
    query_offset, key_length, key_offset = extent(query_length, padding_mask, past, layer_idx)
    if (
        is_sdpa
        and query_length > 1
        and not is_tracing(inputs_embeds)
        and query_length * key_length > chunk_size**2
    ):
        # A chunk that continues after another began is not a contiguous sequence.
        if segments is not None or not positions_fall(padding_mask, position_ids, query_offset):
            return folded(chunk_size, inputs_embeds, attention_mask, past_key_values, position_ids, segments)

    ring_index = keys_in_ring(past, layer_idx, query_length, device)
    can_be_plain_causal = not (getattr(past, "is_compileable", False) and query_length == 1)
    if segments is not None:
        assert position_ids is not None
        mask_function = _packed_chunks(
            chunk_size, position_ids.expand(batch_size, -1), segments.expand(batch_size, -1)
        )
        can_be_plain_causal = False
    else:
        position_at = positions_along(
            padding_mask, position_ids, query_offset, query_length, batch_size, device, chunk_size
        )
        mask_function = _causal_chunks(chunk_size, position_at)
        if padding_mask is not None and past is not None:
            first_kept = key_offset if ring_index is None else ring_index
            check_window(position_at, padding_mask, first_kept, query_offset, chunk_size)
        if ring_index is not None:
            mask_function = _in_ring(mask_function, ring_index)
            padding_mask = is_real(ring_index, padding_mask, batch_size)
            can_be_plain_causal &= key_length == query_length
        if is_sdpa and not is_torchdynamo_compiling():
            # `first_position_of_equal_rows` has already excluded this case.
            can_be_plain_causal = False
        if position_ids is not None and can_be_plain_causal:
            # Rows that start after position 0 reach their first chunk border early.
            can_be_plain_causal &= not is_torchdynamo_compiling() and not starts_late(
                position_at, query_offset, batch_size, device
            )
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
        batch_size=batch_size,
        q_length=query_length,
        kv_length=key_length,
        q_offset=query_offset,
        kv_offset=key_offset,
        mask_function=mask_function,
        attention_mask=padding_mask,
        allow_is_causal_skip=can_be_plain_causal,
        local_size=chunk_size,
        dtype=inputs_embeds.dtype,
        config=config,
        use_vmap=False,
        device=device,
    )


def _causal_chunks(chunk_size: int, position_at: Callable) -> Callable:
    def visible(batch_idx, head_idx, q_idx, kv_idx):
        same_chunk = (
            position_at(batch_idx, q_idx) // chunk_size == position_at(batch_idx, kv_idx) // chunk_size
        )
        return same_chunk & (kv_idx <= q_idx)

    return visible


def _in_ring(visible: Callable, ring_index: torch.Tensor) -> Callable:
    def visible_in_ring(batch_idx, head_idx, q_idx, kv_idx):
        return visible(batch_idx, head_idx, q_idx, ring_index[kv_idx])

    return visible_in_ring


def _packed_chunks(chunk_size: int, position_ids: torch.Tensor, segments: torch.Tensor) -> Callable:
    chunk_ids = position_ids // chunk_size

    def visible(batch_idx, head_idx, q_idx, kv_idx):
        same_segment = segments[batch_idx, q_idx] == segments[batch_idx, kv_idx]
        same_chunk = chunk_ids[batch_idx, q_idx] == chunk_ids[batch_idx, kv_idx]
        return same_segment & same_chunk & (kv_idx <= q_idx)

    return visible
