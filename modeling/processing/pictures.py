"""Reads pictures from files and from objects, as RGB of 8 bits.

Pillow opens every format it knows, by content and not by name: an EPS starts Ghostscript, and dozens of rare formats
use decoders that are hardly reviewed. This file reads the formats that browsers show, turned upright. Stock's processor
divides whatever numbers it is given by 255: 16-bit numbers come out as hundreds, floats between 0 and 1 as black. Here
the dtype and the range say what is meant, and numbers that could mean two things, or nothing, are refused.
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
# Half a step of 8 bits in 0..1: what rounding errors add, and rounding takes off again.
_SLACK = 0.5 / 255


class PictureError(OSError, ValueError):
    """A picture is missing, broken, too large, of a format that is not read, or of numbers that mean no colours."""


def read_picture(source: str | os.PathLike | bytes | BinaryIO, *, max_pixels: int = MAX_PIXELS) -> "Image":
    """Read a picture file upright, as people see it; of an animation, the first frame.

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
    # A pipe would be waited for.
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
    """Turn a picture that is an object into RGB of 8 bits.

    Args:
        picture: a PIL image of any mode, which is turned by its EXIF orientation; or an array or tensor,
            `[height, width]`, or with 1 to 4 channels first or last: of bool, of whole numbers in 0..255, of uint16,
            int32 or int64 in 0..65535, of which the upper 8 bits count, or of floats in 0..1 or 0..255.

    Returns:
        a `PIL.Image.Image`. Transparency is dropped, and CMYK converted as in transformers' `load_image`.

    Raises:
        PictureError: numbers in another range or with other axes, or none of these objects.
    """
    from PIL import Image, ImageOps

    if isinstance(picture, Image.Image):
        upright = ImageOps.exif_transpose(picture)
        if upright.mode.startswith("I;16"):
            # 16 bits, however dark: the mode says so.
            return Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8)).convert("RGB")
        if upright.mode in ("I", "F"):
            return as_rgb(np.asarray(upright))
        # "La" and "RGBa" hold colours that are multiplied by their opacity.
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
        # Without transparency, grey as such.
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
