"""Large gradients of experts lie in memory of their own, and are gradients like others."""

import copy
import mmap

import pytest
import torch
from support.models import make_asymmetric, max_abs, stock_text_config
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

import llamoe
from llamoe.modeling.moe import dispatch, grouped_product
from llamoe.modeling.moe.grouped_product import _multiply_outer, _unmapped_zeros
from llamoe.modeling.moe.layer import MixtureOfExperts

HAS_MEMORY = hasattr(mmap, "MAP_ANONYMOUS")


@pytest.fixture(params=[True, False])
def has_memory(request, monkeypatch):
    """Memory of their own for gradients of every size; and a system that has none."""
    monkeypatch.setattr(grouped_product, "LARGE_GRADIENT_BYTES", 1)
    monkeypatch.setattr(dispatch, "LARGE_GRADIENT_BYTES", 1)
    if not request.param:
        monkeypatch.delattr(mmap, "MAP_ANONYMOUS", raising=False)
    return request.param and HAS_MEMORY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_groups_without_rows(dtype, has_memory):
    x, grad = torch.randn(4, 5).to(dtype), torch.randn(4, 7).to(dtype)
    ends = torch.tensor([0, 2, 2, 3], dtype=torch.int32)  # and a row behind the last end
    out = _multiply_outer(x, grad, ends)
    assert out.shape == (4, 5, 7) and out.dtype == dtype and out.is_contiguous()
    assert out.untyped_storage().resizable() != has_memory
    expected = torch.stack([x[:0].T @ grad[:0], x[:2].T @ grad[:2], x[:0].T @ grad[:0], x[2:3].T @ grad[2:3]])
    assert max_abs(out, expected) <= torch.finfo(dtype).eps * 8
    assert _multiply_outer(x[:, :0], grad, ends).shape == (4, 0, 7)


@pytest.mark.skipif(not HAS_MEMORY, reason="this system does not give anonymous memory to Python")
def test_the_memory_is_given_back(monkeypatch):
    alive = set()

    class Watched(mmap.mmap):
        def __init__(self, *_, **__):
            alive.add(id(self))

        def __del__(self):
            alive.discard(id(self))

    monkeypatch.setattr(mmap, "mmap", Watched)
    zeros = _unmapped_zeros((4, 4), torch.float32)
    part = zeros[2:]
    assert len(alive) == 1 and not zeros.any()
    del zeros
    assert len(alive) == 1
    del part
    assert not alive


def test_training_goes_on_as_in_stock(has_memory):
    """Two steps of two passes each: gradients are taken over, added to, zeroed, stepped with and copied."""
    config = stock_text_config()
    stock, ours = make_asymmetric(Llama4TextMoe(config)), MixtureOfExperts(llamoe.from_stock(config))
    ours.load_state_dict(stock.state_dict())
    optimizers = [torch.optim.AdamW(block.parameters(), lr=1e-2) for block in (stock, ours)]
    for step in range(2):
        for num_tokens in (3, 1):
            x = torch.randn(num_tokens, 72, generator=torch.Generator().manual_seed(step))
            for block in (stock, ours):
                output = block(x)
                (output[0] if isinstance(output, tuple) else output).view_as(x).square().sum().backward()
        experts = stock.experts.gate_up_proj.grad, ours.experts.gate_up_proj.grad
        assert experts[1].untyped_storage().resizable() != has_memory
        assert max_abs(*experts) < 1e-4 * experts[0].abs().max()
        untouched = experts[0].flatten(1).abs().sum(1) == 0
        assert untouched.any() and torch.equal(untouched, experts[1].flatten(1).abs().sum(1) == 0)
        assert max_abs(copy.deepcopy(experts[1]), experts[1]) == 0
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
