"""Towers that cannot be converted: the message names file, tensor or field, and nothing is written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.towers import (
    INNER,
    PATCH,
    SIZE,
    WIDTH,
    clip_fields,
    open_clip_config,
    open_clip_tower,
    visual_state,
    write_open_clip,
)
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion.convert_vision import convert_vision
from llamoe.conversion.open import open_tower

BLOCK = "visual.transformer.resblocks.1"


def add(name, *shape, dtype=torch.float32):
    return lambda state: state.update({name: torch.zeros(shape, dtype=dtype)})


def remove(*names):
    return lambda state: [state.pop(name) for name in names]


CHANGES = {
    "LayerScale": (add(f"{BLOCK}.ls_1.gamma", WIDTH), r"unknown tensor .*resblocks.1.ls_1.gamma"),
    "no_ln_pre": (remove("visual.ln_pre.weight", "visual.ln_pre.bias"), "layernorm_pre.weight, layernorm_pre.bias"),
    "patches not square": (add("visual.conv1.weight", WIDTH, 3, PATCH, PATCH - 1), r"conv1.weight: .*\[104, 90\]"),
    "grid not square": (add("visual.positional_embedding", 57, WIDTH), r"positional_embedding: .*\[57, 104\]"),
    "missing projection": (remove("visual.proj"), r"visual_projection.weight missing"),
    "fused weight too short": (add(f"{BLOCK}.attn.in_proj_weight", 3 * WIDTH - 1, WIDTH), r"in_proj_weight has 311"),
    "quantized": (add(f"{BLOCK}.mlp.c_fc.weight", INNER, WIDTH, dtype=torch.int8), r"c_fc.weight: has dtype int8"),
}  # fmt: skip
# Fields of `vision_cfg` and of `preprocess_cfg`, and the error.
DESCRIPTIONS = [
    ({"pos_embed_type": "sin_cos_2d"}, {}, "pos_embed_type is 'sin_cos_2d'"),
    ({"final_ln_after_pool": True}, {}, "final_ln_after_pool"),
    ({"layers": 4}, {}, "model.layers.3.*missing"),
    ({"layers": 2}, {}, "has no model.layers.2"),
    ({"width": "wide"}, {}, "open_clip_config.json: cannot be read"),
    ({"image_size": [42, 48]}, {}, "image_size is .*must be square"),
    ({"act_kwargs": {"alpha": 2}}, {}, "act_kwargs"),
    ({}, {"resize_mode": "longest"}, "open_clip_config.json: resize_mode 'longest'"),
    ({}, {"interpolation": "nearest"}, "open_clip_config.json: interpolation 'nearest'"),
]
OF_CLIP = [
    (remove("visual_projection.weight"), {}, "visual_projection.weight missing"),
    (add("vision_model.extra", 2), {}, "unknown tensor vision_model.extra"),
    (None, {"image_size": [42, 48]}, "config.json: image_size is .*square"),
    (None, {"hidden_size": "wide"}, "config.json: cannot be read as clip.*hidden_size"),
    (None, {"num_attention_heads": 0}, "config.json: cannot be read as clip"),
]


def refused(source, message, target):
    with pytest.raises(CheckpointError, match=message) as error:
        convert_vision(source, target)
    assert str(source) in str(error.value)
    assert not target.exists()


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_are_not_a_tower_of_open_clip_are_named(tmp_path, name):
    change, message = CHANGES[name]
    state = visual_state(open_clip_tower())
    change(state)
    refused(write_open_clip(tmp_path / "source", state, open_clip_config()), message, tmp_path / "tower")


@pytest.mark.parametrize(("vision", "preprocess", "message"), DESCRIPTIONS)
def test_descriptions_of_towers_that_ours_cannot_be_are_named(tmp_path, vision, preprocess, message):
    config = open_clip_config(False, preprocess, **vision)
    source = write_open_clip(tmp_path / "source", visual_state(open_clip_tower()), config)
    refused(source, message, tmp_path / "tower")


@pytest.mark.parametrize(("change", "fields", "message"), OF_CLIP)
def test_folders_of_clip_that_do_not_fit_are_named(tmp_path, change, fields, message):
    source = tmp_path / "source"
    CLIPVisionModelWithProjection(CLIPVisionConfig(**clip_fields())).save_pretrained(source)
    if change:
        state = load_file(source / "model.safetensors")
        change(state)
        save_file(state, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **fields}))
    refused(source, message, tmp_path / "tower")


def test_sizes_of_pictures_that_do_not_fit_are_refused(tmp_path):
    source = write_open_clip(tmp_path / "source", visual_state(open_clip_tower()), open_clip_config())
    for image_size in (SIZE + 1, PATCH - 1, 0, -SIZE, 2.5, True, "42"):
        with pytest.raises(ValueError, match="image_size"):
            convert_vision(source, tmp_path / "tower", image_size=image_size)
    assert not (tmp_path / "tower").exists()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_is_no_tower_is_named_and_no_program_is_run(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "text.safetensors")
    # A TorchScript archive, as OpenAI publishes CLIP.
    torch.jit.save(torch.jit.trace(torch.nn.Linear(3, 3), torch.zeros(1, 3)), tmp_path / "ViT-B-32.pt")
    for name, words in {
        "nothing": "no such file or folder",
        "empty": "empty",
        "text.pt": "text.pt",
        "text.safetensors": "text.safetensors",
        "ViT-B-32.pt": "ViT-B-32.pt: .*TorchScript",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            open_tower(tmp_path / name)
