"""A new weight format: one file in `formats`, and its word in `WEIGHTS` of `QuantizationConfig`."""

import sys

import pytest
import torch
from support.few_bits import CLOSE, distance, folder, load, logits, route_by_position, save
from transformers import AutoModelForCausalLM

from llamoe.modeling import formats
from llamoe.modeling.quantization import QuantizedExperts, QuantizedLinear

FILE = '''
"""8 bits and one scale for each matrix."""

from dataclasses import dataclass

import torch

from .format import MAKERS, Format


@dataclass(frozen=True)
class OneScale(Format):
    """Parts: codes `[O, I]` int8, and a scale `[1]` bfloat16."""

    suffixes = ("", "_scale")
    compute_dtype = torch.bfloat16
    key = "one_scale"

    def parts(self, sizes):
        return [(tuple(sizes), torch.int8), ((1,), torch.bfloat16)]

    def quantize(self, weight_OI):
        scale = (weight_OI.abs().amax().float() / 127).bfloat16()
        return [(weight_OI.float() / scale).round().clamp(-127, 127).to(torch.int8), scale[None]]

    def matrix(self, parts, sizes, dtype):
        return parts[0].to(dtype) * parts[1].to(dtype)


MAKERS["one_scale"] = OneScale
'''


@pytest.fixture
def one_scale(tmp_path, monkeypatch):
    """Add the file of a new format to the package `formats`; return its word."""
    (tmp_path / "one_scale.py").write_text(FILE)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    monkeypatch.setattr("llamoe.configuration.quantization.WEIGHTS", ("one_scale",))
    yield "one_scale"
    formats.MAKERS.pop("one_scale", None)
    sys.modules.pop(f"{formats.__name__}.one_scale", None)
    formats.format_of.cache_clear()


@pytest.mark.parametrize(("family", "mixture"), [("text", "feed_forward"), ("mixtral", "mlp")])
def test_a_format_of_ones_own(family, mixture, one_scale, monkeypatch):
    """Models are quantized, saved and loaded in it; outputs and gradients are those of the dequantized model."""
    route_by_position(monkeypatch)
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()

    def gradient(model):
        return torch.autograd.grad(model.get_submodule(f"model.layers.1.{mixture}")(x).square().sum(), x)[0]

    model = load(folder(family), one_scale)
    packed = [module for module in model.modules() if isinstance(module, QuantizedExperts | QuantizedLinear)]
    assert {type(module) for module in packed} == {QuantizedExperts, QuantizedLinear}
    assert {module.format.key for module in packed} == {one_scale}
    found = logits(model), gradient(model)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(save(model))), found[0])
    plain = model.dequantize()
    assert not any(isinstance(module, QuantizedExperts | QuantizedLinear) for module in plain.modules())
    for mine, meant in zip(found, (logits(plain), gradient(plain)), strict=True):
        assert distance(mine, meant) < CLOSE
