"""Towers for other pictures: positions resized, pixel normalization folded, processors that agree."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from open_clip.model import resize_pos_embed
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import load_file
from support.towers import (
    PATCH,
    SIZE,
    WIDTH,
    check_close,
    clip_fields,
    load_open_clip,
    load_stock,
    load_tower,
    max_abs,
    open_clip_config,
    open_clip_tower,
    pictures,
    randomize,
    same_tensors,
    visual_state,
    write_open_clip,
)
from transformers import (
    AutoImageProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
)

import llamoe
from llamoe.configuration.vision import LlamoeVisionConfig
from llamoe.conversion.clip.resize import resize_positions
from llamoe.conversion.convert_vision import convert_vision
from llamoe.conversion.io.lazy_tensor import InMemory


def picture() -> Image.Image:
    """Neither square nor even, and nothing in it twice."""
    rows, columns = np.mgrid[0:97, 0:145]
    channels = [rows * 255 // 96, columns * 255 // 144, (rows * 7 + columns * 3) % 256]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


class TestPictureSize:
    @pytest.mark.parametrize("grid", [3, 6, 8, 15])
    def test_positions_are_those_of_open_clip(self, grid, record_parity):
        reference = randomize(open_clip_tower())
        state = visual_state(reference)
        theirs = dict(state)
        resize_pos_embed(theirs, SimpleNamespace(visual=SimpleNamespace(grid_size=(grid, grid))))
        positions = state["visual.positional_embedding"]
        ours = resize_positions(InMemory(torch.cat([positions[1:], positions[:1]])), grid).read()
        expected = theirs["visual.positional_embedding"]
        assert expected.shape == (grid**2 + 1, WIDTH)
        difference = max_abs(torch.cat([ours[-1:], ours[:-1]]), expected)
        record_parity(
            "resized positions", "open_clip resize_pos_embed", "float32", difference, f"7 to {grid}"
        )
        assert difference == 0

    def test_bfloat16_is_resized_in_float32(self):
        positions = torch.randn(50, WIDTH).bfloat16()
        exact = resize_positions(InMemory(positions.float()), 12).read()
        assert torch.equal(resize_positions(InMemory(positions), 12).read(), exact.bfloat16())

    @pytest.mark.parametrize(("to", "grid"), [("tower", 5), ("open_clip", 10), ("clip", 5), ("tower", 10)])
    def test_features_are_those_of_open_clip(self, tmp_path, to, grid):
        reference = randomize(open_clip_tower())
        source = write_open_clip(tmp_path / "source", visual_state(reference), open_clip_config())
        report = convert_vision(source, tmp_path / to, to=to, image_size=grid * PATCH)
        state = visual_state(reference)
        larger = open_clip_tower(image_size=grid * PATCH).eval()
        resize_pos_embed(state, SimpleNamespace(visual=larger))
        larger.load_state_dict({name.removeprefix("visual."): value for name, value in state.items()})
        x = pictures(grid * PATCH)
        with torch.no_grad():
            expected, _ = larger(x)
            if to == "tower":
                result = load_tower(tmp_path / to)(x).pooler_output
            elif to == "open_clip":
                result = load_open_clip(tmp_path / to)(x)[0]
            else:
                result = load_stock(CLIPVisionModelWithProjection, tmp_path / to)(x).image_embeds
        check_close(result, expected)
        assert any(f"from 7 x 7 to {grid} x {grid}" in note for note in report.notes)
        if to != "open_clip":
            processor = CLIPImageProcessorPil.from_pretrained(tmp_path / to)
            pixels = processor(picture(), return_tensors="pt").pixel_values
            assert pixels.shape == (1, 3, grid * PATCH, grid * PATCH)

    def test_sizes_that_do_not_fit(self, tmp_path):
        source = write_open_clip(tmp_path / "source", visual_state(open_clip_tower()), open_clip_config())
        for image_size in (SIZE + 1, PATCH - 1, 0, -SIZE, 2.5, True, "42"):
            with pytest.raises(ValueError, match="image_size"):
                convert_vision(source, tmp_path / "tower", image_size=image_size)
        assert not (tmp_path / "tower").exists()


class TestNormalization:
    MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

    @pytest.mark.parametrize(
        ("to", "image_size"), [("tower", None), ("open_clip", 9 * PATCH), ("clip", None)]
    )
    def test_folding_keeps_the_features(self, tmp_path, to, image_size, record_parity):
        reference = randomize(open_clip_tower())
        source = write_open_clip(tmp_path / "source", visual_state(reference), open_clip_config())
        for name, folded in (("plain", False), ("folded", True)):
            convert_vision(source, tmp_path / name, to=to, image_size=image_size, fold_normalization=folded)
        raw = torch.rand(2, 3, image_size or SIZE, image_size or SIZE)
        clip_pixels = (raw - torch.tensor(self.MEAN)[:, None, None]) / torch.tensor(self.STD)[:, None, None]
        features = []
        for name, pixels in (("plain", clip_pixels), ("folded", (raw - 0.5) / 0.5), ("folded", clip_pixels)):
            with torch.no_grad():
                if to == "open_clip":
                    features.append(load_open_clip(tmp_path / name)(pixels)[1])
                elif to == "clip":
                    stock = load_stock(CLIPVisionModelWithProjection, tmp_path / name)
                    features.append(stock(pixels).last_hidden_state)
                else:
                    features.append(load_tower(tmp_path / name)(pixels).last_hidden_state)
        plain, folded, wrong = features
        difference = check_close(folded, plain)
        assert max_abs(wrong, plain) > 0.1
        record_parity("folded normalization", "the same tower without", "float32", difference, f"as {to}")

    def test_folding_costs_nothing_in_bfloat16(self, tmp_path):
        """The error against float32 is that of the rounded weights either way; measured 5.4e-3 and 5.6e-3."""
        reference = randomize(open_clip_tower())
        state = {name: value.bfloat16() for name, value in visual_state(reference).items()}
        source = write_open_clip(tmp_path / "source", state, open_clip_config())
        raw = torch.rand(4, 3, SIZE, SIZE)
        clip_pixels = (raw - torch.tensor(self.MEAN)[:, None, None]) / torch.tensor(self.STD)[:, None, None]
        errors = []
        for name, pixels in (("plain", clip_pixels), ("folded", (raw - 0.5) / 0.5)):
            convert_vision(source, tmp_path / name, fold_normalization=name == "folded")
            with torch.no_grad():
                tokens = load_tower(tmp_path / name).float()(pixels).last_hidden_state
                errors.append((tokens - reference(clip_pixels)[1]).square().mean().sqrt().item())
        assert 0 < errors[1] < 1.3 * errors[0]

    def test_the_processor_says_it(self, tmp_path):
        source = write_open_clip(tmp_path / "source", visual_state(open_clip_tower()), open_clip_config())
        convert_vision(source, tmp_path / "tower", fold_normalization=True)
        processor = AutoImageProcessor.from_pretrained(tmp_path / "tower")
        assert list(processor.image_mean) == list(processor.image_std) == [0.5] * 3
        again = convert_vision(tmp_path / "tower", tmp_path / "again", fold_normalization=True)
        assert any("already" in note for note in again.notes)
        same_tensors(
            tmp_path / "again" / "model.safetensors", load_file(tmp_path / "tower" / "model.safetensors")
        )
        convert_vision(tmp_path / "tower", tmp_path / "back", to="open_clip")
        written = json.loads((tmp_path / "back" / "open_clip_config.json").read_text())["preprocess_cfg"]
        assert written["mean"] == written["std"] == [0.5] * 3

    def test_unknown_normalization_cannot_be_folded(self, tmp_path):
        config = LlamoeVisionConfig(**clip_fields(), use_rope=False, use_adapter=False)
        llamoe.LlamoeVisionModel(config).save_pretrained(tmp_path / "tower")
        with pytest.raises(ValueError, match="preprocessor_config.json"):
            convert_vision(tmp_path / "tower", tmp_path / "folded", fold_normalization=True)

    @pytest.mark.parametrize(
        ("resize_mode", "interpolation"), [("shortest", "bicubic"), ("squash", "bilinear")]
    )
    def test_pixels_are_those_of_open_clip(self, tmp_path, resize_mode, interpolation):
        """The PIL processor gives them to rounding, and what goes back is what came.

        Where an odd number of columns is cut off, transformers cuts one pixel further left; none is here.
        """
        preprocess = {
            "mean": [0.4, 0.5, 0.6],
            "std": [0.2, 0.3, 0.25],
            "interpolation": interpolation,
            "resize_mode": resize_mode,
        }
        config = open_clip_config(preprocess=preprocess)
        source = write_open_clip(tmp_path / "source", visual_state(open_clip_tower()), config)
        convert_vision(source, tmp_path / "tower")
        convert_vision(tmp_path / "tower", tmp_path / "back", to="open_clip")
        written = json.loads((tmp_path / "back" / "open_clip_config.json").read_text())
        assert written["preprocess_cfg"] == preprocess
        transform = image_transform_v2(PreprocessCfg(size=SIZE, **preprocess), is_train=False)
        processor = CLIPImageProcessorPil.from_pretrained(tmp_path / "tower")
        pixels = processor(picture(), return_tensors="pt").pixel_values[0]
        assert max_abs(pixels, transform(picture())) <= 1e-6  # measured 0

    def test_settings_of_older_releases(self, tmp_path):
        """They wrote sizes as one number."""
        CLIPVisionModel(CLIPVisionConfig(**clip_fields())).save_pretrained(tmp_path / "source")
        older = {
            "feature_extractor_type": "CLIPFeatureExtractor",
            "size": SIZE,
            "crop_size": SIZE,
            "resample": 3,
        }
        (tmp_path / "source" / "preprocessor_config.json").write_text(json.dumps(older))
        convert_vision(tmp_path / "source", tmp_path / "tower", image_size=10 * PATCH)
        processor = CLIPImageProcessorPil.from_pretrained(tmp_path / "tower")
        pixels = processor(picture(), return_tensors="pt").pixel_values
        assert pixels.shape == (1, 3, 10 * PATCH, 10 * PATCH)
