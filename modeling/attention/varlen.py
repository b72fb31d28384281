"""Variable-length sequences for FlashAttention, which takes no mask.

A flash kernel computes plain causal attention over any number of sequences laid end to end. So each group of each row
is a sequence, without its padding. The queries of a sequence are the last of its keys, with a cache too, and the kernel
aligns the last query with the last key; a window it takes as a number. No other masking is needed.

Shapes: B batch, H heads, Q query tokens, K key tokens (cached and new), T either of them, D head_dim, S sequences,
N tokens of all sequences.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .mask_inputs import MaskInputs
from .visibility import EqualRows, Rule


class Sequences(NamedTuple):
    """Which tokens form sequences, in place of an attention mask.

    Attributes:
        query_index, key_index: int64, the tokens that take part, as indices into `B * Q` and `B * K`, sequence by
            sequence; None: all, in order.
        cu_seq_lens_q, cu_seq_lens_k: `[S + 1]` int32, where each sequence begins, then the number of all tokens.
        max_length_q, max_length_k: upper bounds of a sequence's length.
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


def sequences(inputs: MaskInputs, rule: Rule) -> Sequences | None:
    """Make a sequence of each group of each row; reads values.

    Returns:
        None where each row's queries see all keys of the row, or where every token is padding.
    """
    key_index = inputs.keys(rule).index(inputs.device)
    real_queries = inputs.is_real(inputs.query_index)
    # A static cache has places behind the last query.
    real_keys = inputs.is_real(key_index) & (key_index <= inputs.query_index[-1])
    zero = key_index.new_zeros(())
    groups = inputs.groups(rule) or (zero.expand_as(real_queries), zero.expand_as(real_keys))
    if inputs.keys(rule).ring is None or rule.window is None:
        return sequences_of_groups(real_queries, real_keys, *groups)
    # A kernel's window counts keys in the order in which they lie, which in a ring is not the row's.
    order, rows = key_index.argsort(), torch.arange(len(real_keys) + 1, device=inputs.device)
    made = sequences_of_groups(real_queries, real_keys[:, order], groups[0], groups[1][:, order])
    if made is None:
        lengths = inputs.query_length, len(order)
        made = Sequences(None, None, *((rows * length).int() for length in lengths), *lengths)
    places = (rows[:-1, None] * len(order) + order).flatten()
    return made._replace(key_index=places if made.key_index is None else places[made.key_index])


def equal_sequences(inputs: MaskInputs, rule: Rule) -> Sequences | None:
    """Make a sequence of each chunk of rows without padding; otherwise as `sequences`, but reads no value."""
    rows = inputs.equal_rows(rule)
    return sequences_of_equal_rows(rows, inputs.batch_size, inputs.query_length, inputs.device)


def sequences_of_equal_rows(
    rows: EqualRows, batch_size: int, query_length: int, device: torch.device
) -> Sequences | None:
    """Make a sequence of each chunk of equal rows; None where each row's queries see all keys of the row."""
    if rows.is_plain(query_length):
        return None
    chunk_size, number = rows.chunk_size, torch.arange(batch_size, device=device)[:, None]
    num_chunks, size = 1, query_length
    if chunk_size is not None and query_length > rows.rest:
        num_chunks, size = (query_length - rows.rest + chunk_size - 1) // chunk_size + 1, chunk_size
    ends = (torch.arange(num_chunks, device=device) * size + rows.rest).clamp(max=query_length)
    num_keys = rows.begun + query_length
    key_index = None
    if num_keys != rows.key_length:
        key_index = number * rows.key_length + torch.arange(num_keys, device=device) + rows.first_key
        key_index = key_index.flatten()
    return Sequences(
        query_index=None,
        key_index=key_index,
        cu_seq_lens_q=_with_zero((number * query_length + ends).flatten()),
        cu_seq_lens_k=_with_zero((number * num_keys + ends + rows.begun).flatten()),
        max_length_q=min(query_length, chunk_size or query_length),
        max_length_k=min(num_keys, chunk_size or num_keys),
    )


def sequences_of_groups(
    real_queries: torch.Tensor, real_keys: torch.Tensor, query_groups: torch.Tensor, key_groups: torch.Tensor
) -> Sequences | None:
    """Make a sequence of each row's tokens of one group; result as in `sequences`.

    `real_queries` `[B, Q]` and `real_keys` `[B, K]` are false on padding and on places not written yet. A row's last
    queries are its last keys. The groups are integers that do not fall along a row.
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
    indices = (None if all_queries else query_index, None if all_keys else key_index)
    return Sequences(*indices, cu_seq_lens_q, cu_seq_lens_k, *longest)


def _lay_end_to_end(chosen: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = chosen.flatten().nonzero()[:, 0]
    rows, groups = index // chosen.shape[1], groups.flatten()[index]
    ends = ((rows.diff() != 0) | (groups.diff() != 0)).nonzero()[:, 0] + 1
    return index, _with_zero(nn.functional.pad(ends, (0, 1), value=len(index)))


def _with_zero(ends: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(ends, (1, 0)).to(torch.int32)


def attend_in_sequences(
    attend: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    """Run flash attention over sequences laid end to end; queries that take no part get zero."""
    batch_size, num_heads, query_length, _ = query.shape
    query_index, key_index, *_ = sequences
    packed = (_pack(query, query_index), _pack(key, key_index), _pack(value, key_index))
    lengths = {name: value for name, value in sequences._asdict().items() if not name.endswith("index")}
    output = attend(*packed, None, **lengths)[0][0]  # [N, H, D]
    if query_index is not None:
        # A flash kernel may return another dtype than the query's.
        everywhere = output.new_zeros(batch_size * query_length, *output.shape[1:])
        output = everywhere.index_copy(0, query_index, output)
    return output.view(batch_size, query_length, num_heads, -1)


def _pack(states: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    # [B, H, T, D] to [1, H, N, D]
    flat = states.transpose(1, 2).flatten(0, 1)
    return (flat if index is None else flat[index]).transpose(0, 1)[None]
