"""Attention over many sequences of differing lengths at once: what flash attention takes in place of a mask.

A flash kernel knows one pattern, plain causal attention, but runs it over any number of sequences laid end to end.
So whatever must not see each other becomes a sequence of its own: each row, each packed segment of a row and, in
chunked layers, each chunk. Padding is left out. The queries of a sequence are the last of its keys, in a cache too,
and the kernel aligns the last query with the last key: that is all the masking there is.

Everything is worked out once a forward pass, by `masks`, and shared by the layers.

Shapes: B batch, H heads, Q query tokens, K key tokens (cached and new), D head_dim, S sequences.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


class Sequences(NamedTuple):
    """Which tokens form sequences, in place of an attention mask.

    Attributes:
        query_index: int64, the queries that take part, as indices into `B * Q`, sequence by sequence; None: all, in
            their order.
        key_index: likewise for the keys, into `B * K`.
        cu_seq_lens_q: `[S + 1]` int32, where each sequence's queries begin, and their number.
        cu_seq_lens_k: likewise for the keys.
        max_length_q: at least the longest sequence's number of queries.
        max_length_k: likewise for the keys.
    """

    query_index: torch.Tensor | None
    key_index: torch.Tensor | None
    cu_seq_lens_q: torch.Tensor
    cu_seq_lens_k: torch.Tensor
    max_length_q: int
    max_length_k: int

    def contiguous(self) -> "Sequences":
        """Give itself; `generate` asks this of every mask."""
        return self


def sequences_of_equal_rows(
    batch_size: int,
    query_offset: int,
    query_length: int,
    key_offset: int,
    key_length: int,
    chunk_size: int | None,
    device: torch.device,
) -> Sequences | None:
    """Cut rows without padding into chunks, from their sizes alone: no value on the device is waited for.

    Args:
        batch_size: B.
        query_offset: position of the first query.
        query_length: Q.
        key_offset: position of the first key.
        key_length: K.
        chunk_size: tokens of a chunk; None: no chunks.
        device: where the result is wanted.

    Returns:
        None where each row's queries see each row's keys: plain causal attention.
    """
    end = query_offset + query_length
    first_chunk = query_offset // chunk_size if chunk_size else 0
    num_chunks = (end - 1) // chunk_size - first_chunk + 1 if chunk_size else 1
    first_key = max(first_chunk * chunk_size if chunk_size else 0, key_offset)
    all_keys = first_key == key_offset and end == key_offset + key_length
    if num_chunks == 1 and all_keys:
        return None
    rows = torch.arange(batch_size, device=device)[:, None]
    chunk_ends = torch.full((1,), end, device=device)
    if chunk_size:
        chunk_ends = (torch.arange(num_chunks, device=device) + first_chunk + 1) * chunk_size
    chunk_ends = chunk_ends.clamp(max=end)
    num_keys = end - first_key
    key_index = None
    if not all_keys:
        key_index = rows * key_length + torch.arange(num_keys, device=device) + (first_key - key_offset)
        key_index = key_index.flatten()
    return Sequences(
        query_index=None,
        key_index=key_index,
        cu_seq_lens_q=_with_zero((rows * query_length + chunk_ends - query_offset).flatten()),
        cu_seq_lens_k=_with_zero((rows * num_keys + chunk_ends - first_key).flatten()),
        max_length_q=min(query_length, chunk_size or query_length),
        max_length_k=min(num_keys, chunk_size or num_keys),
    )


def sequences_of_groups(
    real_queries: torch.Tensor, real_keys: torch.Tensor, query_groups: torch.Tensor, key_groups: torch.Tensor
) -> Sequences | None:
    """Make a sequence of each row's tokens of one group.

    Args:
        real_queries: `[B, Q]` bool, false on padding. A row's last queries are its last keys.
        real_keys: `[B, K]` bool, false on padding and on what is not written yet.
        query_groups: `[B, Q]` integers that do not fall along a row.
        key_groups: `[B, K]`, likewise.

    Returns:
        None where each row's queries see each row's keys, or where nothing is real.
    """
    last = torch.iinfo(query_groups.dtype).max
    # Keys of groups that no query is in any more: a chunk that is over.
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
        attend: from transformers' attention interface; it must know `cu_seq_lens_q` and the like.
        module: the attention module.
        query: `[B, H, Q, D]`.
        key: `[B, H / groups, K, D]`.
        value: like `key`.
        sequences: which tokens see each other.
        **kwargs: for the implementation.

    Returns:
        the output `[B, Q, H, D]`, zero where no query takes part, and what the implementation gives beside it.
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
        # A flash kernel may have chosen another dtype than the query's.
        everywhere = output.new_zeros(batch_size * query_length, *output.shape[1:])
        output = everywhere.index_copy(0, query_index, output)
    return output.view(batch_size, query_length, num_heads, -1), weights


def _pack(states: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    # [B, H, T, D] to [1, H, N, D]
    flat = states.transpose(1, 2).flatten(0, 1)
    return (flat if index is None else flat[index]).transpose(0, 1)[None]
