"""Reads pictures, from files or as objects, for the processor, the examples and programs that receive files of others.

Pillow opens every format it knows, by content and not by name: an EPS starts Ghostscript, and dozens of rare formats
use decoders that are hardly reviewed. transformers opens paths through Pillow or through torchvision, with results
that differ by release, and ignores the orientation of some photos. This file reads the formats that browsers show, in
one way, and what is handed over as an object like the file that it came from.
"""

import base64
import os
import urllib.request
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from .pixels import PictureError, as_8_bits

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_EXPECTED = "expected a JPEG, PNG, WebP, GIF or BMP"
# 256 MiB at three bytes a pixel. A larger picture may be a decompression bomb.
MAX_PIXELS = 2**28 // 3
# Most bytes that are downloaded.
_MAX_BYTES = 2**28


def read_picture(source: str | os.PathLike | bytes | BinaryIO, *, max_pixels: int = MAX_PIXELS) -> "Image":
    """Read a picture upright, as people see it; of an animation, the first frame.

    Args:
        source: a path, the bytes of a file, or a binary file that can seek.
        max_pixels: most pixels (width times height) to decode; at most twice `PIL.Image.MAX_IMAGE_PIXELS`.

    Returns:
        a `PIL.Image.Image` in RGB, with every pixel read, turned by its EXIF orientation. Transparency is dropped and
        CMYK converted as in transformers' `load_image`. 16-bit grey keeps its upper 8 bits, as Pillow does for 16-bit
        colours.

    Raises:
        PictureError: no such file, another format than JPEG, PNG, WebP, GIF and BMP, a damaged file, or more than
            `max_pixels`. It is an `OSError` and a `ValueError`.
    """
    from PIL import Image, UnidentifiedImageError

    name, file = _file_of(source)
    try:
        with Image.open(file, formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > max_pixels:
                raise PictureError(
                    f"{name}: {width:,} x {height:,} pixels are more than {max_pixels:,}. Make the picture smaller."
                )
            return upright_of_8_bits(picture).convert("RGB")
    except Image.DecompressionBombError as error:
        raise PictureError(f"{name}: has too many pixels. Make the picture smaller ({error}).") from error
    except UnidentifiedImageError as error:
        raise PictureError(f"{name}: is not a picture, or of another format; {_EXPECTED}.") from error
    except PictureError:
        raise
    # A damaged file makes Pillow raise nearly anything.
    except Exception as error:
        raise PictureError(f"{name}: is damaged and cannot be read as a picture ({error}).") from error


def read_pictures_in(images: Any) -> list[Any]:
    """The pictures that a chat or a processor call hands over, read where they are files.

    Args:
        images: a picture or a list of pictures, or for each text a list of its pictures. A picture is a path, a URL
            (http, https), a `data:` URL, base64, the bytes of a file, a binary file, a `PIL.Image.Image`, or numbers:
            an array, a tensor, or lists in lists, `[height, width]` or with channels first or last. Arrays with one
            axis more are several pictures.

    Returns:
        the same list, or list of lists, of PIL pictures, and arrays and tensors with three axes.

    Raises:
        PictureError: see `read_picture`; or what is none of these, None, or lists beside pictures.
    """
    if not isinstance(images, (list, tuple)) or _axes(images) in (1, 2, 3):
        return _pictures_of(images)
    has_rows = [isinstance(entry, (list, tuple)) and _axes(entry) not in (1, 2, 3) for entry in images]
    if any(has_rows) and not all(has_rows):
        raise PictureError("images holds pictures beside lists of pictures; expected one or the other.")
    if any(has_rows):
        return [[picture for entry in row for picture in _pictures_of(entry)] for row in images]
    return [picture for entry in images for picture in _pictures_of(entry)]


def upright_of_8_bits(picture: "Image") -> "Image":
    """A picture turned by its EXIF orientation, in a mode of 8 bits that converts to RGB.

    Raises:
        PictureError: numbers of mode I or F that have no plain reading, see `as_8_bits`.
    """
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(picture)
    # 16 bits, however dark: the mode says so.
    if upright.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    if upright.mode in ("I", "F"):
        return Image.fromarray(as_8_bits(np.asarray(upright)).numpy())
    # Colours that are multiplied by their opacity.
    return upright.convert(upright.mode.upper()) if upright.mode in ("La", "RGBa") else upright


def _pictures_of(image: Any) -> list[Any]:
    """A picture in a list; several where an array holds several."""
    from PIL import Image

    if image is None:
        raise PictureError(
            "images holds None where a picture was expected. Leave it out, with its marker in the text; "
            "images=None stands for no picture at all."
        )
    if isinstance(image, Image.Image):
        return [image]
    if isinstance(image, (str, os.PathLike)):
        return [_read_named(image)]
    if isinstance(image, (bytes, bytearray, memoryview)):
        return [read_picture(bytes(image))]
    if hasattr(image, "read"):
        return [read_picture(image)]
    numbers = image
    if isinstance(image, (list, tuple)) and _axes(image):
        try:
            numbers = np.asarray(image)
        except ValueError as error:
            raise PictureError(f"a picture of numbers in lists is not an array ({error}).") from error
    elif not isinstance(image, torch.Tensor) and hasattr(image, "__array__"):
        numbers = np.asarray(image)
    if not isinstance(numbers, (np.ndarray, torch.Tensor)):
        raise PictureError(
            f"a {type(image).__name__} is not a picture; expected a path, an address, the bytes of a file, a PIL "
            "image, an array or a tensor, or one list of these for each text."
        )
    if numbers.ndim not in (2, 3, 4):
        raise PictureError(
            f"a picture of {str(numbers.dtype).removeprefix('torch.')} and shape {list(numbers.shape)} has no plain "
            "reading; expected [height, width], with channels first or last, or several of these."
        )
    return list(numbers) if numbers.ndim == 4 else [numbers[None] if numbers.ndim == 2 else numbers]


def _axes(image: Any) -> int:
    """How deep the numbers stand in lists; 0 where no list ends in numbers."""
    axes = 0
    while isinstance(image, (list, tuple)) and image:
        axes, image = axes + 1, image[0]
    return axes if isinstance(image, (bool, int, float, np.number)) else 0


def _read_named(image: str | os.PathLike) -> "Image":
    text = os.fspath(image)
    if text.startswith(("http://", "https://")):
        return read_picture(_fetch(text))
    if isinstance(image, os.PathLike) or os.path.exists(text):
        return read_picture(text)
    encoded = text.partition("base64,")[2] if text.startswith("data:") else text
    try:
        # Line breaks are usual in base64.
        content = base64.b64decode("".join(encoded.split()), validate=True)
    except ValueError as error:
        shown = text if len(text) < 200 else f"{text[:99]}..."
        raise PictureError(
            f"{shown!r}: no such picture; neither a file nor an address (http, https) nor base64 of a picture."
        ) from error
    return read_picture(content)


def _file_of(source: str | os.PathLike | bytes | BinaryIO) -> tuple[str, Path | BinaryIO]:
    if isinstance(source, (bytes, bytearray)):
        return f"picture of {len(source):,} bytes", BytesIO(source)
    if not isinstance(source, (str, os.PathLike)):
        if not hasattr(source, "read"):
            raise PictureError(
                f"a {type(source).__name__} is not a picture; expected a path, the bytes of a file, or a binary file."
            )
        return str(getattr(source, "name", "picture")), source
    path = Path(source)
    try:
        is_there, is_file = path.exists(), path.is_file()
    # A name that is too long or contains a zero byte.
    except (OSError, ValueError) as error:
        raise PictureError(f"{str(source)[:99]}: cannot be a file's name ({error}).") from error
    if not is_there:
        raise PictureError(f"{source}: no such picture.")
    if not is_file:
        raise PictureError(f"{source}: is not a file; {_EXPECTED}.")
    return str(source), path


def _fetch(address: str) -> bytes:
    try:
        # Some sites refuse requests without a user agent.
        request = urllib.request.Request(address, headers={"User-Agent": "llamoe"})
        with urllib.request.urlopen(request, timeout=60) as response:
            content = response.read(_MAX_BYTES + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise PictureError(f"{address}: cannot be fetched ({error}).") from error
    if len(content) > _MAX_BYTES:
        raise PictureError(f"{address}: the file is larger than {_MAX_BYTES:,} bytes.")
    return content
