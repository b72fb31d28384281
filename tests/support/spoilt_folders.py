"""Save small models as safetensors and .bin, whole and sharded, for tests that damage copies of the files."""

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


def save_all(root: Path) -> None:
    """Save a model of each of `FAMILIES`, and the dense one in all files of `KINDS`, to folders of these names."""
    for family, (model_class, config) in FAMILIES.items():
        make_asymmetric(model_class(config())).save_pretrained(root / family)
    model = llamoe.LlamoeDenseForCausalLM.from_pretrained(root / "dense")
    shutil.copytree(root / "dense", root / "single")
    model.save_pretrained(root / "sharded", max_shard_size="60KB")
    weights = model.state_dict()
    for kind in ("bin", "sharded_bin"):
        shutil.copytree(root / "dense", root / kind, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(weights, root / "bin/pytorch_model.bin")
    names = list(weights)
    parts = {"pytorch_model-1.bin": names[:9], "pytorch_model-2.bin": names[9:]}
    for file, part in parts.items():
        torch.save({name: weights[name] for name in part}, root / "sharded_bin" / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (root / "sharded_bin/pytorch_model.bin.index.json").write_text(json.dumps(index))


def edit(path, **changes):
    """Set keys of a JSON file."""
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def index_of(folder):
    """Return the path of a sharded folder's index."""
    return next(folder.glob("*.index.json"))


def refused(folder, says, name="LlamoeDenseForCausalLM", **options):
    """Check that loading a folder raises a short `CheckpointError` that matches `says`; return its text."""
    with pytest.raises(CheckpointError, match=says) as caught:
        getattr(llamoe, name).from_pretrained(folder, **options)
    # Callers of transformers' loaders may expect any of these classes.
    assert all(isinstance(caught.value, kind) for kind in (OSError, ValueError, RuntimeError))
    assert len(str(caught.value)) < 700, "a message, not a dump"
    return str(caught.value)
