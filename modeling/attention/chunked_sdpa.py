"""Sequences under torch's `scaled_dot_product_attention`: the chunks of a row become rows of a batch.

That function takes a mask, or computes plain causal attention over rows of one length. A sequence whose keys are
those of its own queries needs no mask: such sequences form a batch, the shorter ones padded behind their end, where
no query looks. Only a sequence with cached keys, at most one a row, takes a mask, for one block of queries at a time.
So memory grows with the number of tokens, not with its square.

`EqualRows` (no padding, known from sizes) are cut into the rest of the first chunk, the full chunks and the tail.
All other rows are gathered into a `Fold` from the `Sequences` that flash attention takes too.

Shapes: B batch, H heads, Q query tokens, K key tokens (cached and new), T tokens, D head_dim, C tokens of a chunk,
N tokens of the batch, S sequences of q queries and k keys (t either of them), n chunks of a row.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers.utils import is_torchdynamo_compiling

from .varlen import EqualRows, Sequences

# Queries of one mask. Larger masks are no faster: a block of this size keeps every core of a GPU busy.
BLOCK = 1024
# Sequences up to this length are padded to one length; longer ones to less than twice their own.
SHORT = 16


class Batch(NamedTuple):
    """Sequences of similar length, side by side.

    Attributes:
        query_index: `[S, q]` int64 into `B * Q`, padded with each sequence's last query.
        key_index: `[S, k]` likewise, into `B * K`.
        begun: `[S, 1, 1, 1]` int64, keys before the first query; None: no sequence has any.
    """

    query_index: torch.Tensor
    key_index: torch.Tensor
    begun: torch.Tensor | None


class Fold(NamedTuple):
    """Which tokens form sequences, gathered into batches.

    Attributes:
        batches: sequences by length.
        place: `[B * Q]` int64, each query's place among the batches' queries laid end to end; queries that are in no
            sequence get the place behind them all.
        is_partial: whether such queries exist.
        key_length: K.
    """

    batches: tuple[Batch, ...]
    place: torch.Tensor
    is_partial: bool
    key_length: int

    def contiguous(self) -> "Fold":
        """Return self; `generate` calls this on every mask."""
        return self


def fold(sequences: Sequences, num_queries: int, key_length: int) -> Fold:
    """Gather sequences into batches; reading their lengths synchronises with the device.

    Args:
        sequences: all sequences of a pass.
        num_queries: B * Q.
        key_length: K.
    """
    device = sequences.cu_seq_lens_q.device
    lengths_S2 = torch.stack([sequences.cu_seq_lens_q.diff(), sequences.cu_seq_lens_k.diff()], 1).long()
    by_size: dict[int, list[int]] = {}
    on_host = lengths_S2.tolist()
    for number, (q, k) in enumerate(on_host):
        # Size 0: some of the sequence's keys are cached.
        size = 0 if q < k else max(q - 1, SHORT - 1).bit_length()
        by_size.setdefault(size, []).append(number)

    def side_by_side(side: int, numbers: list[int], chosen: torch.Tensor) -> torch.Tensor:
        begins = (sequences.cu_seq_lens_q, sequences.cu_seq_lens_k)[side][chosen].long()
        step = torch.arange(max(on_host[number][side] for number in numbers), device=device)
        places = begins[:, None] + step.minimum(lengths_S2[chosen, side, None] - 1)
        index = (sequences.query_index, sequences.key_index)[side]
        return places if index is None else index[places]  # [S, longest]

    place = torch.empty(num_queries, dtype=torch.long, device=device)
    batches, laid = [], 0
    for size, numbers in by_size.items():
        chosen = torch.tensor(numbers, device=device)
        batch = Batch(
            query_index=side_by_side(0, numbers, chosen),
            key_index=side_by_side(1, numbers, chosen),
            begun=None if size else (lengths_S2[:, 1] - lengths_S2[:, 0])[chosen, None, None, None],
        )
        batches.append(batch)
        laid += batch.query_index.numel()
    place.fill_(laid)
    for batch in reversed(batches):
        laid -= batch.query_index.numel()
        # Padding repeats a sequence's last query; the query itself is the first of these places.
        flat = batch.query_index.flatten()
        place.scatter_reduce_(0, flat, torch.arange(laid, laid + len(flat), device=device), "amin")
    return Fold(
        batches=tuple(batches),
        place=place,
        is_partial=sequences.query_index is not None,
        key_length=key_length,
    )


def attend_in_fold(
    attend: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    folded: Fold,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Run SDPA over sequences of any lengths.

    Args:
        attend: transformers' `sdpa`.
        module: the attention module.
        query: `[B, H, Q, D]`.
        key: `[B, H / groups, K, D]`.
        value: like `key`.
        folded: which tokens see each other.
        **kwargs: for the implementation.

    Returns:
        the output `[B, Q, H, D]`, zero where no query takes part, and None for the weights.

    Raises:
        ValueError: the cache returned another number of keys than it had announced.
    """
    _check_keys(key, folded.key_length)
    batch_size, num_heads, query_length, _ = query.shape
    attend = partial(attend, module, **{**kwargs, "position_ids": None})
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    outputs = []
    for batch in folded.batches:
        states = [
            _gather(states, index)
            for states, index in (
                (query, batch.query_index),
                (key, batch.key_index),
                (value, batch.key_index),
            )
        ]
        outputs.append(_attend_causally(attend, *states, begun=batch.begun).flatten(0, 1))  # [S * q, H, D]
    if folded.is_partial:
        outputs.append(outputs[0].new_zeros(1, *outputs[0].shape[1:]))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.index_select(0, folded.place).view(batch_size, query_length, num_heads, -1), None


