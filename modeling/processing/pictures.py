"""Reads pictures from files and from objects in memory, as RGB of 8 bits.

Pillow chooses a decoder by a file's content, not by its name: for an EPS it starts Ghostscript, and for dozens of rare
formats it has decoders that hardly anybody has reviewed. This file reads only the formats that browsers show.
transformers' processor divides all values by 255, so that 16-bit values become hundreds, and floats between 0 and 1
nearly black. Here dtype and range decide by what values are divided; ambiguous or impossible values are refused.
"""

import os
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# Takes 256 MiB at three bytes a pixel. A small file may claim to have more pixels, to fill the memory.
MAX_PIXELS = 2**28 // 3
# How far floats may lie outside of 0..1: half a step of 8 bits, which rounding to 8 bits removes.
_SLACK = 0.5 / 255


class PictureError(OSError, ValueError):
    """The error for a picture that is missing, damaged, too large, or of an unsupported format, or has wrong values."""


def read_picture(source: str | os.PathLike | bytes | BinaryIO, *, max_pixels: int = MAX_PIXELS) -> "Image":
    """Read a picture file and rotate it upright; of an animation read the first frame.

    Args:
        source: a path, the bytes of a file, or a binary file that can seek.
        max_pixels: largest number of pixels (width times height), at most twice `PIL.Image.MAX_IMAGE_PIXELS`.

    Returns:
        a `PIL.Image.Image` in RGB, read as a whole.

    Raises:
        PictureError: the file is missing or damaged, is no JPEG, PNG, WebP, GIF or BMP, or has more than `max_pixels`.
            The error is an `OSError` and a `ValueError`.
    """
    from PIL import Image

    is_content = isinstance(source, (bytes, bytearray))
    name = f"picture of {len(source):,} bytes" if is_content else getattr(source, "name", source)
    # To read a pipe or a device might never end.
    if isinstance(source, (str, os.PathLike)) and not os.path.isfile(source):
        raise PictureError(f"{name}: no such picture.")
    try:
        with Image.open(BytesIO(source) if is_content else source, formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > max_pixels:
                raise PictureError(f"{width:,} x {height:,} pixels are more than {max_pixels:,}")
            return as_rgb(picture)
    # For damaged files Pillow raises errors of nearly every type.
    except Exception as error:
        raise PictureError(
            f"{name}: is not a picture, or of another format; expected a JPEG, PNG, WebP, GIF or BMP ({error})."
        ) from error


def as_rgb(picture: Any) -> "Image":
    """Convert a PIL image, array or tensor to RGB of 8 bits.

    Args:
        picture: a PIL image of any mode, which is rotated by its EXIF orientation; or an array or tensor,
            `[height, width]` or with 1 to 4 channels first or last. Its values are bool; integers in 0..255; uint16,
            int32 or int64 in 0..65535, of which the upper 8 of 16 bits are kept; or floats in 0..1 or 0..255.

    Returns:
        a `PIL.Image.Image`, without transparency; CMYK is converted as by transformers' `load_image`.

    Raises:
        PictureError: the values are in another range, the axes are others, or the object is of another class.
    """
    from PIL import Image, ImageOps

    if isinstance(picture, Image.Image):
        upright = ImageOps.exif_transpose(picture)
        if upright.mode.startswith("I;16"):
            # By its mode the image has 16 bits, even if all values are below 256.
            return Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8)).convert("RGB")
        if upright.mode in ("I", "F"):
            return as_rgb(np.asarray(upright))
        # "La" and "RGBa", with premultiplied alpha, have no direct conversion to RGB.
        return upright.convert({"La": "LA", "RGBa": "RGBA"}.get(upright.mode, upright.mode)).convert("RGB")
    if isinstance(picture, torch.Tensor):
        # NumPy has no bfloat16.
        picture = (picture.float() if picture.is_floating_point() else picture).detach().cpu().numpy()
    if not isinstance(picture, np.ndarray):
        raise PictureError(
            f"a {type(picture).__name__} is not a picture; expected a path, a URL, a PIL image, an array or a tensor, "
            "or for each text a list of these."
        )
    pixels = _as_8_bits(picture)
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 2, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] not in (1, 2, 3, 4)):
        raise PictureError(
            f"a picture has the shape {list(picture.shape)}; expected [height, width], or 1 to 4 channels as the first "
            "or last axis."
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
        f"a picture of {name}, {list(numbers.shape)}, has values from {low:g} to {high:g}; expected uint8; integers in "
        "0..255, or in 0..65535 as uint16, int32 or int64; floats in 0..1 or in 0..255; or bool."
    )
