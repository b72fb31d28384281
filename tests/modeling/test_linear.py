"""The linear layer of few rows gives the numbers of `nn.Linear`, and is one to everybody who asks."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import MODELS, max_abs
from torch import nn

from llamoe.modeling import linear
from llamoe.modeling.linear import Linear


@pytest.fixture
def in_parts(monkeypatch):
    """Counts how often the batched product is taken; for weights of every size."""
    calls = []
    monkeypatch.setattr(linear, "_MIN_WEIGHTS", 1)

    def count(x, *args, original=linear._multiply_in_parts):
        calls.append(tuple(x.shape))
        return original(x, *args)

    monkeypatch.setattr(linear, "_multiply_in_parts", count)
    return calls


def pair(num_in, num_out, bias=False, dtype=torch.float32):
    ours, plain = Linear(num_in, num_out, bias, dtype=dtype), nn.Linear(num_in, num_out, bias, dtype=dtype)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


@torch.no_grad()
@pytest.mark.parametrize("num_out", [1, 17, 34, 65, 128])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 1), (1, 2), (3, 1), (0,), (1, 0), (4,), (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_layer(num_out, shape, bias, in_parts):
    ours, plain = pair(50, num_out, bias)
    x = torch.randn(*shape, 50)
    out = ours(x)
    assert out.shape == (*shape, num_out)
    assert max_abs(out, plain(x)) < 1e-5 if out.numel() else True
    assert len(in_parts) == (x.numel() <= 150)
    assert max_abs(ours(x[..., None].expand(*shape, 50, 2)[..., 1]), plain(x)) < 1e-5 if out.numel() else True


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_other_dtypes_go_the_plain_way(dtype, in_parts):
    ours, plain = pair(50, 34, dtype=dtype)
    x = torch.randn(1, 50, dtype=dtype)
    assert torch.equal(ours(x), plain(x)) and not in_parts


def test_gradients_and_autocast_go_the_plain_way(in_parts):
    ours, plain = pair(50, 34)
    x = torch.randn(1, 50)
    for layer in (ours, plain):
        layer(x).square().sum().backward()
    assert torch.equal(ours.weight.grad, plain.weight.grad)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
    assert not in_parts


@torch.no_grad()
def test_transposed_weights(in_parts):
    ours, plain = pair(50, 34)
    ours.weight.data = ours.weight.data.T.contiguous().T
    x = torch.randn(1, 50)
    assert max_abs(ours(x), plain(x)) < 1e-5


@torch.no_grad()
def test_compiles_as_the_plain_layer(in_parts):
    ours, plain = pair(50, 34)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 50)
    assert torch.equal(compiled(x), plain(x)) and not in_parts


@torch.no_grad()
def test_models_decode_through_it_with_and_without_an_adapter(in_parts):
    model = next(case for case in MODELS if case.name == "LlamoeDenseForCausalLM").make()
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(layers) == 7 * model.config.num_hidden_layers + 1
    input_ids = torch.tensor([[5]])
    expected = model(input_ids).logits
    assert len(in_parts) == len(layers)
    with torch.enable_grad():
        plainly = model(input_ids).logits
    assert max_abs(expected, plainly) < 1e-5
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert max_abs(adapted(input_ids).logits, expected) < 1e-5  # lora_B begins as zero
