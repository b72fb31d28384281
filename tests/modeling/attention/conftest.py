"""Implementations of attention that the tests of this folder run on a CPU, FlashAttention among them."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_utils

from llamoe.modeling.attention import implementation as implementation_module


def attention(query, key, value, scale, causal, dropout_p=0.0, window_size=(-1, -1)):
    """Compute attention of a query `[Q, H, D]` to keys and values `[K, H / groups, D]` by plain operations.

    The last query is the token of the last key. `window_size` is the number of keys that a query sees before and after
    its own token; -1: all.
    """
    assert dropout_p == 0
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if causal:
        visible = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        if window_size[0] >= 0:
            visible &= visible.new_ones(visible.shape).triu(len(key) - len(query) - window_size[0])
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@dataclass
class PlainFlash:
    """The functions of the package `flash_attn` by plain operations, and how often each was called."""

    calls: Counter

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        self.calls["whole"] += 1
        options = softmax_scale, causal, dropout_p, window_size
        rows = [attention(*row, *options) for row in zip(q, k, v, strict=True)]
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
        window_size=(-1, -1),
    ):
        self.calls["varlen"] += 1
        for tensor, ends, longest in ((q, cu_seqlens_q, max_seqlen_q), (k, cu_seqlens_k, max_seqlen_k)):
            assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(tensor)
            assert ends.diff().min() >= 0 and ends.diff().max() <= longest
        # Queries without keys are allowed: in a decode step, those of rows whose tokens are all padding.
        assert ((cu_seqlens_q.diff() <= cu_seqlens_k.diff()) | (cu_seqlens_k.diff() == 0)).all()
        pieces = zip(
            q.split(cu_seqlens_q.diff().tolist()),
            k.split(cu_seqlens_k.diff().tolist()),
            v.split(cu_seqlens_k.diff().tolist()),
            strict=True,
        )
        options = softmax_scale, causal, dropout_p, window_size
        return torch.cat([attention(*piece, *options) for piece in pieces])


@pytest.fixture
def flash(monkeypatch):
    plain = PlainFlash(Counter())
    functions = (
        plain.flash_attn_func,
        plain.flash_attn_varlen_func,
        None,
        flash_utils._pad_input,
        flash_utils._unpad_input,
    )
    for name, value in vars(flash_utils).copy().items():
        # transformers stores loaded functions under these names: restore them after the test.
        if name.endswith("_fn"):
            monkeypatch.setattr(flash_utils, name, value)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda *_: False)
    return plain


IMPLEMENTATIONS = ["sdpa", "flex_attention", "flash_attention_2"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """All implementations but `eager`, with which they are compared. Flex attention runs uncompiled, on the CPU."""
    if request.param.startswith("flash"):
        request.getfixturevalue("flash")
    request.getfixturevalue("monkeypatch").setattr(implementation_module, "FOR_GPUS", ())
    with torch.compiler.set_stance("force_eager"):
        yield request.param
