"""Attention of one token per row: heads that share keys are computed together, with the numbers of `eager`."""

import pytest
import torch
from support.models import MODELS, max_abs
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import llamoe
from llamoe.modeling.attention.layer import eager_attention_forward
from llamoe.modeling.kernels import attend_to_single_queries

DECODERS = [case for case in MODELS if case.name in ("LlamoeForCausalLM", "LlamoeDenseForCausalLM")]


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (6, 6), (5, 1)])
def test_single_queries_equal_eager(heads, groups, dtype, masked):
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(3, 1, heads, 20, generator=generator).transpose(1, 2).to(dtype)
    key, value = torch.randn(2, 3, groups, 37, 20, generator=generator).to(dtype)
    mask = torch.arange(37) >= torch.tensor([0, 5, 36])[:, None, None, None] if masked else None
    module = torch.nn.Module()
    module.num_key_value_groups = heads // groups
    additive = None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    expected, _ = eager_attention_forward(module, query, key, value, additive, 0.3)
    output = attend_to_single_queries(query, key, value, mask, 0.3)
    # `eager` rounds attention weights, and both round results, which are up to about three.
    tolerance = 1e-6 if dtype.itemsize > 2 else 4 * torch.finfo(dtype).eps
    assert output.shape == (3, 1, heads, 20) and max_abs(output, expected) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DECODERS, ids=lambda case: case.name)
def test_single_tokens_share_keys_unless_sdpa_is_replaced(case, dtype, monkeypatch):
    seen = []

    def record(query, *args):
        seen.append(tuple(query.shape))
        return attend_to_single_queries(query, *args)

    monkeypatch.setattr(llamoe.modeling.attention.forms, "attend_to_single_queries", record)
    # Each token takes all experts: in bfloat16 rounding could flip a choice.
    model = case.make(**({"num_experts_per_tok": 5} if case.has_experts else {})).to(dtype)
    layers, two = model.config.num_hidden_layers, torch.tensor([[5, 6], [6, 5]])
    expected = model(two).logits[:, :1]
    assert not seen
    model(two[:1, :1]).logits.sum().backward()
    assert len(seen) == layers
    with torch.no_grad():
        model(two[:, :1])
        assert len(seen) == 2 * layers
        functions = llamoe.modeling.attention.layer.ALL_ATTENTION_FUNCTIONS
        # Other code registers its own function under the name.
        monkeypatch.setitem(
            functions._local_mapping, "sdpa", lambda *args, **kw: sdpa_attention_forward(*args, **kw)
        )
        # In bfloat16 a few units in the last place of logits up to four.
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        assert max_abs(model(two[:, :1]).logits, expected) < tolerance
    assert len(seen) == 2 * layers
