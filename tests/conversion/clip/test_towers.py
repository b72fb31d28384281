"""Converted towers of open_clip, CLIP and MetaCLIP 2 compute the features of the original classes."""

import json
import math
import os

import open_clip
import pytest
import torch
from open_clip.model import _build_vision_tower
from open_clip.transformer import QuickGELU
from PIL import Image
from safetensors.torch import load_file
from support.towers import (
    EMBED,
    GRID,
    HEADS_HERE,
    WIDTH,
    check_close,
    clip_fields,
    load_tower,
    open_clip_config,
    open_clip_tower,
    pictures,
    randomize,
    visual_state,
    write_open_clip,
)
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    Llama4VisionConfig,
    Llama4VisionModel,
    MetaClip2Config,
    MetaClip2Model,
    MetaClip2VisionConfig,
    MetaClip2VisionModel,
    MetaClip2VisionModelWithProjection,
)

import llamoe
from llamoe.configuration import preset
from llamoe.conversion import open_checkpoint
from llamoe.conversion.convert_vision import convert_vision
from llamoe.conversion.open import open_tower

ACTIVATIONS = {"gelu": nn.GELU, "quick_gelu": QuickGELU}
# Model class, configuration class and activation.
CLIPS = {
    "clip": (CLIPVisionModelWithProjection, CLIPVisionConfig, "gelu"),
    "clip-bare": (CLIPVisionModel, CLIPVisionConfig, "quick_gelu"),
    "metaclip-2": (MetaClip2VisionModelWithProjection, MetaClip2VisionConfig, "quick_gelu"),
    "metaclip-2-bare": (MetaClip2VisionModel, MetaClip2VisionConfig, "gelu"),
}
WHOLE_CLIPS = {"clip": (CLIPModel, CLIPConfig), "metaclip-2": (MetaClip2Model, MetaClip2Config)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_folder_of_open_clip_gives_its_features(tmp_path, activation, record_parity):
    reference = randomize(open_clip_tower(ACTIVATIONS[activation]))
    config = open_clip_config(activation == "quick_gelu")
    source = write_open_clip(tmp_path / "source", visual_state(reference), config)
    report = convert_vision(source, tmp_path / "tower")
    ours = load_tower(tmp_path / "tower")
    with torch.no_grad():
        pooled, tokens = reference(pictures())
        result = ours(pictures())
    for name, features, expected in (
        ("MetaCLIP patch tokens", result.last_hidden_state, tokens),
        ("MetaCLIP image embedding", result.pooler_output, pooled),
    ):
        difference = check_close(features, expected)
        record_parity(name, "open_clip VisionTransformer", "float32", difference, f"converted, {activation}")
    assert (ours.config.hidden_act, ours.config.num_attention_heads) == (activation, HEADS_HERE)
    assert report.kind == "open_clip" and report.to == "tower" and not report.dry_run
    assert any(activation in note and "open_clip_config.json" in note for note in report.notes)


@pytest.mark.parametrize("name", CLIPS)
def test_a_folder_of_transformers_gives_its_features(tmp_path, name, record_parity):
    model_class, config_class, activation = CLIPS[name]
    reference = randomize(model_class(config_class(**clip_fields(activation, layer_norm_eps=1e-4))))
    reference.save_pretrained(tmp_path / "source")
    # One case as a .bin file with a buffer that transformers before 4.31 has saved.
    file, buffer = tmp_path / "source" / "model.safetensors", "vision_model.embeddings.position_ids"
    if name == "clip":
        content = load_file(file) | {buffer: torch.arange(GRID**2 + 1)[None]}
        torch.save(content, file.with_name("pytorch_model.bin"))
        file.unlink()
    report = convert_vision(tmp_path / "source", tmp_path / "tower")
    ours = load_tower(tmp_path / "tower")
    with torch.no_grad():
        expected = reference(pictures(), output_hidden_states=True)
        result = ours(pictures(), output_hidden_states=True)
    has_projection = "Projection" in model_class.__name__
    pooled = expected.image_embeds if has_projection else expected.pooler_output
    assert (ours.config.projection_dim, ours.config.norm_eps) == (EMBED if has_projection else None, 1e-4)
    difference = check_close(result.pooler_output, pooled)
    for state, theirs in zip(result.hidden_states, expected.hidden_states, strict=True):
        check_close(torch.cat([state[:, -1:], state[:, :-1]], dim=1), theirs)
    note = f"converted, {activation}"
    record_parity("MetaCLIP image embedding", model_class.__name__, "float32", difference, note)
    assert report.kind == "clip" and ours.config.hidden_act == activation
    assert list(report.dropped) == [buffer] * (name == "clip")


# Whole models, whose text towers are left out


@pytest.mark.parametrize("name", WHOLE_CLIPS)
def test_a_whole_model_of_transformers_gives_its_tower_and_processor(tmp_path, name):
    model_class, config_class = WHOLE_CLIPS[name]
    text = dict(
        hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, vocab_size=30
    )
    config = config_class(vision_config=clip_fields("gelu"), text_config=text, projection_dim=EMBED)
    model = randomize(model_class(config))
    model.save_pretrained(tmp_path / "source")
    settings = {"image_mean": [0.1, 0.2, 0.3], "image_processor_type": "CLIPImageProcessor"}
    (tmp_path / "source" / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    report = convert_vision(tmp_path / "source", tmp_path / "tower")
    vision = {name for name in model.state_dict() if name.startswith(("vision_model.", "visual_"))}
    assert report.dropped.keys() == model.state_dict().keys() - vision
    assert all(report.dropped.values())
    loaded = AutoImageProcessor.from_pretrained(tmp_path / "tower")
    assert list(loaded.image_mean) == [0.1, 0.2, 0.3]
    with torch.no_grad():
        features = model.visual_projection(model.vision_model(pictures()).pooler_output)
        check_close(load_tower(tmp_path / "tower")(pictures()).pooler_output, features)


def test_a_whole_model_of_open_clip_gives_its_tower_and_licence(tmp_path):
    config = open_clip_config(preprocess={"resize_mode": "squash"})
    text = open_clip.model.CLIPTextCfg(context_length=8, vocab_size=20, width=32, heads=2, layers=1)
    model = open_clip.CLIP(EMBED, config["model_cfg"]["vision_cfg"], text, quick_gelu=True).eval()
    source = write_open_clip(tmp_path / "source", model.state_dict(), config)
    # The config.json of timm, as folders of open_clip on the Hub have it.
    (source / "config.json").write_text('{"architecture": "vit_base_patch32_clip_224"}')
    (source / "LICENSE").write_text("CC-BY-NC 4.0")
    report = convert_vision(source, tmp_path / "tower")
    with torch.no_grad():
        expected = model.encode_image(pictures())
        check_close(load_tower(tmp_path / "tower")(pictures()).pooler_output, expected)
    assert {"positional_embedding", "text_projection", "logit_scale"} <= report.dropped.keys()
    assert not any(name.startswith("visual.") for name in report.dropped)
    assert (tmp_path / "tower" / "LICENSE").read_text() == "CC-BY-NC 4.0"
    assert open_checkpoint(source).kind == "open_clip"


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_checkpoint_of_open_clips_training_is_read(tmp_path, wrapped):
    reference = randomize(open_clip_tower())
    state = visual_state(reference, "module.visual.")
    state["module.logit_scale"] = torch.tensor(2.0)
    state["module.text.transformer.resblocks.0.ln_1.weight"] = torch.ones(3)
    source = write_open_clip(tmp_path / "source", {}, open_clip_config())
    (source / "open_clip_model.safetensors").unlink()
    file = source / "open_clip_pytorch_model.bin"
    torch.save({"epoch": 1, "state_dict": state} if wrapped else state, file)
    report = convert_vision(file, tmp_path / "tower")
    assert set(report.dropped) == {"logit_scale", "text.transformer.resblocks.0.ln_1.weight"}
    with torch.no_grad():
        check_close(load_tower(tmp_path / "tower")(pictures()).last_hidden_state, reference(pictures())[1])


def test_the_result_loads_with_auto_classes(tmp_path):
    reference = randomize(open_clip_tower())
    source = write_open_clip(tmp_path / "source", visual_state(reference), open_clip_config())
    convert_vision(source, tmp_path / "tower", dtype="bfloat16")
    model = AutoModel.from_pretrained(tmp_path / "tower")
    assert type(model) is llamoe.LlamoeVisionModel and model.dtype == torch.bfloat16
    expected = reference.state_dict()["transformer.resblocks.2.mlp.c_fc.weight"].bfloat16()
    assert torch.equal(model.state_dict()["model.layers.2.mlp.fc1.weight"], expected)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "tower")
    pixels = processor(Image.new("RGB", (90, 50), "teal"), return_tensors="pt").pixel_values
    assert model(pixels).last_hidden_state.shape == (1, GRID**2, WIDTH)


# What describes a tower


def test_a_name_of_open_clips_describes_a_bare_file(tmp_path):
    """With open_clip's name, a file gives the features of the tower that open_clip loads from it."""
    described = open_clip_config(layers=2, norm_kwargs={"eps": 1e-3})["model_cfg"]
    described["text_cfg"] = {"context_length": 8, "vocab_size": 20, "width": 32, "heads": 2, "layers": 1}
    (tmp_path / "ViT-tiny.json").write_text(json.dumps(described))
    open_clip.add_model_config(tmp_path / "ViT-tiny.json")
    file = tmp_path / "weights.pt"
    torch.save(randomize(open_clip.create_model("ViT-tiny", load_weights=False)).state_dict(), file)
    reference = open_clip.create_model("ViT-tiny", pretrained=str(file)).eval()
    convert_vision(file, tmp_path / "tower", model="ViT-tiny")
    with torch.no_grad():
        features = load_tower(tmp_path / "tower")(pictures()).pooler_output
        check_close(features, reference.encode_image(pictures()))
    for message, name in {
        "the configuration has": "ViT-B-32",
        "model = 'ViT-B32'": "ViT-B32",
        "model = 'hf-hub:timm/some'": "hf-hub:timm/some",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_tower(file, model=name)


def test_one_description_is_needed_and_no_second_one(tmp_path):
    file = write_open_clip(tmp_path, visual_state(open_clip_tower()))
    named = file.rename(tmp_path / "ViT-H-14-quickgelu-metaclip_fullcc.safetensors")
    with pytest.raises(ValueError, match="Give open_clip's name of the model, .*or put open_clip_config"):
        convert_vision(named, tmp_path / "tower")
    assert not (tmp_path / "tower").exists()
    source = write_open_clip(tmp_path / "a", visual_state(open_clip_tower()), open_clip_config(False))
    with pytest.raises(ValueError, match="open_clip_config.json describes the tower"):
        open_tower(source, model="ViT-L-14-quickgelu")
    CLIPVisionModel(CLIPVisionConfig(**clip_fields())).save_pretrained(tmp_path / "clip")
    with pytest.raises(ValueError, match="model = 'ViT-B-32'.*only a file of open_clip"):
        open_tower(tmp_path / "clip", model="ViT-B-32")


def test_a_published_architecture_has_its_published_sizes(tmp_path):
    """The file has the tensors of open_clip's ViT-B-32-quickgelu, with a hole in place of the weights."""
    described = open_clip.get_model_config("ViT-B-32-quickgelu")
    with torch.device("meta"):
        tower = _build_vision_tower(described["embed_dim"], described["vision_cfg"], described["quick_gelu"])
    header, end = {}, 0
    for name, value in tower.state_dict().items():
        begin, end = end, end + 4 * math.prod(value.shape)
        header[f"visual.{name}"] = {
            "dtype": "F32",
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    encoded, file = json.dumps(header).encode(), tmp_path / "weights.safetensors"
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    os.truncate(file, 8 + len(encoded) + end)
    opened = open_tower(file, model="ViT-B-32-quickgelu")
    written = {"architectures": None, "dtype": None}  # said where a folder is written
    assert opened.config.to_dict() | written == preset("metaclip-b32").to_dict() | written
    heads = {block.attn.num_heads for block in tower.transformer.resblocks}
    assert heads == {opened.config.num_attention_heads}


def test_a_tower_of_llama_4_takes_larger_pictures(tmp_path):
    config = Llama4VisionConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=192, image_size=24, patch_size=6,
        projector_input_dim=20, projector_output_dim=20, vision_output_dim=20,
    )  # fmt: skip
    Llama4VisionModel(config).save_pretrained(tmp_path / "source")
    convert_vision(tmp_path / "source", tmp_path / "tower", image_size=36)
    tower = load_tower(tmp_path / "tower")
    assert tower.config.use_rope and tower(pictures(36)).last_hidden_state.shape == (3, 9, 20)
    with pytest.raises(ValueError, match="picture has 5 by 5"):
        convert_vision(tmp_path / "source", tmp_path / "odd", image_size=30)
