"""Variable-length sequences for FlashAttention, which takes no mask.

A flash kernel computes plain causal attention over any number of sequences laid end to end. So each packed segment of
each row is a sequence, without its padding. The queries of a sequence are the last of its keys, with a cache too, and
the kernel aligns the last query with the last key; it takes a window as a number. Chunks would need keys to be cut off.

Shapes: B batch, H heads, Q query tokens, K key tokens (cached and new), T either of them, D head_dim, S sequences,
N tokens of all sequences.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .mask_inputs import MaskInputs
from .visibility import Rule


class Sequences(NamedTuple):
    """Which tokens form sequences, in place of an attention mask.

    Attributes:
        query_index, key_index: int64, the tokens that take part, as indices into `B * Q` and `B * K`, sequence by
            sequence; None: all, in order.
        cu_seq_lens_q, cu_seq_lens_k: `[S + 1]` int32, where each sequence begins, then the number of all tokens.
        max_length_q, max_length_k: the longest sequence's lengths.
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
    """Make a sequence of each packed segment of each row, without padding.

    Returns:
        None where the kernel sees this without being told: the rows are whole and end with their last query.
    """
    is_static = isinstance(inputs.query_offset, torch.Tensor)
    if inputs.padding_mask is None and inputs.segments is None and not is_static:
        keys = inputs.keys(rule)
        if keys.offset + keys.length == inputs.query_offset + inputs.query_length:
            return None
    key_index = inputs.keys(rule).index(inputs.device)
    real_queries = inputs.is_real(inputs.query_index)
    # A static cache has places behind the last query; a row whose new tokens are all padding takes no part.
    real_keys = inputs.is_real(key_index) & (key_index <= inputs.query_index[-1])
    real_keys = real_keys & real_queries.any(1, keepdim=True)
    if not real_queries.any():
        return None
    zero = key_index.new_zeros(())
    groups = inputs.groups(rule) or (zero.expand_as(real_queries), zero.expand_as(real_keys))
    query_index, cu_seq_lens_q = _lay_end_to_end(real_queries, groups[0])
    key_index, cu_seq_lens_k = _lay_end_to_end(real_keys, groups[1])
    longest = torch.stack([cu_seq_lens_q.diff().max(), cu_seq_lens_k.diff().max()]).tolist()
    return Sequences(
        None if len(query_index) == real_queries.numel() else query_index,
        None if len(key_index) == real_keys.numel() else key_index,
        cu_seq_lens_q,
        cu_seq_lens_k,
        *longest,
    )


def _lay_end_to_end(chosen: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = chosen.flatten().nonzero()[:, 0]
    rows, groups = index // chosen.shape[1], groups.flatten()[index]
    ends = ((rows.diff() != 0) | (groups.diff() != 0)).nonzero()[:, 0] + 1
    begins = nn.functional.pad(nn.functional.pad(ends, (0, 1), value=len(index)), (1, 0))
    return index, begins.to(torch.int32)


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
