"""Sequences under torch's `scaled_dot_product_attention`: the chunks of a row become rows of a batch.

That function takes a mask, or computes plain causal attention over rows of one length. Sequences without cached keys
form a batch, the shorter ones padded behind their end, where no query looks. A sequence with cached keys, at most one a
row, is causal with the last query at the last key, which torch's GPU kernels take by name. Elsewhere it takes a mask,
for one block of queries at a time. So memory grows with the tokens, not with their square.

`EqualRows` (no padding, known from sizes) are cut into the rest of the first chunk, the full chunks and the tail.
All other rows are gathered into a `Fold` from the `Sequences` that flash attention takes too.

Shapes: B batch, H heads, Q query tokens, K key tokens (cached and new), T tokens, D head_dim, C tokens of a chunk,
N tokens of the batch, S sequences of q queries and k keys (t either of them), n chunks of a row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from transformers.utils import is_torchdynamo_compiling

from .by_sdpa import lower_right
from .mask_inputs import MaskInputs
from .varlen import Sequences, sequences
from .visibility import EqualRows, Rule

# Queries of one mask. Larger masks are no faster: a block of this size keeps every core of a GPU busy.
BLOCK = 1024
# Sequences up to this length are padded to one length; longer ones to less than twice their own.
SHORT = 16


def window_block(window: int) -> int:
    """Return the number of queries that are attended to at once where each sees so many tokens."""
    return min(BLOCK, max(window, SHORT))


class Batch(NamedTuple):
    """Sequences of similar length, side by side.

    Attributes:
        query_index: `[S, q]` int64 into `B * Q`, padded with each sequence's last query.
        key_index: `[S, k]` likewise, into `B * K`.
        begun: `[S, 1, 1, 1]` int64, keys before the first query; 0: no sequence has any.
    """

    query_index: torch.Tensor
    key_index: torch.Tensor
    begun: torch.Tensor | int


class Fold(NamedTuple):
    """Which tokens form sequences, gathered into batches.

    Attributes:
        batches: sequences by length.
        place: `[B * Q]` int64, each query's place among the batches' queries laid end to end; queries that are in no
            sequence get the place behind them all.
        is_partial: whether such queries exist.
        key_length: K.
        window: how many tokens of its sequence a token sees; None: all before it.
    """

    batches: tuple[Batch, ...]
    place: torch.Tensor
    is_partial: bool
    key_length: int
    window: int | None = None

    def contiguous(self) -> "Fold":
        """Return self; `generate` calls this on every mask."""
        return self


def folded_batch(inputs: MaskInputs, rule: Rule) -> Fold | EqualRows | None:
    """Gather the sequences of a pass into batches; None where plain causal attention is right."""
    made, key_length = sequences(inputs, rule), inputs.keys(rule).length
    if made is not None:
        folded = fold(made, inputs.batch_size * inputs.query_length, key_length)
        return folded._replace(window=rule.window)
    begun = key_length - inputs.query_length
    rows = EqualRows(None, rule.window, inputs.query_length, begun, 0, key_length)
    return None if begun == 0 and rows.is_plain(inputs.query_length) else rows


def fold(sequences: Sequences, num_queries: int, key_length: int) -> Fold:
    """Gather all sequences of a pass, of `B * Q` queries, into batches; reads their lengths."""
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

    batches = []
    for size, numbers in by_size.items():
        chosen = torch.tensor(numbers, device=device)
        begun = 0 if size else (lengths_S2[:, 1] - lengths_S2[:, 0])[chosen, None, None, None]
        batches.append(Batch(side_by_side(0, numbers, chosen), side_by_side(1, numbers, chosen), begun))
    laid = torch.cat([batch.query_index.flatten() for batch in batches])
    # Padding repeats a sequence's last query; the query itself is the first of these places.
    place = torch.full((num_queries,), len(laid), device=device)
    place.scatter_reduce_(0, laid, torch.arange(len(laid), device=device), "amin")
    return Fold(tuple(batches), place, is_partial=sequences.query_index is not None, key_length=key_length)


def attend_in_fold(
    attend: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, folded: Fold
) -> torch.Tensor:
    """Run SDPA over sequences of any lengths; queries that take no part get zero."""
    _check_keys(key, folded.key_length)
    batch_size, num_heads, query_length, _ = query.shape
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    outputs = []
    for batch in folded.batches:
        index_of = ((query, batch.query_index), (key, batch.key_index), (value, batch.key_index))
        states = (_gather(states, index) for states, index in index_of)
        output = _attend_causally(attend, *states, begun=batch.begun, window=folded.window)
        outputs.append(output.flatten(0, 1))  # [S * q, H, D]
    if folded.is_partial:
        outputs.append(outputs[0].new_zeros(1, *outputs[0].shape[1:]))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.index_select(0, folded.place).view(batch_size, query_length, num_heads, -1)


def _gather(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    # [N, H, D] to [S, H, t, D]
    return states.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def _check_keys(key: torch.Tensor, key_length: int) -> None:
    """Raise a ValueError if the cache returned another number of keys than it had announced."""
    if key.shape[2] != key_length:
        raise ValueError(
            f"A layer was given {key.shape[2]} keys where {key_length}, cached and new, were expected: the layers "
            "of past_key_values hold differing numbers of tokens, or give other keys than get_mask_sizes announces. "
            "Use a cache that all layers write to alike, such as DynamicCache()."
        )


def attend_in_equal_rows(
    attend: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: EqualRows
) -> torch.Tensor:
    """Run SDPA over the chunks of rows without padding."""
    _check_keys(key, rows.key_length)
    length, chunk_size = query.shape[2], rows.chunk_size
    is_aligned = rows.begun == 0 and rows.rest == chunk_size
    if is_aligned and is_torchdynamo_compiling():
        # One call, with the last chunk filled up, so that one graph serves every length.
        filling = (length + chunk_size - 1) // chunk_size * chunk_size - length
        filled = (nn.functional.pad(states, (0, 0, 0, filling)) for states in (query, key, value))
        return _attend_in_chunks(attend, *filled, chunk_size)[:, :length]
    end_of_keys = rows.first_key + rows.begun + length
    key, value = key[:, :, rows.first_key : end_of_keys], value[:, :, rows.first_key : end_of_keys]

    def part(begin: int, end: int, begun: int = 0) -> list[torch.Tensor]:
        keys = slice(rows.begun + begin - begun, rows.begun + end)
        return [query[:, :, begin:end], key[:, :, keys], value[:, :, keys]]

    outputs, done = [], 0
    if not is_aligned:
        done = min(rows.rest, length)
        first = part(0, done, rows.begun)
        outputs.append(_attend_causally(attend, *first, begun=rows.begun, window=rows.window))
    if chunk_size is not None and length - done >= chunk_size:
        tail = done + (length - done) // chunk_size * chunk_size
        outputs.append(_attend_in_chunks(attend, *part(done, tail), chunk_size))
        done = tail
    if done < length:
        outputs.append(_attend_causally(attend, *part(done, length)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _attend_in_chunks(
    attend: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk_size: int
) -> torch.Tensor:
    batch_size, num_chunks = query.shape[0], query.shape[2] // chunk_size
    query, key, value = (
        states.unflatten(2, (num_chunks, chunk_size)).transpose(1, 2).flatten(0, 1)
        for states in (query, key, value)
    )  # [B * n, H, C, D]
    return _attend_causally(attend, query, key, value).unflatten(0, (batch_size, num_chunks)).flatten(1, 2)


def _attend_causally(
    attend: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begun: int | torch.Tensor = 0,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention `[B, Q, H, D]` where `begun` keys of each row stand before its first query.

    Queries that are padding see at least one key, so that nothing becomes NaN. With a window each block of queries gets
    the keys that one of them sees, and their cost is that of the window, not of the row.
    """
    query_length, key_length = query.shape[2], key.shape[2]
    is_number = not isinstance(begun, torch.Tensor)
    sees_all = window is None or key_length <= window
    if is_number and sees_all and (begun == 0 or query_length == 1):
        return attend(query, key, value, None)[0]
    if is_number and sees_all and (bias := lower_right(attend, query, key)) is not None:
        return attend(query, key, value, bias)[0]
    outputs, place = [], torch.arange(key_length, device=query.device)
    block = BLOCK if window is None else window_block(window)
    for begin in range(0, query_length, block):
        end = min(begin + block, query_length)
        seen = slice(0, key_length)
        if is_number:
            seen = slice(0 if sees_all else max(0, begun + begin - window + 1), begun + end)
        last = place[None, None, begin:end, None] + begun
        mask = place[seen] <= last
        if not sees_all:
            mask = mask & (place[seen] > last - window)
        outputs.append(attend(query[:, :, begin:end], key[:, :, seen], value[:, :, seen], mask)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
