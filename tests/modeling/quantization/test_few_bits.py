"""Models in int4 and int8: loaded, computed, saved, and written as what the packed weights mean."""

import json

import pytest
import torch
from support.few_bits import CLOSE
from transformers import AutoModelForCausalLM

import llamoe

SIZES = dict(
    vocab_size=300, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def dense():
    return llamoe.LlamoeDenseForCausalLM(llamoe.LlamoeDenseConfig(**SIZES, intermediate_size=352))


def text():
    config = llamoe.LlamoeTextConfig(
        **SIZES,
        intermediate_size=176,
        intermediate_size_mlp=384,
        head_dim=32,
        num_local_experts=5,
        interleave_moe_layer_step=2,
    )
    return llamoe.LlamoeForCausalLM(config)


def mixtral():
    config = llamoe.LlamoeMixtralConfig(
        **SIZES, intermediate_size=224, head_dim=32, num_local_experts=5, num_experts_per_tok=2
    )
    return llamoe.LlamoeMixtralForCausalLM(config)


@pytest.fixture(scope="module", params=[dense, text, mixtral], ids=lambda make: make.__name__)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(request.param.__name__)
    request.param().bfloat16().save_pretrained(path, layout="stock")
    return path


def logits(model):
    ids = torch.arange(3, 25).view(2, 11)
    with torch.no_grad():
        return model(ids).logits.float()


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_packed_model_loads_computes_saves_and_unpacks(folder, weights, tmp_path):
    with llamoe_types():
        plain = AutoModelForCausalLM.from_pretrained(folder)
        packed = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=llamoe.QuantizationConfig(weights)
        )
    expected, found = logits(plain), logits(packed)
    relative = ((found - expected).norm() / expected.norm()).item()
    assert 0 < relative < {"int4": 0.25, "int8": 0.03}[weights]
    assert packed.get_memory_footprint() < {"int4": 0.45, "int8": 0.6}[weights] * plain.get_memory_footprint()

    packed.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(again), found)

    packed.save_pretrained(tmp_path / "stock", layout="stock")
    assert "quantization_config" not in json.loads((tmp_path / "stock" / "config.json").read_text())
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(stock).__module__.startswith("transformers.")
    unpacked = again.dequantize()
    assert (logits(unpacked) - logits(stock)).abs().max() < 0.02  # two implementations in bfloat16
    # Weights are rounded once more; the median, for tokens that rounding sends to another expert.
    errors = (logits(unpacked) - found).norm(dim=-1) / found.norm(dim=-1)
    assert errors.median() < CLOSE


def llamoe_types():
    """Context in which stock's folders load into llamoe's classes."""
    from contextlib import contextmanager

    @contextmanager
    def adopted():
        llamoe.adopt("llama", "llama4", "mixtral")
        try:
            yield
        finally:
            llamoe.release()

    return adopted()
