"""Positions and attention masks of a decoder, all of them derived from `position_ids`.

Left-padded, packed and single runs of the same tokens must give the same logits. Two things stand in the way
in transformers' own helpers: chunk borders are counted along the cache's index, and packing is not seen when
an (empty) cache is passed or, in older releases, inside chunked layers. Hence the chunked mask is built here,
on transformers' mask interface, and the full one by transformers with the packed case pointed out to it. Flash
attention takes no masks: for it the same facts become `sequences`, in all layers.

Shapes: B batch, Q query tokens, K key tokens (cached and new).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    find_packed_sequence_indices,
)
from transformers.utils import is_torchdynamo_compiling, is_tracing
from transformers.utils.generic import is_flash_attention_requested

from .ring_cache import RingLayer, make_rings
from .sequences import Sequences, sequences_of_equal_rows, sequences_of_groups


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


def positions_from_lengths(cu_seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Number the tokens of packed sequences, each from zero.

    Args:
        cu_seq_lens: `[S + 1]` integers: where each sequence begins, and the number of all tokens.
        num_tokens: T.

    Returns:
        `[1, T]` int64.
    """
    index = torch.arange(num_tokens, device=cu_seq_lens.device)
    sequence = torch.searchsorted(cu_seq_lens, index.to(cu_seq_lens.dtype), right=True) - 1
    return (index - cu_seq_lens[sequence])[None]


def _left_padding(attention_mask: torch.Tensor) -> torch.Tensor:
    return (attention_mask.cumsum(-1) == 0).sum(-1)


