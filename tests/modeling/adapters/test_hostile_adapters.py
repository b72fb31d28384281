"""Adapters made to mislead or to take all memory: refused from their headers, whoever loads them."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hostile_files import JSON, code, entry, safetensors
from support.spoilt_folders import edit

import llamoe

pytestmark = pytest.mark.slow

# Adapters


@pytest.fixture(scope="module")
def adapter(model_folders, tmp_path_factory):
    """A LoRA adapter of the dense model, as a safetensors file."""
    peft = pytest.importorskip("peft")
    place = tmp_path_factory.mktemp("adapter")
    model = llamoe.LlamoeDenseForCausalLM.from_pretrained(model_folders / "dense")
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(place / "good")
    return place / "good"


BY = ["llamoe", "peft", "second"]


def add(guard, by, model_folders, folder, adapter, says=None):
    arguments = {"base": model_folders / "dense", "folder": folder, "by": adapter if by == "second" else by}
    if says is None:
        outcome = guard.run("add_adapter", **arguments)
        assert outcome.kinds == [], outcome
    else:
        guard.refused("add_adapter", says, **arguments)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_dtypes_of_an_adapter(suffix, by, adapter, model_folders, guard, tmp_path):
    shutil.copytree(adapter, tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    if suffix != "safetensors":
        (tmp_path / "adapter/adapter_model.safetensors").unlink()
    path = tmp_path / "adapter" / f"adapter_model.{suffix}"

    def save(tensors):
        if suffix == "safetensors":
            save_file(tensors, path)
        else:
            torch.save(tensors, path)

    save(weights)
    add(guard, by, model_folders, path.parent, adapter)
    name = next(iter(weights))
    for dtype in (torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn):
        save({**weights, name: (weights[name] * 9).to(dtype)})
        add(
            guard, by, model_folders, path.parent, adapter, "has dtype .* not a dtype of an adapter's weights"
        )


@pytest.mark.parametrize("by", BY)
def test_hostile_pickle_of_an_adapter(by, adapter, model_folders, guard, tmp_path):
    shutil.copytree(adapter, tmp_path / "adapter", ignore=shutil.ignore_patterns("*.safetensors"))
    name = next(iter(load_file(adapter / "adapter_model.safetensors")))
    code(tmp_path / "adapter/adapter_model.bin", name)
    add(guard, by, model_folders, tmp_path / "adapter", adapter, "adapter_model.bin: ")
    assert not (Path.cwd() / "was-run").exists()


@pytest.mark.parametrize("by", BY)
def test_adapter_of_terabytes(by, adapter, model_folders, guard, tmp_path):
    """A file with a hole in it takes no place on the disk."""
    shutil.copytree(adapter, tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_model.safetensors"
    header, end = {}, 0
    for name, tensor_ in load_file(adapter / "adapter_model.safetensors").items():
        shape = [2**20, 2**17] if "lora_A" in name else list(tensor_.shape)
        size = 4 * torch.Size(shape).numel()
        header[name] = entry(shape, end, end + size)
        end += size
    path.write_bytes(safetensors(header))
    os.truncate(path, path.stat().st_size + end)
    add(guard, by, model_folders, path.parent, adapter, "beyond reason for an adapter")


def test_adapter_of_another_shape_is_refused_before_it_is_read(adapter, model_folders, tmp_path, monkeypatch):
    shutil.copytree(adapter, tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_model.safetensors"
    weights = load_file(path)
    name = next(iter(weights))
    save_file({**weights, name: torch.ones(7, 5)}, path)
    model = llamoe.LlamoeDenseForCausalLM.from_pretrained(model_folders / "dense")
    monkeypatch.setattr("peft.utils.load_peft_weights", lambda *_, **__: pytest.fail("the file was read"))
    with pytest.raises(ValueError, match=r"has shape \[7, 5\] where the model has"):
        model.load_adapter(tmp_path / "adapter")


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("change", [{"r": 10**8}, {"rank_pattern": {"q_proj": 10**9}}])
def test_rank_beyond_reason(change, by, adapter, model_folders, guard, tmp_path):
    """peft makes the layers before it opens the file."""
    shutil.copytree(adapter, tmp_path / "adapter")
    edit(tmp_path / "adapter/adapter_config.json", **change)
    add(guard, by, model_folders, tmp_path / "adapter", adapter, "= 10+")


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("damage", ["deep", "twice", "many"])
def test_hostile_config_of_an_adapter(damage, by, adapter, model_folders, guard, tmp_path):
    shutil.copytree(adapter, tmp_path / "adapter")
    (tmp_path / "adapter/adapter_config.json").write_text(JSON[damage][0])
    arguments = {"base": model_folders / "dense", "folder": tmp_path / "adapter"}
    outcome = guard.run("add_adapter", limit=15, **arguments, by=adapter if by == "second" else by)
    assert outcome.kinds
    assert "MemoryError" not in outcome.kinds and "OutOfTime" not in outcome.kinds


@pytest.mark.parametrize(
    "change",
    [
        {"task_type": [[]]}, {"peft_type": 1}, {"megatron_config": 1}, {"init_lora_weights": 7},
        {"lora_bias": 1}, {"target_parameters": "../x"},
        {"layers_to_transform": "1"}, {"exclude_modules": True}, {"modules_to_save": [["lm_head"]]},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_config_that_peft_cannot_take(change, adapter, model_folders, tmp_path):
    """peft raises whatever the field's first use raises, and names neither file nor field."""
    shutil.copytree(adapter, tmp_path / "adapter")
    edit(tmp_path / "adapter/adapter_config.json", **change)
    model = llamoe.LlamoeDenseForCausalLM.from_pretrained(model_folders / "dense")
    with pytest.raises(ValueError, match="adapter_config.json"):
        model.load_adapter(str(tmp_path / "adapter"))


def test_a_config_of_the_wrong_type_is_named_by_pefts_own_class_too(adapter, model_folders, tmp_path):
    from peft import PeftModel

    shutil.copytree(adapter, tmp_path / "adapter")
    edit(tmp_path / "adapter/adapter_config.json", lora_bias=1)
    model = llamoe.LlamoeDenseForCausalLM.from_pretrained(model_folders / "dense")
    with pytest.raises(ValueError, match=r"adapter_config\.json.*lora_bias = 1 is neither true nor false"):
        PeftModel.from_pretrained(model, tmp_path / "adapter")
