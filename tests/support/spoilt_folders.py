"""Folders of small models in all forms that are read, for tests that spoil the files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.models import dense_config, make_asymmetric, multimodal_config, text_config, vision_config

import llamoe
from llamoe.configuration.errors import CheckpointError

KINDS = ["single", "sharded", "bin", "sharded_bin"]
FAMILIES = {
    "dense": (llamoe.LlamoeDenseForCausalLM, dense_config),
    "text": (llamoe.LlamoeForCausalLM, text_config),
    "tower": (llamoe.LlamoeVisionModel, vision_config),
    "multimodal": (llamoe.LlamoeForConditionalGeneration, multimodal_config),
}


def save_all(place: Path) -> None:
    """Save one dense model in all forms that transformers reads, and one model of each family."""
    for family, (model_class, config) in FAMILIES.items():
        make_asymmetric(model_class(config())).save_pretrained(place / family)
    model = llamoe.LlamoeDenseForCausalLM.from_pretrained(place / "dense")
    shutil.copytree(place / "dense", place / "single")
    model.save_pretrained(place / "sharded", max_shard_size="60KB")
    weights = model.state_dict()
    for kind in ("bin", "sharded_bin"):
        shutil.copytree(place / "dense", place / kind, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(weights, place / "bin/pytorch_model.bin")
    names = list(weights)
    parts = {"pytorch_model-1.bin": names[:9], "pytorch_model-2.bin": names[9:]}
    for file, part in parts.items():
        torch.save({name: weights[name] for name in part}, place / "sharded_bin" / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (place / "sharded_bin/pytorch_model.bin.index.json").write_text(json.dumps(index))


def edit(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def index_of(folder):
    return next(folder.glob("*.index.json"))


def refused(folder, says, name="LlamoeDenseForCausalLM", **options):
    with pytest.raises(CheckpointError, match=says) as caught:
        getattr(llamoe, name).from_pretrained(folder, **options)
    assert all(isinstance(caught.value, kind) for kind in (OSError, ValueError, RuntimeError))
    assert len(str(caught.value)) < 700, "a message, not a dump"
    return str(caught.value)
