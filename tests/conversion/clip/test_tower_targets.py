"""Towers from transformers' CLIP and MetaCLIP 2, and back to CLIP."""

import json
import math
import os

import open_clip
import pytest
import torch
from open_clip.model import _build_vision_tower
from safetensors.torch import load_file
from support.lazy_tensors import InMemory
from support.towers import (
    EMBED,
    GRID,
    HEADS_HERE,
    INNER,
    LAYERS,
    PATCH,
    SIZE,
    WIDTH,
    check_close,
    clip_fields,
    count_up,
    load_stock,
    load_tower,
    open_clip_config,
    open_clip_tower,
    pictures,
    randomize,
    visual_state,
    write_open_clip,
)
from transformers import (
    AutoImageProcessor,
    CLIPConfig,
    CLIPImageProcessor,
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
from llamoe.configuration.presets import PRESETS
from llamoe.configuration.vision import LlamoeVisionConfig
from llamoe.conversion.checkpoint import expected_shapes
from llamoe.conversion.clip.name_tables import CLIP, OPEN_CLIP
from llamoe.conversion.convert_vision import convert_vision, open_tower
from llamoe.conversion.io.name_table import read_through, write_through

# Each class, with each activation in turn.
TOWERS = [
    pytest.param(CLIPVisionModelWithProjection, CLIPVisionConfig, "gelu", id="clip"),
    pytest.param(CLIPVisionModel, CLIPVisionConfig, "quick_gelu", id="clip-bare"),
    pytest.param(MetaClip2VisionModelWithProjection, MetaClip2VisionConfig, "quick_gelu", id="metaclip-2"),
    pytest.param(MetaClip2VisionModel, MetaClip2VisionConfig, "gelu", id="metaclip-2-bare"),
]
METACLIP = [name for name in PRESETS if name.startswith("metaclip")][::3]


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

    @pytest.mark.parametrize("layout", ["prefix", "sharded", "bin", "legacy"])
    def test_files_of_all_kinds(self, tmp_path, layout):
        model = randomize(CLIPVisionModelWithProjection(CLIPVisionConfig(**clip_fields())))
        model.save_pretrained(tmp_path / "source", max_shard_size="300KB" if layout == "sharded" else "5GB")
        file = tmp_path / "source" / "model.safetensors"
        assert file.exists() == (layout != "sharded")
        if layout in ("bin", "legacy"):
            state = load_file(file)
            file.unlink()
            if layout == "legacy":  # with the buffer that releases before 4.31 saved
                state["vision_model.embeddings.position_ids"] = torch.arange(GRID**2 + 1)[None]
            torch.save(state, tmp_path / "source" / "pytorch_model.bin")
        report = convert_vision(tmp_path / "source", tmp_path / "tower")
        assert list(report.dropped) == (
            ["vision_model.embeddings.position_ids"] if layout == "legacy" else []
        )
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


class TestBack:
    @pytest.mark.parametrize(("activation", "has_projection"), [("gelu", True), ("quick_gelu", False)])
    def test_features_of_clip(self, tmp_path, activation, has_projection):
        ours = randomize(
            llamoe.LlamoeVisionModel(
                LlamoeVisionConfig(
                    **clip_fields(activation, projection_dim=EMBED if has_projection else None),
                    use_rope=False,
                    use_adapter=False,
                )
            )
        )
        ours.save_pretrained(tmp_path / "tower")
        report = convert_vision(tmp_path / "tower", tmp_path / "clip", to="clip")
        assert report.to == "clip" and (tmp_path / "clip" / report.files[0]).is_file()
        with torch.no_grad():
            expected = ours(pictures())
            model_class = CLIPVisionModelWithProjection if has_projection else CLIPVisionModel
            stock = load_stock(model_class, tmp_path / "clip")
            result = stock(pictures())
        check_close(result.image_embeds if has_projection else result.pooler_output, expected.pooler_output)
        assert stock.config.hidden_act == activation

    @pytest.mark.parametrize("has_projection", [True, False])
    def test_clip_round_trip(self, tmp_path, has_projection):
        model_class = CLIPVisionModelWithProjection if has_projection else CLIPVisionModel
        fields = clip_fields(projection_dim=EMBED if has_projection else 512)  # without one, stock's default
        model = count_up(model_class(CLIPVisionConfig(**fields)))
        model.save_pretrained(tmp_path / "source")
        CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=SIZE).save_pretrained(tmp_path / "source")
        convert_vision(tmp_path / "source", tmp_path / "tower")
        convert_vision(tmp_path / "tower", tmp_path / "back", to="clip")
        back = load_stock(model_class, tmp_path / "back")
        for name, value in model.state_dict().items():
            assert torch.equal(back.state_dict()[name], value), name
        assert (
            back.config.to_diff_dict() == load_stock(model_class, tmp_path / "source").config.to_diff_dict()
        )
        content = [(tmp_path / name / "preprocessor_config.json").read_text() for name in ("source", "back")]
        assert json.loads(content[0]) == json.loads(content[1])

    def test_a_tower_of_llama_4_is_refused(self, tmp_path):
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
        with pytest.raises(ValueError, match="rotates its patches .*use_rope = True"):
            convert_vision(tmp_path / "source", tmp_path / "clip", to="clip")
        assert not (tmp_path / "clip").exists()
        convert_vision(tmp_path / "source", tmp_path / "tower", image_size=36)
        tower = load_tower(tmp_path / "tower")
        assert tower.config.use_rope and tower(pictures(36)).last_hidden_state.shape == (3, 9, 20)
        with pytest.raises(ValueError, match="grid of 5 by 5"):
            convert_vision(tmp_path / "source", tmp_path / "odd", image_size=30)

    def test_the_tower_of_a_multimodal_model(self, tmp_path):
        fields = dict(hidden_size=32, intermediate_size=20, intermediate_size_mlp=24, num_hidden_layers=2)
        heads = dict(
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=2, vocab_size=50
        )
        tower = clip_fields(image_size=8 * PATCH, projection_dim=None)
        adapter = dict(projector_input_dim=20, projector_output_dim=28, vision_output_dim=28)
        config = llamoe.LlamoeConfig(
            text_config={**fields, **heads},
            vision_config={**tower, **adapter, "use_rope": False},
            image_token_index=49,
            boi_token_index=47,
            eoi_token_index=48,
        )
        model = randomize(llamoe.LlamoeForConditionalGeneration(config))
        model.save_pretrained(tmp_path / "model")
        report = convert_vision(tmp_path / "model", tmp_path / "clip", to="clip")
        stock = load_stock(CLIPVisionModel, tmp_path / "clip")
        x = pictures(8 * PATCH)
        with torch.no_grad():
            ours = model.vision_model(x, output_hidden_states=True).hidden_states[-1]
            theirs = stock(x, output_hidden_states=True).hidden_states[-1]
        check_close(torch.cat([ours[:, -1:], ours[:, :-1]], dim=1), theirs)
        assert "language_model.lm_head.weight" in report.dropped
        assert "adapter" in report.dropped["vision_adapter.mlp.fc1.weight"]


