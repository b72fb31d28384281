"""Towers from transformers' CLIP and MetaCLIP 2, and from open_clip at a published size."""

import json
import math
import os

import open_clip
import pytest
import torch
from open_clip.model import _build_vision_tower
from safetensors.torch import load_file
from support.towers import (
    EMBED,
    GRID,
    check_close,
    clip_fields,
    load_tower,
    pictures,
    randomize,
)
from transformers import (
    AutoImageProcessor,
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

from llamoe.configuration import preset
from llamoe.conversion.convert_vision import convert_vision
from llamoe.conversion.open import open_tower

# Each class, with each activation in turn.
TOWERS = [
    pytest.param(CLIPVisionModelWithProjection, CLIPVisionConfig, "gelu", id="clip"),
    pytest.param(CLIPVisionModel, CLIPVisionConfig, "quick_gelu", id="clip-bare"),
    pytest.param(MetaClip2VisionModelWithProjection, MetaClip2VisionConfig, "quick_gelu", id="metaclip-2"),
    pytest.param(MetaClip2VisionModel, MetaClip2VisionConfig, "gelu", id="metaclip-2-bare"),
]


class TestFromClip:
    @pytest.mark.parametrize(("model_class", "config_class", "activation"), TOWERS)
    def test_tower(self, tmp_path, model_class, config_class, activation, record_parity):
        reference = randomize(model_class(config_class(**clip_fields(activation, layer_norm_eps=1e-4))))
        reference.save_pretrained(tmp_path / "source")
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
        record_parity(
            "MetaCLIP image embedding",
            model_class.__name__,
            "float32",
            difference,
            f"converted, {activation}",
        )
        assert report.kind == "clip" and ours.config.hidden_act == activation

    def test_a_file_with_the_buffer_that_releases_before_4_31_saved(self, tmp_path):
        model = randomize(CLIPVisionModelWithProjection(CLIPVisionConfig(**clip_fields())))
        model.save_pretrained(tmp_path / "source")
        file, buffer = tmp_path / "source" / "model.safetensors", "vision_model.embeddings.position_ids"
        torch.save(
            load_file(file) | {buffer: torch.arange(GRID**2 + 1)[None]}, file.with_name("pytorch_model.bin")
        )
        file.unlink()
        report = convert_vision(tmp_path / "source", tmp_path / "tower")
        assert list(report.dropped) == [buffer]
        with torch.no_grad():
            check_close(
                load_tower(tmp_path / "tower")(pictures()).pooler_output, model(pictures()).image_embeds
            )

    @pytest.mark.parametrize(
        ("model_class", "config_class"), [(CLIPModel, CLIPConfig), (MetaClip2Model, MetaClip2Config)]
    )
    def test_whole_model(self, tmp_path, model_class, config_class):
        text = dict(
            hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, vocab_size=30
        )
        config = config_class(vision_config=clip_fields("gelu"), text_config=text, projection_dim=EMBED)
        model = randomize(model_class(config))
        model.save_pretrained(tmp_path / "source")
        processor = {
            "image_processor": {"image_mean": [0.1, 0.2, 0.3], "image_processor_type": "CLIPImageProcessor"}
        }
        (tmp_path / "source" / "processor_config.json").write_text(json.dumps(processor))
        report = convert_vision(tmp_path / "source", tmp_path / "tower")
        vision = {name for name in model.state_dict() if name.startswith(("vision_model.", "visual_"))}
        assert report.dropped.keys() == model.state_dict().keys() - vision
        assert all(report.dropped.values())
        loaded = AutoImageProcessor.from_pretrained(tmp_path / "tower")
        assert list(loaded.image_mean) == [0.1, 0.2, 0.3]
        ours = load_tower(tmp_path / "tower")
        with torch.no_grad():
            features = model.visual_projection(model.vision_model(pictures()).pooler_output)
            check_close(ours(pictures()).pooler_output, features)
        assert ours.config.hidden_act == "gelu"


class TestSizes:
    def test_a_tower_of_llama_4_for_larger_pictures(self, tmp_path):
        config = Llama4VisionConfig(
            hidden_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=192,
            image_size=24,
            patch_size=6,
            projector_input_dim=20,
            projector_output_dim=20,
            vision_output_dim=20,
        )
        Llama4VisionModel(config).save_pretrained(tmp_path / "source")
        convert_vision(tmp_path / "source", tmp_path / "tower", image_size=36)
        tower = load_tower(tmp_path / "tower")
        assert tower.config.use_rope and tower(pictures(36)).last_hidden_state.shape == (3, 9, 20)
        with pytest.raises(ValueError, match="grid of 5 by 5"):
            convert_vision(tmp_path / "source", tmp_path / "odd", image_size=30)

    def test_published_size(self, tmp_path):
        """ViT-B-32 as open_clip builds it from its name, with holes for numbers; the name says the activation."""
        described = open_clip.get_model_config("ViT-B-32-quickgelu")
        with torch.device("meta"):
            tower = _build_vision_tower(
                described["embed_dim"], described["vision_cfg"], described["quick_gelu"]
            )
        shapes = {f"visual.{name}": list(value.shape) for name, value in tower.state_dict().items()}
        header, end = {}, 0
        for name, shape in shapes.items():
            begin, end = end, end + 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        encoded, file = json.dumps(header).encode(), tmp_path / "weights.safetensors"
        file.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
        os.truncate(file, 8 + len(encoded) + end)
        with pytest.raises(ValueError, match="activation"):
            open_tower(file)
        opened = open_tower(file, model="ViT-B-32-quickgelu")
        written = {"architectures": None, "dtype": None}  # said where a folder is written
        assert opened.config.to_dict() | written == preset("metaclip-b32").to_dict() | written
        heads = {block.attn.num_heads for block in tower.transformer.resblocks}
        assert heads == {opened.config.num_attention_heads}
