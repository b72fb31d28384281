"""Reads pictures from files and from objects, as RGB of 8 bits.

Pillow opens every format it supports, by content and not by name: an EPS starts Ghostscript, and dozens of rare formats
use decoders that are hardly reviewed. This file reads only the formats that browsers show, and rotates them upright.
Stock's processor divides any values by 255: 16-bit values come out as hundreds, floats between 0 and 1 as black. Here
dtype and range decide the scale of the values, and ambiguous or impossible values are refused.
"""

import os
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# 256 MiB at three bytes a pixel. A larger picture may be a decompression bomb.
MAX_PIXELS = 2**28 // 3
# Tolerance of a range's ends: half a step of 8 bits in 0..1, which rounding to 8 bits removes.
_SLACK = 0.5 / 255


class PictureError(OSError, ValueError):
    """The error for a picture that is missing, broken, too large, of an unsupported format, or has invalid values."""


def read_picture(source: str | os.PathLike | bytes | BinaryIO, *, max_pixels: int = MAX_PIXELS) -> "Image":
    """Read a picture file, rotated upright; the first frame of an animation.

    Args:
        source: a path, the bytes of a file, or a binary file that can seek.
        max_pixels: most pixels (width times height) to decode; at most twice `PIL.Image.MAX_IMAGE_PIXELS`.

    Returns:
        a `PIL.Image.Image` in RGB, with every pixel read, as `as_rgb` makes it.

    Raises:
        PictureError: no such file, another format than JPEG, PNG, WebP, GIF and BMP, a damaged file, or more than
            `max_pixels`. It is an `OSError` and a `ValueError`.
    """
    from PIL import Image

    is_content = isinstance(source, (bytes, bytearray))
    name = f"picture of {len(source):,} bytes" if is_content else getattr(source, "name", source)
    # Reading a pipe or a device could block forever.
    if isinstance(source, (str, os.PathLike)) and not os.path.isfile(source):
        raise PictureError(f"{name}: no such picture.")
    try:
        with Image.open(BytesIO(source) if is_content else source, formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > max_pixels:
                raise PictureError(f"{width:,} x {height:,} pixels are more than {max_pixels:,}")
            return as_rgb(picture)
    # A damaged file makes Pillow raise nearly anything.
    except Exception as error:
        raise PictureError(
            f"{name}: is not a picture, or of another format; expected a JPEG, PNG, WebP, GIF or BMP ({error})."
        ) from error


def as_rgb(picture: Any) -> "Image":
    """Convert a PIL image, array or tensor to RGB of 8 bits.

    Args:
        picture: a PIL image of any mode, which is rotated by its EXIF orientation; or an array or tensor,
            `[height, width]` or with 1 to 4 channels first or last. Its values are bool; integers in 0..255; uint16,
            int32 or int64 in 0..65535, of which the upper 8 bits are kept; or floats in 0..1 or 0..255.

    Returns:
        a `PIL.Image.Image`. Transparency is dropped, and CMYK converted as in transformers' `load_image`.

    Raises:
        PictureError: values in another range, other axes, or an object of another class.
    """
    from PIL import Image, ImageOps

    if isinstance(picture, Image.Image):
        upright = ImageOps.exif_transpose(picture)
        if upright.mode.startswith("I;16"):
            # The mode means 16 bits, even if all values are small.
            return Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8)).convert("RGB")
        if upright.mode in ("I", "F"):
            return as_rgb(np.asarray(upright))
        # "La" and "RGBa" have premultiplied alpha.
        return upright.convert({"La": "LA", "RGBa": "RGBA"}.get(upright.mode, upright.mode)).convert("RGB")
    if isinstance(picture, torch.Tensor):
        # NumPy has no bfloat16.
        picture = (picture.float() if picture.is_floating_point() else picture).detach().cpu().numpy()
    if not isinstance(picture, np.ndarray):
        raise PictureError(
            f"a {type(picture).__name__} is not a picture; expected a path, an address, a PIL image, an array or a "
            "tensor, or one list of these for each text."
        )
    pixels = _as_8_bits(picture)
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 2, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] not in (1, 2, 3, 4)):
        raise PictureError(
            f"a picture of shape {list(picture.shape)} is neither [height, width] nor has it 1 to 4 channels, first or "
            "last."
        )
    if pixels.ndim == 3:
        # Drop the alpha channel; repeat grey in three channels.
        pixels = pixels[..., :3] if pixels.shape[-1] > 2 else pixels[..., 0]
    return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")


def _as_8_bits(numbers: np.ndarray) -> np.ndarray:
    """Return an array's colours as uint8 of the same shape."""
    name, kind = numbers.dtype.name, numbers.dtype.kind
    if name == "uint8":
        return numbers
    if name == "bool":
        return numbers.astype(np.uint8) * 255
    low, high = (numbers.min(), numbers.max()) if kind in "iuf" and numbers.size else (np.nan, np.nan)
    if kind == "f":
        if -_SLACK <= low and (high <= 1 + _SLACK or 2 <= high <= 255 + _SLACK):
            scale = 255 if high <= 1 + _SLACK else 1
            return (numbers.astype(np.float32) * scale).round().clip(0, 255).astype(np.uint8)
    elif name == "uint16":
        if high > 255 or high == 0:
            return (numbers >> 8).astype(np.uint8)
    elif 0 <= low and high <= (255 if name in ("int8", "int16") else 65535):
        return (numbers >> 8 if high > 255 else numbers).astype(np.uint8)
    raise PictureError(
        f"a picture of {name}, {list(numbers.shape)}, from {low:g} to {high:g} has no plain reading; expected uint8; "
        "whole numbers in 0..255, or in 0..65535 as uint16, int32 or int64; floats in 0..1 or in 0..255; or bool."
    )
