"""Implementations of attention that these tests run on a CPU."""

from collections import Counter

import pytest
import torch
from support.plain_flash import PlainFlash
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_utils

from llamoe.modeling.attention import implementation as implementation_module


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
        if name.endswith("_fn"):  # what transformers has loaded, to be put back afterwards
            monkeypatch.setattr(flash_utils, name, value)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda *_: False)
    return plain


IMPLEMENTATIONS = ["sdpa", "flex_attention", "flash_attention_2"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """Every implementation but `eager`, the truth. Flex, otherwise for GPUs, runs as plain Python."""
    if request.param.startswith("flash"):
        request.getfixturevalue("flash")
    request.getfixturevalue("monkeypatch").setattr(implementation_module, "FOR_GPUS", ())
    with torch.compiler.set_stance("force_eager"):
        yield request.param
