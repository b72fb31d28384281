"""How a tower's pictures become pixels: open_clip's `preprocess_cfg` and transformers' preprocessor_config.json.

Both say the same: resize by the short side and cut the middle out, or squash to a square; bicubic; a mean and a
deviation for each channel. `CLIPImageProcessor` is transformers' class for it. Its PIL variant gives open_clip's
pixels, but for one thing: where an odd number of rows or columns is cut off, it may cut a pixel further up or left.
The torchvision variant resizes a little differently, too.
"""

from collections.abc import Mapping
from typing import Any

from ...configuration.errors import CheckpointError

# Of OpenAI's CLIP; every MetaCLIP model was trained with them too.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# What PIL calls them by number.
_RESAMPLE = {"bicubic": 3, "bilinear": 2}
_RESIZE_MODES = ("shortest", "squash")


def from_open_clip(settings: Mapping[str, Any], image_size: int, origin: str) -> dict[str, Any]:
    """Give the content of preprocessor_config.json for an open_clip `preprocess_cfg`.

    Args:
        settings: `mean`, `std`, `interpolation`, `resize_mode`; absent ones are open_clip's defaults.
        image_size: side of the picture, in pixels.
        origin: the file, for messages.

    Raises:
        CheckpointError: a value that `CLIPImageProcessor` cannot follow.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    mode = given.get("resize_mode", "shortest")
    if mode not in _RESIZE_MODES:
        raise CheckpointError(
            f"{origin}: resize_mode {mode!r} has no equivalent in transformers' CLIPImageProcessor; "
            f"{' and '.join(map(repr, _RESIZE_MODES))} have."
        )
    interpolation = given.get("interpolation", "bicubic")
    if interpolation not in (*_RESAMPLE, "random"):
        raise CheckpointError(f"{origin}: interpolation {interpolation!r} is none of {', '.join(_RESAMPLE)}.")
    square = {"height": image_size, "width": image_size}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": square if mode == "squash" else {"shortest_edge": image_size},
        # open_clip trains with a random filter under "random" and evaluates with bicubic.
        "resample": _RESAMPLE.get(interpolation, 3),
        "do_center_crop": mode != "squash",
        "crop_size": dict(square),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _channels(given.get("mean", CLIP_MEAN), "mean", origin),
        "image_std": _positive(_channels(given.get("std", CLIP_STD), "std", origin), "std", origin),
    }


def to_open_clip(processor: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Give the open_clip `preprocess_cfg` for the content of preprocessor_config.json.

    Args:
        processor: of a CLIP image processor.
        origin: the file, for messages.

    Raises:
        CheckpointError: a value that open_clip cannot follow.
    """
    mean, std = normalization(processor, origin)
    names = {number: name for name, number in _RESAMPLE.items()}
    resample = processor.get("resample", 3)
    if not isinstance(resample, int) or resample not in names:
        raise CheckpointError(
            f"{origin}: resample {resample!r} has no equivalent in open_clip; 2 and 3 have."
        )
    squash = set(_size(processor)) >= {"height", "width"} and not processor.get("do_center_crop", True)
    return {
        "mean": mean,
        "std": std,
        "interpolation": names[resample],
        "resize_mode": "squash" if squash else "shortest",
    }


def normalization(processor: Mapping[str, Any], origin: str) -> tuple[list[float], list[float]]:
    """Read mean and deviation, one number for each channel, of pixels between 0 and 1.

    Args:
        processor: content of preprocessor_config.json.
        origin: the file, for messages.

    Raises:
        CheckpointError: they are not one number, or one for each channel.
    """
    if not processor.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    mean = _channels(processor.get("image_mean", CLIP_MEAN), "image_mean", origin)
    std = _channels(processor.get("image_std", CLIP_STD), "image_std", origin)
    return mean, _positive(std, "image_std", origin)


def with_normalization(processor: Mapping[str, Any], mean: list[float], std: list[float]) -> dict[str, Any]:
    """Give the processor with another normalization."""
    return {**processor, "do_normalize": True, "image_mean": list(mean), "image_std": list(std)}


def with_image_size(processor: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """Give the processor for another picture size; a resize larger than the cut keeps its ratio to it.

    Args:
        processor: content of preprocessor_config.json, also of releases that wrote a size as one number.
        before: side of the picture that it makes, in pixels.
        after: side that it shall make.
    """
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


def _channels(values: Any, name: str, origin: str) -> list[float]:
    listed = [values] * 3 if isinstance(values, (int, float)) else values
    is_listed = isinstance(listed, (list, tuple)) and len(listed) == 3
    if not is_listed or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in listed
    ):
        raise CheckpointError(f"{origin}: {name} is {values!r}; three numbers were expected.")
    return [float(value) for value in listed]


def _positive(values: list[float], name: str, origin: str) -> list[float]:
    if not all(value > 0 for value in values):
        raise CheckpointError(f"{origin}: {name} is {values}; positive numbers were expected.")
    return values