class TestPresets:
    @pytest.mark.parametrize("name", METACLIP)
    def test_every_published_tower_goes_there_and_back(self, name):
        config = preset(name)
        shapes = expected_shapes(config)
        ours = {key: InMemory(torch.empty(shape, device="meta")) for key, shape in shapes.items()}
        grid, width = config.grid_size, config.hidden_size
        for table, fused in ((OPEN_CLIP, True), (CLIP, False)):
            (theirs,) = write_through(table, ours, 1, config)
            assert len(theirs) == 8 + (12 if fused else 16) * config.num_hidden_layers
            prefix = "visual." if fused else "vision_model."
            assert all(key.startswith((prefix, "visual_projection")) for key in theirs)
            back, dropped = read_through(table, [theirs], config)
            assert {key: tensor.shape for key, tensor in back.items()} == shapes
            assert dropped == {}
        (theirs,) = write_through(OPEN_CLIP, ours, 1, config)
        assert theirs["visual.positional_embedding"].shape == (grid**2 + 1, width)
        assert theirs["visual.conv1.weight"].shape == (width, 3, config.patch_size, config.patch_size)
        assert theirs["visual.proj"].shape == (width, config.projection_dim)
        last = f"visual.transformer.resblocks.{config.num_hidden_layers - 1}"
        assert theirs[f"{last}.attn.in_proj_weight"].shape == (3 * width, width)

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


def test_an_opened_tower_has_what_assembling_needs(tmp_path):
    source = write_open_clip(tmp_path / "source", visual_state(open_clip_tower()), open_clip_config())
    checkpoint = open_tower(source)
    assert checkpoint.kind == "open_clip" and type(checkpoint.config) is LlamoeVisionConfig
    assert checkpoint.tensors["class_embedding"].shape == (WIDTH,)
    assert checkpoint.tensors[f"model.layers.{LAYERS - 1}.mlp.fc2.weight"].shape == (WIDTH, INNER)
    processor = json.loads(checkpoint.companions["preprocessor_config.json"])
    assert processor["image_mean"] == [0.48145466, 0.4578275, 0.40821073]
    assert (checkpoint.config.num_attention_heads, checkpoint.config.image_size) == (HEADS_HERE, SIZE)
