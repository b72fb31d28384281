"""Folders that bitsandbytes has packed as sources of `convert`, `quantize`, `inspect` and `verify`."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.bitsandbytes_models import FAMILIES, METHODS, folder_of, load

from llamoe.conversion import convert, inspect, open_checkpoint, verify


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_folder_means_is_what_bitsandbytes_unpacks(family, method, tmp_path):
    model = load(folder_of(family), family, method, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "packed", layout="stock")
    assert convert(tmp_path / "packed", tmp_path / "plain").kind == "bitsandbytes"
    plain = load(tmp_path / "plain", family, dtype=torch.bfloat16).state_dict()
    expected = model.dequantize(torch.bfloat16).state_dict()
    assert plain.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.items())
    assert verify(tmp_path / "packed", tmp_path / "plain", logits=False).verdict == "equal"
    assert inspect(tmp_path / "packed").kind == "bitsandbytes"


def test_layers_in_16_bits_stay_so(tmp_path):
    skipped = {"llm_int8_skip_modules": ["lm_head", "k_proj"]}
    model = load(folder_of("mixtral"), "mixtral", "nf4", dtype=torch.bfloat16, quantize=skipped)
    model.save_pretrained(tmp_path / "packed", layout="stock")
    assert open_checkpoint(tmp_path / "packed").in_16_bit == ["self_attn.k_proj"]


@pytest.mark.parametrize("kind", ["weight", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"])
def test_a_missing_tensor_is_named_and_leaves_nothing(kind, tmp_path):
    load(folder_of("mixtral"), "mixtral", "nf4", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "packed", layout="stock"
    )
    file = tmp_path / "packed/model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if name.endswith(f"experts.2.w1.{kind}"))]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.safetensors: .*experts\.2\.w1\.weight") as caught:
        convert(tmp_path / "packed", tmp_path / "plain")
    assert "\n" not in str(caught.value) and not (tmp_path / "plain").exists()