def mask_of_new_tokens(attention_mask: object, num_tokens: int) -> torch.Tensor | None:
    """Give `[B, T]` with zeros on padding for the last T tokens; None where nothing tells."""
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
        attention_mask: None, `[B, K]` with zeros on padding, a ready 4-D mask, or a dict that an earlier call
            made (`generate` prepares it for compiled decoding).
        past_key_values: the cache, before this pass is written to it.
        position_ids: `[B or 1, Q]` as the caller gave them, None where they follow from the padding. Rows in
            which they restart are packed rows if there is neither padding mask nor cached token.
        has_lengths: the attention implementation is told the lengths of packed sequences (`cu_seq_lens_q`) besides;
            under flash attention full layers then need nothing else.

    Returns:
        attention type to mask, in the form that the attention implementation wants (None: plain causal).

    Raises:
        ValueError: a 4-D mask for flash attention.
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    make_rings(past_key_values)
    if is_flash_attention_requested(config):
        return _flash_sequences(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, has_lengths
        )
    _check_not_packed(attention_mask, past_key_values, position_ids)
    segments = _packed_segments(attention_mask, past_key_values, position_ids)
    masks = {
        "full_attention": create_causal_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=_FixedLength.of(past_key_values, config) if segments is None else None,
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


def _check_not_packed(
    attention_mask: Any, past_key_values: Cache | None, position_ids: torch.Tensor | None
) -> None:
    """Refuse packed rows for a cache of fixed length, which cannot tell its segments apart; on the CPU only.

    Raises:
        ValueError: positions that restart.
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
    layer_idx = first_layer(past_key_values, is_sliding=True)
    if segments is not None:
        past_key_values = None
    query_offset, key_length, key_offset = _extent(query_length, padding_mask, past_key_values, layer_idx)
    ring_index = _ring_index(past_key_values, layer_idx, query_length, device)

    chunk_size = config.attention_chunk_size
    can_be_plain_causal = not (getattr(past_key_values, "is_compileable", False) and query_length == 1)
    if segments is not None:
        assert position_ids is not None
        mask_function = _packed_chunks(
            chunk_size, position_ids.expand(batch_size, -1), segments.expand(batch_size, -1)
        )
        can_be_plain_causal = False
    else:
        position_at = _positions_along(
            padding_mask, position_ids, query_offset, query_length, batch_size, device
        )
        mask_function = _causal_chunks(chunk_size, position_at)
        if padding_mask is not None and past_key_values is not None:
            first_kept = key_offset if ring_index is None else ring_index
            _check_window(position_at, padding_mask, first_kept, query_offset, chunk_size)
        if ring_index is not None:
            mask_function = _in_ring(mask_function, ring_index)
            padding_mask = _is_real(ring_index, padding_mask, batch_size)
            can_be_plain_causal &= key_length == query_length
        if position_ids is not None and can_be_plain_causal:
            # Rows that start past position 0 reach their first chunk border early.
            can_be_plain_causal &= not is_torchdynamo_compiling() and not _starts_late(
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


def first_layer(past_key_values: Cache | None, is_sliding: bool | None = None) -> int:
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


class _FixedLength:
    """A static cache's sizes, as transformers asks for them, that do not change while the layers write to it.

    The cache counts its tokens in place, and flex attention reads the count when a layer runs: by then the layer has
    written its keys, and every query would stand too late.
    """

    is_compileable = True

    def __init__(self, past_key_values: Cache):
        self._past_key_values = past_key_values
        self._layer_idx = first_layer(past_key_values, is_sliding=False)

    @classmethod
    def of(cls, past_key_values: Cache | None, config: PreTrainedConfig) -> Any:
        is_static = getattr(past_key_values, "is_compileable", False)
        return (
            cls(past_key_values) if is_static and "flex" in config._attn_implementation else past_key_values
        )

    def get_query_offset(self, _: int) -> int | torch.Tensor:
        return _extent(1, None, self._past_key_values, self._layer_idx)[0]

    def get_mask_sizes(self, query_length: int, _: int) -> tuple[int, int]:
        return self._past_key_values.get_mask_sizes(query_length, self._layer_idx)


def _extent(
    query_length: int, padding_mask: torch.Tensor | None, past_key_values: Cache | None, layer_idx: int
) -> tuple[int | torch.Tensor, int, int]:
    """Give the index of the first query, the number of keys, and the index of the first of them."""
    if past_key_values is not None:
        query_offset = past_key_values.get_query_offset(layer_idx)
        if isinstance(query_offset, torch.Tensor):
            query_offset = query_offset.clone()  # counted in place, and flex attention reads it later
        return query_offset, *past_key_values.get_mask_sizes(query_length, layer_idx)
    return 0, query_length if padding_mask is None else padding_mask.shape[-1], 0


def _ring_index(
    past_key_values: Cache | None, layer_idx: int, query_length: int, device: torch.device
) -> torch.Tensor | None:
    """Give `[K]`, the index of each key, where they do not stand in their order."""
    layers = getattr(past_key_values, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    return layer.key_index(query_length, device) if isinstance(layer, RingLayer) else None


def _flash_sequences(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    has_lengths: bool,
) -> dict[str, Sequences | None]:
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
    segments = _packed_segments(attention_mask, past_key_values, position_ids) if types else None
    for attention_type in types:
        chunk_size = config.attention_chunk_size if attention_type == "chunked_attention" else None
        sequences[attention_type] = _sequences_of_type(
            chunk_size, inputs_embeds, attention_mask, past_key_values, position_ids, segments
        )
    return sequences


def _sequences_of_type(
    chunk_size: int | None,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> Sequences | None:
    batch_size, query_length = inputs_embeds.shape[:2]
    device = inputs_embeds.device
    padding_mask = attention_mask.to(device=device, dtype=torch.bool) if attention_mask is not None else None
    layer_idx = first_layer(past_key_values, is_sliding=chunk_size is not None)
    if segments is not None:
        past_key_values = None
    query_offset, key_length, key_offset = _extent(query_length, padding_mask, past_key_values, layer_idx)
    positions_matter = segments is not None or (position_ids is not None and chunk_size is not None)
    if padding_mask is None and not positions_matter and not isinstance(query_offset, torch.Tensor):
        return sequences_of_equal_rows(
            batch_size, query_offset, query_length, key_offset, key_length, chunk_size, device
        )

    query_index = torch.arange(query_length, device=device) + query_offset
    key_index = _ring_index(past_key_values, layer_idx, query_length, device)
    if key_index is None:
        key_index = torch.arange(key_length, device=device) + key_offset
    real_queries = _is_real(query_index, padding_mask, batch_size)
    real_keys = _is_real(key_index, padding_mask, batch_size) & (key_index <= query_index[-1])
    if segments is not None:
        assert position_ids is not None
        groups = segments
        if chunk_size is not None:
            begins = (segments.diff(dim=1) != 0) | ((position_ids // chunk_size).diff(dim=1) != 0)
            groups = nn.functional.pad(begins.cumsum(1), (1, 0))
        query_groups = key_groups = groups.expand(batch_size, -1)
    elif chunk_size is not None:
        position_at = _positions_along(
            padding_mask, position_ids, query_offset, query_length, batch_size, device
        )
        if padding_mask is not None and past_key_values is not None:
            _check_window(position_at, padding_mask, key_index, query_offset, chunk_size)
        rows = torch.arange(batch_size, device=device)[:, None]
        # Padding counts as the first chunk: its own places are negative.
        query_groups = position_at(rows, query_index).clamp(min=0) // chunk_size
        key_groups = position_at(rows, key_index).clamp(min=0) // chunk_size
    else:
        query_groups, key_groups = torch.zeros_like(real_queries.long()), torch.zeros_like(real_keys.long())
    return sequences_of_groups(real_queries, real_keys, query_groups, key_groups)


def _is_real(index: torch.Tensor, padding_mask: torch.Tensor | None, batch_size: int) -> torch.Tensor:
    """Give `[B, T]` bool for indices `[T]` along the rows; behind the mask and below zero nothing is written."""
    if padding_mask is None:
        return (index >= 0).expand(batch_size, -1)
    width = padding_mask.shape[1]
    return padding_mask[:, index.clamp(0, width - 1)] & (index >= 0) & (index < width)


def _positions_along(
    padding_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    query_offset: int | torch.Tensor,
    query_length: int,
    batch_size: int,
    device: torch.device,
) -> Callable[[Any, Any], torch.Tensor]:
    """Give a function from row and index along the keys, tensors that broadcast, to the token's position.

    Of cached tokens no positions are known, only which are padding: they are counted back from the first new token.
    """
    if position_ids is None:
        offset_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        return _shifted(offset_B if padding_mask is None else -_left_padding(padding_mask))
    positions_BQ = position_ids.expand(batch_size, -1).to(device)
    if padding_mask is None:
        cached_position_at = _shifted(positions_BQ[:, 0] - query_offset)
    else:
        # Real tokens are counted, not indices: behind a cached prefix a row's padding is a hole in its middle.
        query_index = torch.arange(query_length, device=device) + query_offset
        column_B1 = _is_real(query_index, padding_mask, batch_size).int().argmax(1, keepdim=True)
        index_B1 = (column_B1 + query_offset).clamp(max=padding_mask.shape[1] - 1)
        counts_BK = padding_mask.cumsum(-1)
        cached_position_at = _looked_up(
            counts_BK - counts_BK.gather(1, index_B1) + positions_BQ.gather(1, column_B1)
        )
    new_position_at = _looked_up(positions_BQ)

    def position_at(row, index):
        is_cached = index < query_offset
        return torch.where(
            is_cached, cached_position_at(row, index), new_position_at(row, index - query_offset)
        )

    return position_at


def _shifted(offset_B: torch.Tensor) -> Callable[[Any, Any], torch.Tensor]:
    return lambda row, index: index + offset_B[row]


def _looked_up(positions_BT: torch.Tensor) -> Callable[[Any, Any], torch.Tensor]:
    return lambda row, index: positions_BT[row, index.clamp(0, positions_BT.shape[1] - 1)]


def _check_window(
    position_at: Callable,
    padding_mask: torch.Tensor,
    key_index: int | torch.Tensor,
    query_offset: int | torch.Tensor,
    chunk_size: int,
) -> None:
    """Refuse a window, counted in indices, from which padding in the middle of a row has pushed a chunk's tokens.

    On the CPU only: elsewhere one would have to wait for the values.

    Raises:
        ValueError: a token that is in no window any more belongs to the chunk of the first new one.
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


def _starts_late(
    position_at: Callable, query_offset: int | torch.Tensor, batch_size: int, device: torch.device
) -> bool:
    rows = torch.arange(batch_size, device=device)
    index = torch.zeros_like(rows) + query_offset
    return bool((position_at(rows, index) > index).any())


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
