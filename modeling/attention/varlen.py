"""What transformers' FlashAttention functions take in place of a mask: padding, or lengths of packed segments.

These functions remove padding, and compute causal attention over sequences of any length, optionally with a window. The
last query of a sequence is the token of its last key. They cannot apply chunks.

Shapes: B batch, Q query tokens, K key tokens (cached and new), S sequences.
"""

from typing import Any

import torch
from torch import nn

from .mask_inputs import MaskInputs
from .visibility import Rule


def packed_lengths(segments: torch.Tensor, batch_size: int) -> dict[str, Any]:
    """Return FlashAttention's arguments for packed rows: cumulative lengths `[S + 1]` int32 and the maximum length.

    `segments` has the number of each token's segment, `[B or 1, Q]`.
    """
    is_first = segments.diff(prepend=segments[:, :1] - 1) != 0
    begins = is_first.expand(batch_size, -1).flatten().nonzero()[:, 0]
    ends = nn.functional.pad(begins, (0, 1), value=batch_size * segments.shape[1]).to(torch.int32)
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def flash_form(inputs: MaskInputs, rule: Rule) -> dict[str, Any] | torch.Tensor | None:
    """Return what FlashAttention takes for layers with this rule.

    Returns:
        for packed rows, the arguments that `packed_lengths` returns, unless the caller gives them to the
        implementation itself. For rows with padding, or of a static cache that is not full: `[B, keys up to the last
        query]` bool, False on padding. In all other cases None.
    """
    if inputs.has_lengths:
        return None
    if inputs.segments is not None:
        return packed_lengths(inputs.segments, inputs.batch_size)
    keys = inputs.keys(rule)
    # A static cache has empty places after the last query.
    num_keys = inputs.query_offset + inputs.query_length - keys.offset
    if inputs.padding_mask is None and num_keys == keys.length:
        return None
    is_real = inputs.is_real(keys.index(inputs.device))[:, : int(num_keys)]
    # FlashAttention's kernel must not be started without any real token.
    if not is_real[:, -inputs.query_length :].any() or (num_keys == keys.length and is_real.all()):
        return None
    return is_real
