"""What the numbers of a picture mean, whatever holds them: arrays and tensors become pixels of 8 bits.

Files hold 8 bits a colour, and stock's processor divides by 255 whatever it is given: 16-bit numbers come out as
hundreds, floats between 0 and 1 as black. Here a dtype and its range say what is meant, and numbers that could mean two
things, or nothing, are refused.
"""

from typing import Any

import numpy as np
import torch

# Half a step of 8 bits in 0..1: what rounding errors add, and rounding takes off again.
_SLACK = 0.5 / 255
_READINGS = (
    "expected uint8; whole numbers in 0..255, or in 0..65535 as uint16, int32 or int64; floats in 0..1 or in 0..255; "
    "or bool"
)


class PictureError(OSError, ValueError):
    """A picture is missing, broken, too large, of a format that is not read, or of numbers that mean no colours."""


def as_8_bits(picture: Any) -> torch.Tensor:
    """Pixels as uint8, of the same shape, on the same device.

    Args:
        picture: an array or tensor of bool, of whole numbers in 0..255, of uint16, int32 or int64 in 0..65535, which
            keep their upper 8 bits, or of floats in 0..1 or in 0..255, which are rounded.

    Raises:
        PictureError: numbers of another range or dtype, NaN, or no numbers. uint16 in 0..255, too, and floats that end
            between 1 and 2: both are a dark picture or another range, and do not say which.
    """
    name, pixels = _numbers_of(picture)
    if pixels.dtype is torch.uint8:
        return pixels
    if pixels.dtype is torch.bool:
        return pixels.to(torch.uint8) * 255
    low, high = _range_of(pixels)
    if pixels.is_floating_point():
        if -_SLACK <= low and (high <= 1 + _SLACK or 2 <= high <= 255 + _SLACK):
            scale = 255 if high <= 1 + _SLACK else 1
            return (pixels * scale).round().clamp(0, 255).to(torch.uint8)
    elif name == "uint16":
        if high > 255 or high == 0:
            return (pixels >> 8).to(torch.uint8)
    elif 0 <= low and high <= (255 if name in ("int8", "int16") else 65535):
        return (pixels >> 8 if high > 255 else pixels).to(torch.uint8)
    raise PictureError(f"a picture of {name} from {low:g} to {high:g} has no plain reading; {_READINGS}.")


def as_rescaled(picture: Any) -> torch.Tensor:
    """Pixels that the caller has brought to 0..1 already (`do_rescale=False`), as float32.

    Raises:
        PictureError: other numbers than floats in 0..1.
    """
    name, pixels = _numbers_of(picture)
    low, high = _range_of(pixels)
    if not (pixels.is_floating_point() and -_SLACK <= low and high <= 1 + _SLACK):
        raise PictureError(
            f"do_rescale=False says that pixels are floats in 0..1, and a picture of {name} from {low:g} to {high:g} "
            "was given. Leave do_rescale out."
        )
    return pixels


def as_given(picture: Any) -> torch.Tensor:
    """Floats as they are, in float32, and other numbers as `as_8_bits`: for callers who normalize by themselves."""
    name, pixels = _numbers_of(picture)
    if not pixels.is_floating_point():
        return as_8_bits(picture)
    low, high = _range_of(pixels)
    if not torch.isfinite(torch.tensor([low, high])).all():
        raise PictureError(
            f"a picture of {name} from {low:g} to {high:g} has no plain reading; expected numbers."
        )
    return pixels


def _numbers_of(picture: Any) -> tuple[str, torch.Tensor]:
    """The dtype's name, and the numbers in a dtype that torch computes with."""
    if isinstance(picture, torch.Tensor):
        name, pixels = str(picture.dtype).removeprefix("torch."), picture
    else:
        array = np.asarray(picture)
        name = array.dtype.name
        if array.dtype.kind not in "buif":
            raise PictureError(f"a picture of {name} has no plain reading; {_READINGS}.")
        plain = {"u": np.uint8 if array.itemsize == 1 else np.int64, "f": np.float32}
        # A copy, since torch takes no other byte order and no negative strides, and warns of what is read-only.
        pixels = torch.from_numpy(
            np.array(array, dtype=plain.get(array.dtype.kind, array.dtype.newbyteorder("=")))
        )
    if pixels.is_complex():
        raise PictureError(f"a picture of {name} has no plain reading; {_READINGS}.")
    if not pixels.numel():
        raise PictureError(f"a picture of shape {list(pixels.shape)} has no pixels.")
    if pixels.is_floating_point():
        return name, pixels.float()
    return name, pixels if pixels.dtype in (torch.uint8, torch.bool) else pixels.long()


def _range_of(pixels: torch.Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(pixels)
    return low.item(), high.item()
