"""Reads pictures from files, for the processor, the examples and programs that receive files from others.

Pillow opens every format it knows, by content and not by name: an EPS starts Ghostscript, and dozens of rare formats
use decoders that are hardly reviewed. transformers opens paths through Pillow or through torchvision, with results
that differ by release, and ignores the orientation of some photos. This file reads the formats that browsers show, in
one way.
"""

import base64
import os
import urllib.request
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_EXPECTED = "expected a JPEG, PNG, WebP, GIF or BMP"
# 256 MiB at three bytes a pixel. A larger picture may be a decompression bomb.
MAX_PIXELS = 2**28 // 3
# Most bytes that are downloaded.
_MAX_BYTES = 2**28


class PictureError(OSError, ValueError):
    """A picture is missing, broken, too large, or of a format that is not read."""


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
    from PIL import Image, ImageOps, UnidentifiedImageError

    name, file = _file_of(source)
    try:
        with Image.open(file, formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > max_pixels:
                raise PictureError(
                    f"{name}: {width:,} x {height:,} pixels are more than {max_pixels:,}. Make the picture smaller."
                )
            upright = ImageOps.exif_transpose(picture)
            return _grey_of_8_bits(upright).convert("RGB")
    except Image.DecompressionBombError as error:
        raise PictureError(f"{name}: has too many pixels. Make the picture smaller ({error}).") from error
    except UnidentifiedImageError as error:
        raise PictureError(f"{name}: is no picture, or of another format; {_EXPECTED}.") from error
    except PictureError:
        raise
    # A damaged file makes Pillow raise nearly anything.
    except Exception as error:
        raise PictureError(f"{name}: is damaged and cannot be read as a picture ({error}).") from error


def read_pictures_in(images: Any) -> Any:
    """Read the pictures that a chat or a processor call names by text; keep pictures, arrays and tensors unchanged.

    Args:
        images: a path, a URL (http, https), a `data:` URL, base64, anything else that a processor takes, or lists of
            these.

    Raises:
        PictureError: see `read_picture`; or a text that is none of these, or None in a list.
    """
    if isinstance(images, (list, tuple)):
        if any(image is None for image in images):
            raise PictureError(
                "images holds None where a picture was expected. Leave it out, with its marker in the text; "
                "images=None stands for no picture at all."
            )
        return [read_pictures_in(image) for image in images]
    if not isinstance(images, (str, os.PathLike)):
        return images
    text = os.fspath(images)
    if text.startswith(("http://", "https://")):
        return read_picture(_fetch(text))
    if isinstance(images, os.PathLike) or os.path.exists(text):
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
                f"a {type(source).__name__} is no picture; expected a path, the bytes of a file, or a binary file."
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
        raise PictureError(f"{source}: is no file; {_EXPECTED}.")
    return str(source), path


def _grey_of_8_bits(picture: "Image") -> "Image":
    if not picture.mode.startswith("I"):
        return picture
    import numpy
    from PIL import Image

    return Image.fromarray((numpy.asarray(picture) >> 8).astype("uint8"))


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
