"""Towers for pictures of another size: open_clip resizes positions and prepares pixels to the same numbers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from open_clip.model import resize_pos_embed
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from support.lazy_tensors import InMemory
from support.towers import (
    PATCH,
    SIZE,
    WIDTH,
    check_close,
    load_tower,
    max_abs,
    open_clip_config,
    open_clip_tower,
    pictures,
    randomize,
    visual_state,
    write_open_clip,
)
from transformers import CLIPImageProcessorPil

from llamoe.conversion.clip.pictures import resize_positions
from llamoe.conversion.convert_vision import convert_vision


def picture() -> Image.Image:
    """Make a picture that is not square, has odd sides, and shows every flip or swap of channels."""
    rows, columns = np.mgrid[0:97, 0:145]
    channels = [rows * 255 // 96, columns * 255 // 144, (rows * 7 + columns * 3) % 256]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


@pytest.mark.parametrize("grid", [3, 6, 8, 15])
def test_positions_are_those_of_open_clip(grid, record_parity):
    theirs = visual_state(randomize(open_clip_tower()))
    positions = theirs["visual.positional_embedding"]
    ours = resize_positions(InMemory(torch.cat([positions[1:], positions[:1]])), grid).read()
    resize_pos_embed(theirs, SimpleNamespace(visual=SimpleNamespace(grid_size=(grid, grid))))
    expected = theirs["visual.positional_embedding"]
    assert expected.shape == (grid**2 + 1, WIDTH)
    difference = max_abs(torch.cat([ours[-1:], ours[:-1]]), expected)
    record_parity("resized positions", "open_clip resize_pos_embed", "float32", difference, f"7 to {grid}")
    assert difference == 0


def test_bfloat16_is_resized_in_float32():
    positions = torch.randn(50, WIDTH).bfloat16()
    exact = resize_positions(InMemory(positions.float()), 12).read()
    assert torch.equal(resize_positions(InMemory(positions), 12).read(), exact.bfloat16())


@pytest.mark.parametrize("grid", [5, 10])
def test_features_of_resized_towers_are_those_of_open_clip(tmp_path, grid):
    state = visual_state(randomize(open_clip_tower()))
    source = write_open_clip(tmp_path / "source", state, open_clip_config())
    report = convert_vision(source, tmp_path / "tower", image_size=grid * PATCH)
    larger = open_clip_tower(image_size=grid * PATCH).eval()
    resize_pos_embed(state, SimpleNamespace(visual=larger))
    larger.load_state_dict({name.removeprefix("visual."): value for name, value in state.items()})
    x = pictures(grid * PATCH)
    with torch.no_grad():
        expected, _ = larger(x)
        result = load_tower(tmp_path / "tower")(x).pooler_output
    check_close(result, expected)
    assert any(f"from 7 x 7 to {grid} x {grid}" in note for note in report.notes)
    processor = CLIPImageProcessorPil.from_pretrained(tmp_path / "tower")
    pixels = processor(picture(), return_tensors="pt").pixel_values
    assert pixels.shape == (1, 3, grid * PATCH, grid * PATCH)


@pytest.mark.parametrize(("resize_mode", "interpolation"), [("shortest", "bicubic"), ("squash", "bilinear")])
def test_pixels_are_those_of_open_clip(tmp_path, resize_mode, interpolation):
    """They are equal within rounding, by the PIL processor.

    An even number of columns is cropped: for an odd number, transformers' crop starts a pixel further left.
    """
    preprocess = dict(mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.25])
    preprocess |= dict(interpolation=interpolation, resize_mode=resize_mode)
    config = open_clip_config(preprocess=preprocess)
    source = write_open_clip(tmp_path / "source", visual_state(open_clip_tower()), config)
    convert_vision(source, tmp_path / "tower")
    transform = image_transform_v2(PreprocessCfg(size=SIZE, **preprocess), is_train=False)
    processor = CLIPImageProcessorPil.from_pretrained(tmp_path / "tower")
    pixels = processor(picture(), return_tensors="pt").pixel_values[0]
    assert max_abs(pixels, transform(picture())) <= 1e-6  # measured 0
