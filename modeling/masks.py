"""Positions and attention masks of a decoder, all of them derived from `position_ids`.

Left-padded, packed and single runs of the same tokens must give the same logits. Two things stand in the way
in transformers' own helpers: chunk borders are counted along the cache's index, and packing is not seen when
an (empty) cache is passed or, in older releases, inside chunked layers. Hence the chunked mask is built here,
on transformers' mask interface, and the full one by transformers with the packed case pointed out to it.

Shapes: B batch, Q query tokens, K key tokens (cached and new).
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    find_packed_sequence_indices,
)
from transformers.utils import is_torchdynamo_compiling


def positions_from_padding(
    attention_mask: Any, query_length: int, past_length: int | torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Number the new tokens of each row from its first real token.

    Args:
        attention_mask: `[B, K]` with zeros on padding, or anything else (None, a prepared mask): then the rows
            are taken to start at index 0.
        query_length: Q.
        past_length: tokens already in the cache.
        device: where the positions are wanted.

    Returns:
        `[B or 1, Q]` int64. Left padding gets position 0, right padding goes on counting.
    """
    positions = (torch.arange(query_length, device=device) + past_length)[None]
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        positions = (positions - _left_padding(attention_mask)[:, None].to(device)).clamp(min=0)
    return positions


def _left_padding(attention_mask: torch.Tensor) -> torch.Tensor:
    return (attention_mask.cumsum(-1) == 0).sum(-1)


def attention_masks(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: Any,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
) -> dict[str, Any]:
    """Build the mask of every attention type that the model has.

    Args:
        config: a decoder's config, with `_attn_implementation` set.
        inputs_embeds: `[B, Q, ...]`; only sizes, dtype and device are read.
        attention_mask: None, `[B, K]` with zeros on padding, a ready 4-D mask, or a dict that an earlier call
            made (`generate` prepares it for compiled decoding).
        past_key_values: the cache, before this pass is written to it.
        position_ids: `[B or 1, Q]` as the caller gave them, None where they follow from the padding. Rows in
            which they restart are packed rows if there is neither padding mask nor cached token.

    Returns:
        attention type to mask, in the form that the attention implementation wants (None: plain causal).
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    segments = _packed_segments(attention_mask, past_key_values, position_ids)
    masks = {
        "full_attention": create_causal_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values if segments is None else None,
            position_ids=position_ids,
            layer_idx=None if past_key_values is None else first_layer(past_key_values, is_sliding=False),
        )
    }
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        masks["chunked_attention"] = _chunked_mask(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, segments
        )
    return masks


def _packed_segments(
    attention_mask: Any, past_key_values: Cache | None, position_ids: torch.Tensor | None
) -> torch.Tensor | None:
    if attention_mask is not None or position_ids is None:
        return None
    if past_key_values is not None and (
        getattr(past_key_values, "is_compileable", False) or cached_length(past_key_values) > 0
    ):
        return None
    return find_packed_sequence_indices(position_ids)


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
    # The underlying mapping: dynamo cannot trace the interface object's own `in`.
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping:
        return None  # vLLM and others bring masks of their own

    batch_size, query_length = inputs_embeds.shape[:2]
    device = inputs_embeds.device
    padding_mask = attention_mask.to(device=device, dtype=torch.bool) if attention_mask is not None else None
    query_offset, key_length, key_offset = 0, query_length, 0
    if past_key_values is not None and segments is None:
        layer_idx = first_layer(past_key_values, is_sliding=True)
        query_offset = past_key_values.get_query_offset(layer_idx)
        key_length, key_offset = past_key_values.get_mask_sizes(query_length, layer_idx)
    elif padding_mask is not None:
        key_length = padding_mask.shape[-1]

    chunk_size = config.attention_chunk_size
    can_be_plain_causal = not (getattr(past_key_values, "is_compileable", False) and query_length == 1)
    if segments is not None:
        assert position_ids is not None
        mask_function = _packed_chunks(
            chunk_size, position_ids.expand(batch_size, -1), segments.expand(batch_size, -1)
        )
        can_be_plain_causal = False
    else:
        offset_B = _position_offset(
            padding_mask, position_ids, query_offset, query_length, batch_size, device
        )
        mask_function = _causal_chunks(chunk_size, offset_B)
        if position_ids is not None:
            # Rows that start past position 0 reach their first chunk border early.
            can_be_plain_causal &= not is_torchdynamo_compiling() and not bool((offset_B > 0).any())
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


def first_layer(past_key_values: Cache, is_sliding: bool | None = None) -> int:
    """Give the index of the first layer of a cache that is written to in this process.

    Under pipeline parallelism the layers of the stages before stay empty here and say nothing of the length.

    Args:
        past_key_values: the cache.
        is_sliding: look only at layers that are (True) or are not (False) sliding.

    Returns:
        the index; where nothing is written yet, of the first such layer; 0 where there is none.
    """
    layers = list(enumerate(getattr(past_key_values, "layers", ())))
    if is_sliding is not None:
        layers = [(i, layer) for i, layer in layers if getattr(layer, "is_sliding", False) == is_sliding]
    written = [i for i, layer in layers if getattr(layer, "is_initialized", False)]
    return written[0] if written else layers[0][0] if layers else 0


def cached_length(past_key_values: Cache | None) -> int | torch.Tensor:
    """Give the number of tokens in a cache, 0 without one."""
    return 0 if past_key_values is None else past_key_values.get_seq_length(first_layer(past_key_values))


def _position_offset(
    padding_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    query_offset: int | torch.Tensor,
    query_length: int,
    batch_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Give `[B]`: what turns an index along the keys into a position (minus the left padding, as a rule)."""
    if padding_mask is None:
        first_index_B = torch.zeros(batch_size, dtype=torch.long, device=device) + query_offset
    else:
        left_padding_B = _left_padding(padding_mask)
        if position_ids is None:
            return -left_padding_B
        first_index_B = torch.maximum(left_padding_B, torch.zeros_like(left_padding_B) + query_offset)
    if position_ids is None:
        return torch.zeros_like(first_index_B)
    column_B = (first_index_B - query_offset).clamp(max=query_length - 1)
    positions = position_ids.expand(batch_size, -1).to(device)
    return positions.gather(1, column_B[:, None])[:, 0] - first_index_B


def _causal_chunks(chunk_size: int, offset_B: torch.Tensor) -> Callable:
    def visible(batch_idx, head_idx, q_idx, kv_idx):
        offset = offset_B[batch_idx]
        same_chunk = (q_idx + offset) // chunk_size == (kv_idx + offset) // chunk_size
        return same_chunk & (kv_idx <= q_idx)

    return visible


def _packed_chunks(chunk_size: int, position_ids: torch.Tensor, segments: torch.Tensor) -> Callable:
    chunk_ids = position_ids // chunk_size

    def visible(batch_idx, head_idx, q_idx, kv_idx):
        same_segment = segments[batch_idx, q_idx] == segments[batch_idx, kv_idx]
        same_chunk = chunk_ids[batch_idx, q_idx] == chunk_ids[batch_idx, kv_idx]
        return same_segment & same_chunk & (kv_idx <= q_idx)

    return visible
