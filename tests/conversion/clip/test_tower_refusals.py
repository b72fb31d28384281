"""Towers that cannot be converted: the message names file, tensor or field, and nothing is written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.towers import (
    INNER,
    PATCH,
    WIDTH,
    clip_fields,
    open_clip_config,
    open_clip_tower,
    visual_state,
    write_open_clip,
)
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from llamoe.configuration.errors import CheckpointError
from llamoe.conversion.convert_vision import convert_vision, open_tower

BLOCK = "visual.transformer.resblocks.1"


def add(name, *shape, dtype=torch.float32):
    return lambda state: state.update({name: torch.zeros(shape, dtype=dtype)})


def remove(*names):
    return lambda state: [state.pop(name) for name in names]


def spoil(name, value):
    def change(state):
        state[name] = state[name].clone()
        state[name].view(-1)[7] = value

    return change


def remove_layer(state):
    for name in [name for name in state if name.startswith(f"{BLOCK}.")]:
        del state[name]


CHANGES = {
    "LayerScale": (add(f"{BLOCK}.ls_1.gamma", WIDTH), r"unknown tensor .*resblocks.1.ls_1.gamma"),
    "attentional pool": (add("visual.attn_pool.query", 4, WIDTH), r"unknown tensor .*attn_pool.query"),
    "no_ln_pre": (remove("visual.ln_pre.weight", "visual.ln_pre.bias"), r"ln_pre.weight, visual.ln_pre.bias missing"),
    "qk norm": (add(f"{BLOCK}.attn.ln_q.weight", 26), r"unknown tensor .*ln_q.weight"),
    "timm": (add("visual.trunk.cls_token", 1, 1, WIDTH), r"unknown tensor visual.trunk.cls_token"),
    "resnet": (add("visual.layer1.0.conv1.weight", 4, 4, 1, 1), r"unknown tensor visual.layer1"),
    "scaled feed-forward": (add(f"{BLOCK}.mlp.ln.weight", INNER), r"unknown tensor .*mlp.ln.weight"),
    "patches not square": (add("visual.conv1.weight", WIDTH, 3, PATCH, PATCH - 1), r"conv1.weight: patches of 6 by 5"),
    "a linear patch embedding": (add("visual.conv1.weight", WIDTH, 108), r"has shape \[104, 108\]; 4 axes"),
    "no class position": (add("visual.positional_embedding", 49, WIDTH), r"positional_embedding: 49 positions"),
    "grid not square": (add("visual.positional_embedding", 57, WIDTH), r"positional_embedding: 57 positions"),
    "no position": (add("visual.positional_embedding", 1, WIDTH), r"positional_embedding: 1 positions"),
    "missing position": (remove("visual.positional_embedding"), r"visual.positional_embedding is missing"),
    "missing projection": (remove("visual.proj"), r"visual.proj is missing"),
    "missing bias": (remove(f"{BLOCK}.attn.in_proj_bias"), r"resblocks.1.attn.in_proj_bias missing"),
    "missing layer": (remove_layer, r"resblocks.1.ln_1.weight.* missing"),
    "unknown in the tower": (add("visual.extra.weight", 3), r"unknown tensor visual.extra.weight"),
    "unknown beside the tower": (add("decoder.weight", 3), r"unknown tensor decoder.weight"),
    "leading zero": (add("visual.transformer.resblocks.01.ln_1.bias", WIDTH), r"unknown tensor .*01.ln_1.bias"),
    "fused weight too short": (add(f"{BLOCK}.attn.in_proj_weight", 3 * WIDTH - 1, WIDTH), r"in_proj_weight has 311"),
    "transposed": (add(f"{BLOCK}.mlp.c_fc.weight", WIDTH, INNER), r"c_fc.weight: .*\[104, 512\]"),
    "width": (add("visual.ln_post.weight", WIDTH + 1), r"ln_post.weight: .*\[105\]"),
    "quantized": (add(f"{BLOCK}.mlp.c_fc.weight", INNER, WIDTH, dtype=torch.int8), r"c_fc.weight: has dtype int8"),
    "twice": (add("module.visual.class_embedding", WIDTH), r"is the same tensor as .*module.visual.class_embedding"),
    "NaN": (spoil(f"{BLOCK}.mlp.c_proj.weight", float("nan")), r"c_proj.weight .*NaN"),
    "infinity": (spoil("visual.class_embedding", float("inf")), r"class_embedding .*infinity"),
}  # fmt: skip


class TestOpenClip:
    @pytest.mark.parametrize("name", CHANGES)
    def test_tensors(self, tmp_path, name):
        change, message = CHANGES[name]
        state = visual_state(open_clip_tower())
        change(state)
        source = write_open_clip(tmp_path / "source", state, open_clip_config())
        with pytest.raises(CheckpointError, match=message) as error:
            convert_vision(source, tmp_path / "tower")
        assert str(source) in str(error.value)
        assert not (tmp_path / "tower").exists()

    @pytest.mark.parametrize(
        ("vision", "message"),
        [
            ({"pos_embed_type": "sin_cos_2d"}, "pos_embed_type is 'sin_cos_2d'"),
            ({"pool_type": "avg"}, "pool_type is 'avg'"),
            ({"final_ln_after_pool": True}, "final_ln_after_pool"),
            ({"layers": 4}, "num_hidden_layers is said to be 4 by .*, 3 by the tensors of"),
            ({"width": 128}, "hidden_size is said to be 128 by .*, 104 by the tensors of"),
            ({"width": "wide"}, "vision_cfg cannot be read"),
            ({"mlp_ratio": float("inf")}, "vision_cfg cannot be read"),
            ({"image_size": 42.5}, "image_size is said to be 42.5 by"),
            ({"mlp_ratio": 4.0}, "intermediate_size is said to be 416 by"),
            ({"patch_size": 14}, "patch_size is said to be 14 by"),
            ({"patch_size": [6, 7]}, "patch_size is .*must be square"),
            ({"image_size": 48}, "image_size is said to be 48 by .*, 42 by the tensors of"),
            ({"image_size": [42, 48]}, "image_size is .*must be square"),
            ({"head_width": 0}, "vision_cfg cannot be read"),
            ({"norm_kwargs": {"eps": "small"}}, "vision_cfg cannot be read"),
            ({"act_kwargs": {"alpha": 2}}, "act_kwargs"),
        ],
    )
    def test_configuration(self, tmp_path, vision, message):
        config = open_clip_config(False, **vision)
        source = write_open_clip(tmp_path / "source", visual_state(open_clip_tower()), config)
        with pytest.raises(CheckpointError, match=message) as error:
            convert_vision(source, tmp_path / "tower")
        assert "open_clip_config.json" in str(error.value)
        assert not (tmp_path / "tower").exists()

    @pytest.mark.parametrize(
        ("content", "named"),
        [
            ("{", "JSON"),
            ("[]", "JSON"),
            ("{}", "vision_cfg"),
            ('{"model_cfg": []}', "vision_cfg"),
            ('{"model_cfg": {"vision_cfg": 3}}', "vision_cfg"),
            ({"resize_mode": "longest"}, "resize_mode 'longest'"),
            ({"interpolation": "nearest"}, "interpolation 'nearest'"),
            ({"mean": [0.5, 0.5]}, "mean|three numbers"),
            ({"std": "wide"}, "std|three numbers"),
            ({"std": [0.5, 0.0, 0.5]}, "std|positive numbers"),
            ({"model_cfg": {"embed_dim": 41}}, ", 40 by the tensors"),
            ({"model_cfg": {"quick_gelu": "yes"}}, "quick_gelu is 'yes'"),
        ],
    )
    def test_configuration_files(self, tmp_path, content, named):
        if not isinstance(content, str):
            change = content.get("model_cfg", {})
            config = open_clip_config(preprocess={} if change else content)
            config["model_cfg"] |= change
            content = json.dumps(config)
        source = write_open_clip(tmp_path / "source", visual_state(open_clip_tower()), open_clip_config())
        (source / "open_clip_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=f"open_clip_config.json.*({named})"):
            open_tower(source)


class TestClip:
    @pytest.mark.parametrize(
        ("change", "fields", "message"),
        [
            (remove("visual_projection.weight"), {}, "visual_projection.weight missing"),
            (remove("vision_model.pre_layrnorm.bias"), {}, "vision_model.pre_layrnorm.bias missing"),
            (add("embeddings.class_embedding", WIDTH), {}, "is the same tensor as"),
            (add("vision_model.extra", 2), {}, "unknown tensor vision_model.extra"),
            (
                None,
                {"hidden_size": 112},
                r"class_embedding of shape \[104\], but the configuration asks for \[112\]",
            ),
            (
                None,
                {"num_hidden_layers": 2},
                "layers.2.layer_norm1.bias: the model that the configuration describes has no",
            ),
            (
                None,
                {"image_size": 48},
                r"positional_embedding_vlm of shape \[50, 104\], but .* asks for \[65, 104\]",
            ),
            (None, {"image_size": [42, 48]}, "config.json: image_size is .*square"),
            (None, {"num_attention_heads": 5}, "config.json: .*num_attention_heads|heads"),
            (None, {"hidden_act": "swoosh"}, "hidden_act = 'swoosh': unknown activation"),
        ],
    )
    def test_folder(self, tmp_path, change, fields, message):
        source = tmp_path / "source"
        CLIPVisionModelWithProjection(CLIPVisionConfig(**clip_fields())).save_pretrained(source)
        if change:
            state = load_file(source / "model.safetensors")
            change(state)
            save_file(state, source / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, **fields}))
        with pytest.raises(CheckpointError, match=message) as error:
            convert_vision(source, tmp_path / "tower")
        assert str(source) in str(error.value)
        assert not (tmp_path / "tower").exists()

    def test_a_name_of_open_clip_has_no_meaning(self, tmp_path):
        CLIPVisionModel(CLIPVisionConfig(**clip_fields())).save_pretrained(tmp_path / "source")
        with pytest.raises(ValueError, match="model = 'ViT-B-32'.*not an open_clip checkpoint"):
            open_tower(tmp_path / "source", model="ViT-B-32")


class TestPlaces:
    def test_what_is_no_tower(self, tmp_path):
        with pytest.raises(CheckpointError, match="no such file or folder"):
            open_tower(tmp_path / "nothing")
        (tmp_path / "empty").mkdir()
        (tmp_path / "text.pt").write_text("hello")
        save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "text.safetensors")
        for name in ("empty", "text.pt", "text.safetensors"):
            with pytest.raises(CheckpointError, match=name):
                open_tower(tmp_path / name)

    @pytest.mark.filterwarnings("ignore:.*torch.jit")
    def test_a_program_is_not_run(self, tmp_path):
        """OpenAI's own files of CLIP are of this kind."""
        torch.jit.save(torch.jit.trace(torch.nn.Linear(3, 3), torch.zeros(1, 3)), tmp_path / "ViT-B-32.pt")
        with pytest.raises(CheckpointError, match=r"ViT-B-32.pt: .*TorchScript"):
            convert_vision(tmp_path / "ViT-B-32.pt", tmp_path / "tower")

    def test_siglip_is_refused_by_name(self, tmp_path):
        fields = clip_fields("gelu")
        fields.pop("projection_dim")
        SiglipVisionModel(SiglipVisionConfig(**fields)).save_pretrained(tmp_path / "source")
        with pytest.raises(CheckpointError, match="is not a tower"):
            convert_vision(tmp_path / "source", tmp_path / "tower")

    def test_options(self, tmp_path):
        source = write_open_clip(tmp_path / "source", visual_state(open_clip_tower()), open_clip_config())
        for option, message in (
            ({"to": "open_clip"}, "to = 'open_clip'"),
            ({"dtype": "int8"}, "dtype = 'int8'"),
        ):
            with pytest.raises(ValueError, match=message):
                convert_vision(source, tmp_path / "tower", **option)
        assert not (tmp_path / "tower").exists()
