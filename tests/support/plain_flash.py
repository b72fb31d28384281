"""Flash attention's two functions, written out in plain torch for a CPU."""

from collections import Counter
from dataclasses import dataclass

import torch


def attention(query, key, value, scale, causal, dropout_p=0.0):
    """[Q, H, D], [K, H / groups, D]: plain attention; the last query stands at the last key."""
    assert dropout_p == 0
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if causal:
        visible = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@dataclass
class PlainFlash:
    """The interface of the package `flash_attn`, written out, and what was asked of it."""

    calls: Counter
    largest: int = 0

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        self.calls["whole"] += 1
        rows = [attention(*row, softmax_scale, causal, dropout_p) for row in zip(q, k, v, strict=True)]
        return torch.stack(rows)

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
    ):
        self.calls["varlen"] += 1
        for tensor, ends, longest in ((q, cu_seqlens_q, max_seqlen_q), (k, cu_seqlens_k, max_seqlen_k)):
            assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(tensor)
            assert ends.diff().min() > 0 and ends.diff().max() <= longest
        assert (cu_seqlens_q.diff() <= cu_seqlens_k.diff()).all()
        self.largest = max(self.largest, int(cu_seqlens_k.diff().max()))
        pieces = zip(
            q.split(cu_seqlens_q.diff().tolist()),
            k.split(cu_seqlens_k.diff().tolist()),
            v.split(cu_seqlens_k.diff().tolist()),
            strict=True,
        )
        return torch.cat([attention(*piece, softmax_scale, causal, dropout_p) for piece in pieces])
