"""Damaged files of an adapter, and files of code: refused, whoever loads them."""

import shutil
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support.hostile_files import code

import llamoe


def cut(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickle(folder):
    (folder / "adapter_model.safetensors").rename(folder / "kept")
    code(folder / "adapter_model.bin", next(iter(load_file(folder / "kept"))))


def another_shape(folder):
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({**weights, next(iter(weights)): torch.ones(7, 5)}, path)


def without_a_tensor(folder):
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    del weights[next(iter(weights))]
    save_file(weights, path)


DAMAGES = [
    (cut, "cut short|incomplete metadata"),
    (pickle, "adapter_model|Weights only load failed"),
    (another_shape, r"has shape \[7, 5\] where the model has"),
    (without_a_tensor, "the adapter has no "),
]


@pytest.mark.parametrize("by", ["load_adapter", "PeftModel"])
@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=lambda it: getattr(it, "__name__", ""))
def test_a_damaged_adapter_is_refused(damage, message, by, model_folders, tmp_path):
    def load_model():
        return llamoe.LlamoeDenseForCausalLM.from_pretrained(model_folders / "dense")

    config = LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    get_peft_model(load_model(), config).save_pretrained(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    damage(tmp_path / "bad")
    model = load_model()
    load = model.load_adapter if by == "load_adapter" else partial(PeftModel.from_pretrained, model)
    with pytest.raises((ValueError, OSError, SafetensorError, UnpicklingError), match=message):
        load(tmp_path / "bad")
    assert not (Path.cwd() / "was-run").exists()
