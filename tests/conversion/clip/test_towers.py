"""Towers from open_clip: its transformer's features, its releases' activations."""

import json

import open_clip
import pytest
import torch
from open_clip.transformer import QuickGELU
from PIL import Image
from support.towers import (
    EMBED,
    GRID,
    HEADS_HERE,
    WIDTH,
    check_close,
    load_tower,
    open_clip_config,
    open_clip_tower,
    pictures,
    randomize,
    visual_state,
    write_open_clip,
)
from torch import nn
from transformers import AutoImageProcessor, AutoModel

import llamoe
from llamoe.conversion import open_checkpoint
from llamoe.conversion.convert_vision import convert_vision
from llamoe.conversion.open import open_tower

ACTIVATIONS = [
    pytest.param(nn.GELU, "gelu", id="gelu"),
    pytest.param(QuickGELU, "quick_gelu", id="quick_gelu"),
]


def add_architecture(file, quick_gelu=True, **vision):
    """Tell open_clip of an architecture that has the file's name."""
    described = open_clip_config(quick_gelu, **vision)["model_cfg"]
    described["text_cfg"] = {"context_length": 8, "vocab_size": 20, "width": 32, "heads": 2, "layers": 1}
    file.write_text(json.dumps(described))
    open_clip.add_model_config(file)


class TestFromOpenClip:
    @pytest.mark.parametrize(("module", "activation"), ACTIVATIONS)
    def test_folder_gives_the_same_features(self, tmp_path, module, activation, record_parity):
        reference = randomize(open_clip_tower(module))
        config = open_clip_config(activation == "quick_gelu")
        source = write_open_clip(tmp_path / "source", visual_state(reference), config)
        report = convert_vision(source, tmp_path / "tower")
        ours = load_tower(tmp_path / "tower")
        with torch.no_grad():
            pooled, tokens = reference(pictures())
            result = ours(pictures())
        note = f"converted, {activation}"
        difference = check_close(result.last_hidden_state, tokens)
        record_parity("MetaCLIP patch tokens", "open_clip VisionTransformer", "float32", difference, note)
        difference = check_close(result.pooler_output, pooled)
        record_parity("MetaCLIP image embedding", "open_clip VisionTransformer", "float32", difference, note)
        assert (ours.config.hidden_act, ours.config.num_attention_heads) == (activation, HEADS_HERE)
        assert report.kind == "open_clip" and report.to == "tower" and not report.dry_run
        assert any(activation in note and "open_clip_config.json" in note for note in report.notes)

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_training_checkpoint_of_torch(self, tmp_path, wrapped):
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
            check_close(
                load_tower(tmp_path / "tower")(pictures()).last_hidden_state, reference(pictures())[1]
            )

    def test_whole_model_of_open_clip(self, tmp_path):
        config = open_clip_config(preprocess={"resize_mode": "squash"})
        text = open_clip.model.CLIPTextCfg(context_length=8, vocab_size=20, width=32, heads=2, layers=1)
        model_cfg = config["model_cfg"]
        model = open_clip.CLIP(EMBED, model_cfg["vision_cfg"], text, quick_gelu=True).eval()
        source = write_open_clip(tmp_path / "source", model.state_dict(), config)
        (source / "config.json").write_text(
            '{"architecture": "vit_base_patch32_clip_224"}'
        )  # timm's, as on its hub
        (source / "LICENSE").write_text("CC-BY-NC 4.0")
        report = convert_vision(source, tmp_path / "tower")
        with torch.no_grad():
            expected = model.encode_image(pictures())
            check_close(load_tower(tmp_path / "tower")(pictures()).pooler_output, expected)
        assert {"positional_embedding", "text_projection", "logit_scale"} <= report.dropped.keys()
        assert not any(name.startswith("visual.") for name in report.dropped)
        assert (tmp_path / "tower" / "LICENSE").read_text() == "CC-BY-NC 4.0"
        assert open_checkpoint(source).kind == "open_clip"

    def test_result_loads_with_auto_classes(self, tmp_path):
        reference = randomize(open_clip_tower())
        source = write_open_clip(tmp_path / "source", visual_state(reference), open_clip_config())
        convert_vision(source, tmp_path / "tower", dtype="bfloat16")
        model = AutoModel.from_pretrained(tmp_path / "tower")
        assert type(model) is llamoe.LlamoeVisionModel and model.dtype == torch.bfloat16
        state = model.state_dict()
        expected = reference.state_dict()["transformer.resblocks.2.mlp.c_fc.weight"].bfloat16()
        assert torch.equal(state["model.layers.2.mlp.fc1.weight"], expected)
        processor = AutoImageProcessor.from_pretrained(tmp_path / "tower")
        pixels = processor(Image.new("RGB", (90, 50), "teal"), return_tensors="pt").pixel_values
        assert model(pixels).last_hidden_state.shape == (1, GRID**2, WIDTH)


class TestActivation:
    def test_a_bare_file_needs_a_description(self, tmp_path):
        file = write_open_clip(tmp_path, visual_state(open_clip_tower()))
        named = file.rename(tmp_path / "ViT-H-14-quickgelu-metaclip_fullcc.safetensors")
        with pytest.raises(ValueError, match="Give open_clip's name of the model, .*or put open_clip_config"):
            convert_vision(named, tmp_path / "tower")
        assert not (tmp_path / "tower").exists()

    def test_a_model_of_open_clip_by_its_name(self, tmp_path):
        """A local file of an architecture: what open_clip's own loader makes of it, and what its name says."""
        add_architecture(tmp_path / "ViT-tiny.json", layers=2, norm_kwargs={"eps": 1e-3})
        file = tmp_path / "weights.pt"
        torch.save(randomize(open_clip.create_model("ViT-tiny", load_weights=False)).state_dict(), file)
        reference = open_clip.create_model("ViT-tiny", pretrained=str(file)).eval()
        convert_vision(file, tmp_path / "tower", model="ViT-tiny")
        with torch.no_grad():
            given = load_tower(tmp_path / "tower")(pictures()).pooler_output
            check_close(given, reference.encode_image(pictures()))
        refused = {
            "the configuration has": {"model": "ViT-B-32"},
            "model = 'ViT-B32'": {"model": "ViT-B32"},
            "model = 'hf-hub:timm/some'": {"model": "hf-hub:timm/some"},
        }
        for message, options in refused.items():
            with pytest.raises(ValueError, match=message):
                open_tower(file, **options)

    def test_a_second_description_is_refused(self, tmp_path):
        source = write_open_clip(tmp_path / "a", visual_state(open_clip_tower()), open_clip_config(False))
        with pytest.raises(ValueError, match="open_clip_config.json describes the tower"):
            open_tower(source, model="ViT-L-14-quickgelu")
