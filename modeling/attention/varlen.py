"""Variable-length sequences for FlashAttention, which takes no mask.

A flash kernel computes plain causal attention over any number of sequences laid end to end. So tokens that must not
see each other go to different sequences: each row, each packed segment of a row and, in chunked layers, each chunk.
Padding is left out. The queries of a sequence are the last of its keys, with a cache too, and the kernel aligns the
last query with the last key: no other masking is needed.

`masks` builds the sequences once a forward pass; all layers share them.

Shapes: B batch, H heads, Q query tokens, K key tokens (cached and new), T either of them, D head_dim, S sequences,
N tokens of all sequences.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


class Sequences(NamedTuple):
    """Which tokens form sequences, in place of an attention mask.

    Attributes:
        query_index: int64, the queries that take part, as indices into `B * Q`, sequence by sequence; None: all, in
            order.
        key_index: likewise for the keys, into `B * K`.
        cu_seq_lens_q: `[S + 1]` int32, where each sequence's queries begin, then the number of queries.
        cu_seq_lens_k: likewise for the keys.
        max_length_q: upper bound of a sequence's number of queries.
        max_length_k: likewise for the keys.
    """

    query_index: torch.Tensor | None
    key_index: torch.Tensor | None
    cu_seq_lens_q: torch.Tensor
    cu_seq_lens_k: torch.Tensor
    max_length_q: int
    max_length_k: int

    def contiguous(self) -> "Sequences":
        """Return self; `generate` calls this on every mask."""
        return self


class EqualRows(NamedTuple):
    """Chunks of rows without padding, the same in every row: known from sizes alone.

    Attributes:
        chunk_size: C; None: no borders.
        rest: queries of a row before the first border; Q or more where there is no border.
        begun: keys of the first query's chunk that precede it.
        first_key: index, among the row's keys, of the first key that the first query sees.
        key_length: K.
    """

    chunk_size: int | None
    rest: int
    begun: int
    first_key: int
    key_length: int

    def contiguous(self) -> "EqualRows":
        """Return self; `generate` calls this on every mask."""
        return self

    def is_plain(self, query_length: int) -> bool:
        """Whether this is causal attention over all keys of the row, with the last query at the last key."""
        return query_length <= self.rest and self.begun + query_length == self.key_length


def cut_equal_rows(
    query_offset: int, query_length: int, key_offset: int, key_length: int, chunk_size: int | None
) -> EqualRows:
    """Cut rows without padding into chunks.

    Args:
        query_offset: position of the first query.
        query_length: Q.
        key_offset: position of the first key.
        key_length: K, or more: keys after the last query are ignored.
        chunk_size: tokens of a chunk; None: no chunks.
    """
    num_cached = query_offset - key_offset
    if chunk_size is None:
        return EqualRows(None, query_length, num_cached, 0, key_length)
    in_chunk = query_offset % chunk_size
    begun = min(in_chunk, num_cached)
    return EqualRows(chunk_size, chunk_size - in_chunk, begun, num_cached - begun, key_length)


def sequences_of_equal_rows(
    batch_size: int,
    query_offset: int,
    query_length: int,
    key_offset: int,
    key_length: int,
    chunk_size: int | None,
    device: torch.device,
) -> Sequences | None:
    """Make a sequence of each chunk of rows without padding, without synchronising with the device.

    Args:
        batch_size: B.
        query_offset: position of the first query.
        query_length: Q.
        key_offset: position of the first key.
        key_length: K.
        chunk_size: tokens of a chunk; None: no chunks.
        device: device of the result.

    Returns:
        None where each row's queries see all keys of the row: plain causal attention.
    """
    cut = cut_equal_rows(query_offset, query_length, key_offset, key_length, chunk_size)
    if cut.is_plain(query_length):
        return None
    rows = torch.arange(batch_size, device=device)[:, None]
    num_chunks, size = 1, query_length
    if chunk_size is not None and query_length > cut.rest:
        num_chunks, size = (query_length - cut.rest + chunk_size - 1) // chunk_size + 1, chunk_size
    ends = (torch.arange(num_chunks, device=device) * size + cut.rest).clamp(max=query_length)
    num_keys = cut.begun + query_length
    key_index = None
    if num_keys != key_length:
        key_index = rows * key_length + torch.arange(num_keys, device=device) + cut.first_key
        key_index = key_index.flatten()
    return Sequences(
        query_index=None,
        key_index=key_index,
        cu_seq_lens_q=_with_zero((rows * query_length + ends).flatten()),
        cu_seq_lens_k=_with_zero((rows * num_keys + ends + cut.begun).flatten()),
        max_length_q=min(query_length, chunk_size or query_length),
        max_length_k=min(num_keys, chunk_size or num_keys),
    )


def sequences_of_groups(
    real_queries: torch.Tensor, real_keys: torch.Tensor, query_groups: torch.Tensor, key_groups: torch.Tensor
) -> Sequences | None:
    """Make a sequence of each row's tokens of one group.

    Args:
        real_queries: `[B, Q]` bool, false on padding. A row's last queries are its last keys.
        real_keys: `[B, K]` bool, false on padding and on places not written yet.
        query_groups: `[B, Q]` integers that do not fall along a row.
        key_groups: `[B, K]`, likewise.

    Returns:
        None where each row's queries see all keys of the row, or where every token is padding.
    """
    last = torch.iinfo(query_groups.dtype).max
    # Drop the keys of groups without queries: chunks that have ended.
    first_group = query_groups.masked_fill(~real_queries, last).amin(1, keepdim=True)
    query_index, cu_seq_lens_q = _lay_end_to_end(real_queries, query_groups)
    key_index, cu_seq_lens_k = _lay_end_to_end(real_keys & (key_groups >= first_group), key_groups)
    all_queries = len(query_index) == real_queries.numel()
    all_keys = len(key_index) == real_keys.numel()
    if not len(query_index) or (all_queries and all_keys and len(cu_seq_lens_q) == len(real_queries) + 1):
        return None
    longest = torch.stack([cu_seq_lens_q.diff().max(), cu_seq_lens_k.diff().max()]).tolist()
    return Sequences(
        query_index=None if all_queries else query_index,
        key_index=None if all_keys else key_index,
        cu_seq_lens_q=cu_seq_lens_q,
        cu_seq_lens_k=cu_seq_lens_k,
        max_length_q=longest[0],
        max_length_k=longest[1],
    )


def _lay_end_to_end(chosen: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = chosen.flatten().nonzero()[:, 0]
    rows, groups = index // chosen.shape[1], groups.flatten()[index]
    ends = ((rows.diff() != 0) | (groups.diff() != 0)).nonzero()[:, 0] + 1
    return index, _with_zero(torch.cat([ends, ends.new_full((1,), len(index))]))


def _with_zero(ends: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(ends, (1, 0)).to(torch.int32)


def attend_in_sequences(
    attend: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: Sequences,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run an attention implementation that takes sequences laid end to end.

    Args:
        attend: from transformers' attention interface; it must take `cu_seq_lens_q` and its kin.
        module: the attention module.
        query: `[B, H, Q, D]`.
        key: `[B, H / groups, K, D]`.
        value: like `key`.
        sequences: which tokens see each other.
        **kwargs: for the implementation.

    Returns:
        the output `[B, Q, H, D]`, zero for queries that take no part, and the implementation's second result.
    """
    batch_size, num_heads, query_length, _ = query.shape
    lengths = sequences._asdict()
    query_index, key_index = lengths.pop("query_index"), lengths.pop("key_index")
    output, weights = attend(
        module,
        _pack(query, query_index),
        _pack(key, key_index),
        _pack(value, key_index),
        None,
        **{**kwargs, **lengths, "position_ids": None},
    )
    output = output[0]  # [N, H, D]
    if query_index is not None:
        # A flash kernel may return another dtype than the query's.
        everywhere = output.new_zeros(batch_size * query_length, *output.shape[1:])
        output = everywhere.index_copy(0, query_index, output)
    return output.view(batch_size, query_length, num_heads, -1), weights


def _pack(states: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    # [B, H, T, D] to [1, H, N, D]
    flat = states.transpose(1, 2).flatten(0, 1)
    return (flat if index is None else flat[index]).transpose(0, 1)[None]
