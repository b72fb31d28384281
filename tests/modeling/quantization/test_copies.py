"""Casts and copies of quantized models, which do not change codes and scales."""

import copy
import io
import pickle

import pytest
import torch
from support.few_bits import (
    CLOSE,
    WEIGHTS,
    codes_and_scales,
    distance,
    folder,
    logits,
    packed,
    route_by_position,
)
from torch import nn
from transformers import AutoModelForCausalLM

from llamoe.configuration.errors import CheckpointError

pytestmark = pytest.mark.slow

# Dtypes


@pytest.mark.parametrize(
    "cast",
    [lambda model: model.to(torch.float16), lambda model: model.type(torch.float32), nn.Module.bfloat16],
    ids=["float16", "type", "bfloat16"],
)
def test_a_cast_leaves_codes_and_scales(model, cast, monkeypatch):
    """A cast changes plain weights alone; autocast to bfloat16 changes outputs by a rounding."""
    route_by_position(monkeypatch)
    before = {name: tensor.clone() for name, tensor in codes_and_scales(model).items()}
    expected = logits(model)
    model = cast(model)
    found = logits(model)
    assert found.dtype == model.dtype
    assert distance(found, expected) < CLOSE
    # torch has no autocast to bfloat16 for float16.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=model.dtype != torch.float16):
        assert distance(logits(model), expected) < (1e-9 if model.dtype == torch.bfloat16 else CLOSE)
    after = codes_and_scales(model)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name


# Copies


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies(model, copied):
    found = copied(model)
    assert torch.equal(logits(found), logits(model))
    first = codes_and_scales(found)
    assert all(
        tensor.data_ptr() != first[name].data_ptr() for name, tensor in codes_and_scales(model).items()
    )
    assert found.is_quantized and found.config.quantization_config.weights in WEIGHTS


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(model, assign):
    other, file = copy.deepcopy(model), io.BytesIO()
    for tensor in (*other.parameters(), *codes_and_scales(other).values()):
        tensor.data.zero_()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert not any(other.load_state_dict(state, assign=assign))
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("strict", [False, True])
def test_numbers_are_no_codes_and_codes_no_numbers(weights, strict):
    """A quantized model refuses the state dict of a plain one, and a plain model that of a quantized one."""
    model = packed("mixtral", weights)
    before = {name: tensor.clone() for name, tensor in codes_and_scales(model).items()}
    plain = AutoModelForCausalLM.from_pretrained(folder("mixtral"))
    wanted = {"int4": "uint8", "int8": "int8"}[weights]
    with pytest.raises(RuntimeError, match=f"q_proj.weight .*torch.{wanted}"):
        model.load_state_dict(plain.state_dict(), strict=strict)
    with pytest.raises(CheckpointError, match=wanted):
        plain.load_state_dict(model.state_dict(), strict=strict)
    assert all(torch.equal(tensor, before[name]) for name, tensor in codes_and_scales(model).items())
