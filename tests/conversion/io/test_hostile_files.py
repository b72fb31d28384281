"""What `from_pretrained` refuses (see tests/modeling) is refused by `convert`, `inspect` and `verify` too."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hostile_files import JSON, code, entry, safetensors
from support.spoilt_folders import edit, index_of

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion import convert
from llamoe.conversion.io.read_files import open_pickle, open_weights

pytestmark = pytest.mark.slow


def refused(guard, path, other, says, inspected=None):
    """By each command: `inspect` describes what is left of a folder, and names the problem."""
    target = path.parent / "target"
    guard.refused("convert_to", says, folder=path, target=target)
    assert not target.exists()
    guard.refused("verify_with", says, folder=path, other=other)
    outcome = guard.run("look", folder=path)
    assert not outcome.kinds or "CheckpointError" in outcome.kinds, outcome
    told = outcome.message or " ".join(outcome.result)
    assert (inspected or path.name) in told, outcome


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_local_experts", "hidden_size", "vocab_size"])
def test_size_beyond_reason(field, model_copy, model_folders, guard):
    path = model_copy("text")
    edit(path / "config.json", **{field: 2**40})
    refused(guard, path, model_folders / "text", rf"{field} = {2**40}: is beyond reason", field)
    guard.refused("look", rf"{field} = {2**40}: is beyond reason", folder=path / "config.json")


def test_pickle_that_runs_code(model_copy, model_folders, guard):
    path = model_copy("bin")
    code(path / "pytorch_model.bin")
    refused(guard, path, model_folders / "single", "model")
    assert not (Path.cwd() / "was-run").exists()


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/hostname", "..\\stolen.safetensors"])
def test_index_that_leaves_the_folder(name, model_copy, model_folders, guard):
    path = model_copy("sharded")
    index = json.loads(index_of(path).read_text())
    shard = index["weight_map"]["model.norm.weight"]
    shutil.move(path / shard, path.parent / "stolen.safetensors")
    index["weight_map"] = {key: name if file == shard else file for key, file in index["weight_map"].items()}
    index_of(path).write_text(json.dumps(index))
    refused(guard, path, model_folders / "single", "outside of the folder")


@pytest.mark.parametrize("kind", ["sharded", "sharded_bin"])
def test_tensor_in_two_shards(kind, model_copy, tmp_path):
    path = model_copy(kind)
    shards = sorted({*json.loads(index_of(path).read_text())["weight_map"].values()})
    read, write = (load_file, save_file) if kind == "sharded" else (torch.load, torch.save)
    name, value = next(iter(read(path / shards[0]).items()))
    write({**read(path / shards[-1]), name: value + 1}, path / shards[-1])
    with pytest.raises(CheckpointError, match=f"'{name}' is in .* too"):
        convert(path, tmp_path / "target")


def test_single_file_beside_shards(model_copy, model_folders, tmp_path):
    path = model_copy("sharded")
    shutil.copy(model_folders / "single/model.safetensors", path)
    with pytest.raises(CheckpointError, match="holds both"):
        convert(path, tmp_path / "target")


@pytest.mark.parametrize("damage", ["deep", "twice", "nan", "many"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_hostile_json(name, damage, model_copy, guard):
    path = model_copy("single")
    (path / name).write_text(JSON[damage][0])
    outcome = guard.run("convert_to", folder=path, target=path.parent / "target")
    if name != "config.json" and damage == "many":  # a companion may be larger, and this one says nothing
        assert not outcome.kinds or "CheckpointError" in outcome.kinds, outcome
        return
    assert "CheckpointError" in outcome.kinds and name in outcome.message, outcome


@pytest.mark.parametrize("name", ["tokenizer.json", "preprocessor_config.json", "tokenizer.model"])
def test_companion_of_a_terabyte(name, model_copy, guard):
    path = model_copy("single")
    (path / name).touch()
    os.truncate(path / name, 2**40)
    guard.refused("convert_to", name, folder=path, target=path.parent / "target")


def test_numbers_of_files_without_end(tmp_path, guard):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/params.json").write_text("{}")
    (tmp_path / f"source/consolidated.{10**100}.pth").touch()
    guard.refused("look", "consolidated.0+.pth missing", folder=tmp_path / "source")


@pytest.mark.parametrize("family", ["clip", "metaclip_2"])
@pytest.mark.parametrize("value", [5, {"a": 1}, [["CLIPModel"]], [None]])
def test_odd_architectures_of_a_tower(value, family, tmp_path, guard):
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = dict(
        hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=28
    )
    CLIPVisionModel(CLIPVisionConfig(**sizes, patch_size=14)).save_pretrained(tmp_path / "tower")
    edit(tmp_path / "tower/config.json", architectures=value, model_type=f"{family}_vision_model")
    outcome = guard.run("look", folder=tmp_path / "tower")
    assert not outcome.kinds or "CheckpointError" in outcome.kinds, outcome


def test_file_of_either_format_under_any_name(tmp_path):
    (tmp_path / "x.bin").write_bytes(safetensors({"x": entry([1], 0, 4)}, b"\0\0\x80\x3f"))
    assert open_weights(tmp_path / "x.bin")["x"].read().tolist() == [1.0]
    torch.save({"y": torch.ones(1)}, tmp_path / "y.bin")
    assert open_pickle(tmp_path / "y.bin")[0]["y"].read().tolist() == [1.0]


def test_pipe_in_the_place_of_weights(tmp_path, guard):
    os.mkfifo(tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"x\.pth: is a pipe"):
        open_weights(tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"x\.pth: is a pipe"):
        open_pickle(tmp_path / "x.pth")