def _check_keys(key: torch.Tensor, key_length: int) -> None:
    if key.shape[2] != key_length:
        raise ValueError(
            f"A layer was given {key.shape[2]} keys where {key_length}, cached and new, were expected. Either gradient "
            "checkpointing has left cached tokens out: turn it off, or train without past_key_values. Or the layers of "
            "past_key_values hold differing numbers of tokens, or give other keys than get_mask_sizes announces: use "
            "a cache that all layers write to alike, such as DynamicCache()."
        )


def _gather(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    # [N, H, D] to [S, H, t, D]
    return states.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def attend_in_equal_rows(
    attend: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: EqualRows,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Run SDPA over the chunks of rows without padding; arguments and result as in `attend_in_fold`."""
    _check_keys(key, rows.key_length)
    attend = partial(attend, module, **{**kwargs, "position_ids": None})
    length, chunk_size = query.shape[2], rows.chunk_size
    is_aligned = rows.begun == 0 and rows.rest == chunk_size
    if is_aligned and is_torchdynamo_compiling():
        return _attend_in_filled_chunks(attend, query, key, value, chunk_size), None
    end_of_keys = rows.first_key + rows.begun + length
    key, value = key[:, :, rows.first_key : end_of_keys], value[:, :, rows.first_key : end_of_keys]

    def part(begin: int, end: int, begun: int = 0) -> list[torch.Tensor]:
        keys = slice(rows.begun + begin - begun, rows.begun + end)
        return [query[:, :, begin:end], key[:, :, keys], value[:, :, keys]]

    outputs, full = [], 0
    if not is_aligned:
        full = min(rows.rest, length)
        outputs.append(_attend_causally(attend, *part(0, full, rows.begun), begun=rows.begun))
    if chunk_size is not None and (num_chunks := (length - full) // chunk_size):
        tail = full + num_chunks * chunk_size
        outputs.append(_attend_in_chunks(attend, *part(full, tail), num_chunks=num_chunks))
        full = tail
    if full < length:
        outputs.append(_attend_causally(attend, *part(full, length)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), None


def _attend_in_chunks(
    attend: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_chunks: int
) -> torch.Tensor:
    batch_size = query.shape[0]
    query, key, value = (
        states.unflatten(2, (num_chunks, states.shape[2] // num_chunks)).transpose(1, 2).flatten(0, 1)
        for states in (query, key, value)
    )  # [B * n, H, C, D]
    return _attend_causally(attend, query, key, value).unflatten(0, (batch_size, num_chunks)).flatten(1, 2)


def _attend_in_filled_chunks(
    attend: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk_size: int
) -> torch.Tensor:
    """Attend in one call, with the last chunk padded, so that one graph serves every length."""
    length = query.shape[2]
    num_chunks = (length + chunk_size - 1) // chunk_size
    filling = num_chunks * chunk_size - length
    query, key, value = (nn.functional.pad(states, (0, 0, 0, filling)) for states in (query, key, value))
    return _attend_in_chunks(attend, query, key, value, num_chunks)[:, :length]


def _attend_causally(
    attend: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begun: int | torch.Tensor | None = 0,
) -> torch.Tensor:
    """Causal attention `[B, Q, H, D]` where `begun` keys of each row stand before its first query.

    Queries that are padding see at least one key, so that nothing becomes NaN.
    """
    query_length, key_length = query.shape[2], key.shape[2]
    is_number = not isinstance(begun, torch.Tensor)
    if begun is None or (is_number and (begun == 0 or query_length == 1)):
        return attend(query, key, value, None)[0]
    outputs = []
    place = torch.arange(key_length, device=query.device)
    for begin in range(0, query_length, BLOCK):
        end = min(begin + BLOCK, query_length)
        seen = begun + end if is_number else key_length
        mask = place[:seen] <= place[begin:end, None] + begun
        mask = mask if mask.ndim == 4 else mask[None, None]
        outputs.append(attend(query[:, :, begin:end], key[:, :, :seen], value[:, :, :seen], mask)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
