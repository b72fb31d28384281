"""Convert a tower's settings for preparing pictures, and resize a tower for pictures of another size.

open_clip's `preprocess_cfg` and transformers' preprocessor_config.json state the same things: how a picture becomes a
square (resize by the short side and crop the centre, or squash), the resampling filter, and a mean and a standard
deviation for each color channel. transformers' `CLIPImageProcessorPil` gives the same pixels as open_clip, except that
its crop may start a pixel further up or left if an odd number of rows or columns is cropped. The torchvision variant,
`CLIPImageProcessor`, also resizes a little differently.

Shapes: G patches along a side of the picture, D width.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

import torch

from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from ...configuration.sizes import count_of
from ..checkpoint import Checkpoint
from ..io import LazyTensor

# Each color channel's mean and deviation in OpenAI's CLIP and all MetaCLIP models, for pixels between 0 and 1.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# PIL's numbers of open_clip's filters; "random" means bicubic in evaluation.
_RESAMPLE = {"bicubic": 3, "bilinear": 2, "random": 3}
PROCESSOR = "preprocessor_config.json"
_RESIZE_MODES = ("shortest", "squash")
_POSITIONS = "positional_embedding_vlm"


def from_open_clip(settings: Mapping[str, Any], image_size: int, origin: str) -> dict[str, Any]:
    """Convert open_clip's `preprocess_cfg` to preprocessor_config.json; absent keys have open_clip's defaults.

    Raises:
        CheckpointError: `CLIPImageProcessor` does not support a value.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    mode = settings.get("resize_mode", "shortest")
    if mode not in _RESIZE_MODES:
        raise CheckpointError(
            f"{origin}: resize_mode {mode!r} has no equivalent in transformers' CLIPImageProcessor; valid are "
            f"{' and '.join(map(repr, _RESIZE_MODES))}."
        )
    interpolation = settings.get("interpolation", "bicubic")
    if interpolation not in _RESAMPLE:
        raise CheckpointError(f"{origin}: interpolation {interpolation!r}; valid are {', '.join(_RESAMPLE)}.")
    square = {"height": image_size, "width": image_size}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": square if mode == "squash" else {"shortest_edge": image_size},
        "resample": _RESAMPLE[interpolation],
        "do_center_crop": mode != "squash",
        "crop_size": dict(square),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _channels(settings.get("mean", CLIP_MEAN)),
        "image_std": _channels(settings.get("std", CLIP_STD)),
    }


def normalization(processor: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation for pixels between 0 and 1, each a number for each color channel."""
    if not processor.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    mean, std = processor.get("image_mean", CLIP_MEAN), processor.get("image_std", CLIP_STD)
    return _channels(mean), _channels(std)


def _channels(values: Any) -> list[float]:
    return [values] * 3 if isinstance(values, (int, float)) else list(values)


def resize_positions(positions: LazyTensor, grid: int) -> LazyTensor:
    """Resize learned positions as open_clip does when it loads a tower for pictures of another size.

    The resize is bicubic with antialiasing, corners not aligned (`open_clip.model.resize_pos_embed`). The class token's
    row is unchanged. transformers' `interpolate_pos_encoding` has no antialiasing, so its values differ.

    Args:
        positions: `[G * G + 1, D]`, class token last.
        grid: patches along a side of the new picture.

    Returns:
        `[grid * grid + 1, D]` of the same dtype; computed in float32, or in float64 for float64.
    """
    rows, width = positions.shape
    side = isqrt(rows - 1)
    if side == grid:
        return positions

    def resize(table: torch.Tensor) -> torch.Tensor:
        exact = table.to(torch.promote_types(table.dtype, torch.float32))
        # No copy is made after `permute`: in this memory layout torch runs the same kernel as for open_clip.
        patches = exact[:-1].reshape(1, side, side, width).permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(
            patches, size=(grid, grid), mode="bicubic", antialias=True, align_corners=False
        )
        patches = resized.permute(0, 2, 3, 1).reshape(grid * grid, width)
        return torch.cat([patches, exact[-1:]]).to(table.dtype)

    return positions.map(resize, (grid * grid + 1, width))


def resize(checkpoint: Checkpoint, image_size: int) -> Checkpoint:
    """Resize a tower's positions, and adapt its processor, for pictures with sides of `image_size` pixels.

    Raises:
        ValueError: the size is not a multiple of the patch size, or the grid does not fit the tower's adapter.
    """
    count_of("image_size", image_size)
    before: Any = checkpoint.config
    config = copy.deepcopy(before)
    config.image_size = image_size
    config.validate()
    old, new = before.grid_size, config.grid_size
    tensors = {**checkpoint.tensors, _POSITIONS: resize_positions(checkpoint.tensors[_POSITIONS], new)}
    companions = dict(checkpoint.companions)
    if (processor := read_processor(checkpoint)) is not None:
        resized = _with_image_size(processor, before.image_size, image_size)
        companions[PROCESSOR] = to_json(resized)
    note = (
        f"positions: resized from {old} x {old} to {new} x {new}" if old != new else "positions: as they were"
    )
    notes = [*checkpoint.notes, note]
    return replace(checkpoint, config=config, tensors=tensors, companions=companions, notes=notes)


def read_processor(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Read the tower's preprocessor_config.json; None if it has none."""
    content = checkpoint.companions.get(PROCESSOR)
    return None if content is None else json.loads(content)


def _with_image_size(processor: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """Adapt the settings from one side in pixels to another; a resize larger than the crop keeps its ratio to it."""
    size = processor.get("size") or {}
    size = {"shortest_edge": size} if isinstance(size, int) else size
    size = {
        name: max(after, round(value * after / before)) if isinstance(value, int) else value
        for name, value in size.items()
    }
    resized = {**processor, "size": size}
    if processor.get("crop_size") is not None or processor.get("do_center_crop"):
        resized["crop_size"] = {"height": after, "width": after}
    return resized
