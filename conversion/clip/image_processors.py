"""Image preprocessing settings: transformers' preprocessor_config.json from open_clip's `preprocess_cfg`.

Both state the same: resize by the short side and crop the centre, or squash to a square; bicubic; a mean and a
standard deviation for each channel. transformers' class for it is `CLIPImageProcessor`. Its PIL variant gives
open_clip's pixels with one exception: where an odd number of rows or columns is cropped, the crop may start a pixel
further up or left. The torchvision variant also resizes a little differently.
"""

from collections.abc import Mapping
from typing import Any

from ...configuration.errors import CheckpointError

# OpenAI's CLIP; every MetaCLIP model was trained with the same numbers.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# PIL's numbers for the filters; "random" is any in training and bicubic in evaluation.
_RESAMPLE = {"bicubic": 3, "bilinear": 2, "random": 3}
PROCESSOR = "preprocessor_config.json"
_RESIZE_MODES = ("shortest", "squash")


def from_open_clip(settings: Mapping[str, Any], image_size: int, origin: str) -> dict[str, Any]:
    """Content of preprocessor_config.json for an open_clip `preprocess_cfg`; missing keys have open_clip's defaults.

    Raises:
        CheckpointError: `CLIPImageProcessor` does not support a value.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    mode = given.get("resize_mode", "shortest")
    if mode not in _RESIZE_MODES:
        raise CheckpointError(
            f"{origin}: resize_mode {mode!r} has no equivalent in transformers' CLIPImageProcessor; "
            f"{' and '.join(map(repr, _RESIZE_MODES))} have."
        )
    interpolation = given.get("interpolation", "bicubic")
    if interpolation not in _RESAMPLE:
        raise CheckpointError(f"{origin}: interpolation {interpolation!r} is none of {', '.join(_RESAMPLE)}.")
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
        "image_mean": _channels(given.get("mean", CLIP_MEAN)),
        "image_std": _channels(given.get("std", CLIP_STD)),
    }


def normalization(processor: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of pixels between 0 and 1, a number for each channel."""
    if not processor.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    mean, std = processor.get("image_mean", CLIP_MEAN), processor.get("image_std", CLIP_STD)
    return _channels(mean), _channels(std)


def with_image_size(processor: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """Adapt the settings to another side in pixels; a resize larger than the crop keeps its ratio to the crop."""
    size = {
        name: value if not isinstance(value, int) else max(after, round(value * after / before))
        for name, value in _size(processor).items()
    }
    resized = {**processor, "size": size}
    if processor.get("crop_size") is not None or processor.get("do_center_crop"):
        resized["crop_size"] = {"height": after, "width": after}
    return resized


def _size(processor: Mapping[str, Any]) -> dict[str, Any]:
    size = processor.get("size", {})
    if isinstance(size, int):
        return {"shortest_edge": size}
    return dict(size) if isinstance(size, dict) else {}


def _channels(values: Any) -> list[float]:
    return [values] * 3 if isinstance(values, (int, float)) else list(values)
