"""`read_picture` reads the usual formats, upright, as transformers does, and refuses all other files."""

import base64
import io
import os
import random
import struct
import zlib

import numpy as np
import pytest
import torch

import llamoe

Image = pytest.importorskip("PIL.Image", reason="pictures need the extra 'vision'")
pytest.importorskip("torchvision", reason="pictures need the extra 'vision'")
from PIL import EpsImagePlugin, ImageFile, ImageOps  # noqa: E402
from support.pictures import drawn, encode, make_processor  # noqa: E402
from transformers.image_utils import load_image  # noqa: E402

from llamoe.modeling.processing.pictures import PictureError  # noqa: E402

ORIENTATION = 0x112
# File name to the mode of the picture, its format, and options of writing.
KINDS = {
    "rgb.png": ("RGB", "PNG", {}),
    "rgb.jpg": ("RGB", "JPEG", {}),
    "rgb.webp": ("RGB", "WEBP", {"lossless": True}),
    "rgb.bmp": ("RGB", "BMP", {}),
    "palette.gif": ("P", "GIF", {}),
    "palette.png": ("P", "PNG", {}),
    "transparent_palette.png": ("P", "PNG", {"transparency": 3}),
    "grey.png": ("L", "PNG", {}),
    "grey.jpg": ("L", "JPEG", {}),
    "black_and_white.png": ("1", "PNG", {}),
    "transparent.png": ("RGBA", "PNG", {}),
    "transparent.webp": ("RGBA", "WEBP", {"lossless": True}),
    "transparent_grey.png": ("LA", "PNG", {}),
    "cmyk.jpg": ("CMYK", "JPEG", {}),
}


def pixels(picture):
    return np.asarray(picture).astype(int)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_as_transformers_reads_it(kind, tmp_path):
    mode, file_format, options = KINDS[kind]
    path = tmp_path / kind
    path.write_bytes(encode(drawn(mode), file_format, **options))
    picture = llamoe.read_picture(path)
    assert picture.mode == "RGB" and picture.size == (60, 40)
    assert np.array_equal(pixels(picture), pixels(load_image(str(path))))
    for source in (str(path), path.read_bytes(), io.BytesIO(path.read_bytes())):
        assert np.array_equal(pixels(llamoe.read_picture(source)), pixels(picture))
    with open(path, "rb") as file:
        assert np.array_equal(pixels(llamoe.read_picture(file)), pixels(picture))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_photos_are_turned_upright(orientation, file_format, tmp_path):
    """EXIF says which side of the stored pixels is up; the picture is turned accordingly."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    upright = drawn("RGB")
    # The operation of PIL that undoes each orientation.
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(turns[orientation]))
    path = tmp_path / "photo"
    options = {"quality": 100} if file_format == "JPEG" else {"lossless": True}
    path.write_bytes(encode(stored, file_format, exif=exif.tobytes(), **options))
    picture = llamoe.read_picture(path)
    assert picture.size == (60, 40)
    # JPEG changes this smooth picture by a few steps of 255, a wrong turn by more than 100.
    assert abs(pixels(picture) - pixels(upright)).max() <= (12 if file_format == "JPEG" else 0)
    if orientation > 1 and picture.size == stored.size:
        assert abs(pixels(stored) - pixels(upright)).max() > 100
    assert np.array_equal(pixels(picture), pixels(load_image(str(path))))
    # The EXIF data that remain do not say to turn it again.
    assert np.array_equal(pixels(ImageOps.exif_transpose(picture)), pixels(picture))


def chunk(name, content):
    """Return a chunk of a PNG file."""
    checked = name + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "MPO"])
def test_of_several_frames_the_first(file_format, tmp_path):
    frames = [drawn("RGB"), Image.new("RGB", (60, 40), "red"), Image.new("RGB", (60, 40), "blue")]
    path = tmp_path / "frames"
    options = {"lossless": True} if file_format == "WEBP" else {}
    path.write_bytes(encode(frames[0], file_format, save_all=True, append_images=frames[1:], **options))
    with Image.open(path) as opened:
        assert opened.n_frames == 3
    difference = abs(pixels(llamoe.read_picture(path)) - pixels(frames[0])).max()
    # GIF has a palette, and MPO is JPEG.
    assert difference <= {"GIF": 60, "MPO": 24}.get(file_format, 0)


# What is refused


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 40\n%%EndComments\n(pwned) print\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("name", ["picture.eps", "picture.png", "picture.jpg", "picture"])
def test_no_other_program_is_started(name, tmp_path, monkeypatch):
    """Pillow recognises EPS by its content, under any name, and would start Ghostscript, which runs programs."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was called"))
    path = tmp_path / name
    path.write_bytes(EPS)
    with Image.open(path) as opened:
        assert opened.format == "EPS"
    for source in (path, EPS):
        with pytest.raises(PictureError, match="JPEG, PNG, WebP, GIF or BMP"):
            llamoe.read_picture(source)


@pytest.mark.parametrize(
    "file_format", ["TIFF", "PPM", "ICO", "PCX", "TGA", "SGI", "DDS", "PDF", "JPEG2000", "IM"]
)
def test_rare_formats_are_refused_by_name(file_format, tmp_path):
    try:
        content = encode(drawn("RGB"), file_format)
    except (OSError, KeyError) as error:
        pytest.skip(f"this Pillow does not write {file_format}: {error}")
    with pytest.raises(PictureError, match="expected a JPEG, PNG, WebP, GIF or BMP"):
        llamoe.read_picture(content)


def claims(width, height):
    """Return a PNG of a few bytes whose header gives this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99)))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(60_000, 60_000), (2**31 - 1, 2**31 - 1), (100_000_000, 1), (9_460, 9_460)])
def test_bombs_are_refused_before_they_are_unpacked(size, monkeypatch):
    Image.init()
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(PictureError, match="pixels"):
        llamoe.read_picture(claims(*size))


def test_the_most_pixels_can_be_chosen():
    content = encode(drawn("RGB"), "PNG")
    assert llamoe.read_picture(content, max_pixels=2400).size == (60, 40)
    with pytest.raises(PictureError, match=r"60 x 40 pixels are more than 2,399"):
        llamoe.read_picture(content, max_pixels=2399)


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.png").touch()
    cases = {
        tmp_path / "none.png": "no such picture",
        tmp_path: "no such picture",
        # Opening a pipe would wait for ever.
        tmp_path / "pipe": "no such picture",
        tmp_path / "empty.png": "is not a picture",
        "a\0b": "no such picture",
    }
    for path, message in cases.items():
        with pytest.raises(PictureError, match=message):
            llamoe.read_picture(path)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused_in_a_sentence(kind):
    """Files that are cut short or have flipped bits give a picture or a `PictureError`."""
    mode, file_format, options = KINDS[kind]
    content = encode(drawn(mode), file_format, **options)
    choose = random.Random(kind)
    refused = []
    for case in range(60):
        damaged = bytearray(content)
        if case % 3 == 0:
            damaged = damaged[: choose.randrange(len(damaged))]
        for _ in range(choose.choice([0, 1, 8]) if case % 3 == 0 else choose.choice([1, 4, 40])):
            if damaged:
                damaged[choose.randrange(len(damaged))] ^= 1 << choose.randrange(8)
        try:
            assert llamoe.read_picture(bytes(damaged)).mode == "RGB"
        except PictureError as error:
            refused.append(str(error))
    assert len(refused) >= 10 and all(message.startswith("picture of ") for message in refused)
    assert issubclass(PictureError, OSError) and issubclass(PictureError, ValueError)


# In a chat


@pytest.fixture(scope="module")
def processor():
    return make_processor(llamoe.LlamoeProcessor)


def chat(**picture):
    return [{"role": "user", "content": [{"type": "image", **picture}, {"type": "text", "text": "what ?"}]}]


def pixel_values(processor, conversation):
    return processor.apply_chat_template(
        conversation, tokenize=True, return_dict=True, return_tensors="pt", chat_template=TEMPLATE
    )["pixel_values"]


TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<|image|>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["photo.jpg", "fine_grey.png"])
def test_a_chat_reads_what_read_picture_reads(kind, processor, tmp_path):
    path = tmp_path / kind
    if kind == "fine_grey.png":
        Image.fromarray((np.arange(40 * 60).reshape(40, 60) * 27).astype(np.uint16)).save(path)
    else:
        exif = Image.Exif()
        exif[ORIENTATION] = 6
        path.write_bytes(encode(drawn("RGB"), "JPEG", exif=exif.tobytes()))
    expected = pixel_values(processor, chat(image=llamoe.read_picture(path)))
    encoded = base64.encodebytes(path.read_bytes()).decode()
    for picture in (
        {"path": str(path)},
        {"image": str(path)},
        {"url": str(path)},
        {"base64": encoded},
        {"url": f"data:image/png;base64,{encoded}"},
    ):
        assert torch.equal(pixel_values(processor, chat(**picture)), expected), list(picture)
    assert torch.equal(
        processor(text="<|image|>", images=str(path), return_tensors="pt")["pixel_values"], expected
    )


def test_what_a_chat_names_wrongly(processor, tmp_path):
    (tmp_path / "hostile.png").write_bytes(EPS)
    cases = {
        str(tmp_path / "hostile.png"): "is not a picture, or of another format",
        base64.b64encode(EPS).decode(): "is not a picture, or of another format",
        "no such file.png": "neither a file, nor a URL",
        "data:image/png;base64,!!!": "neither a file, nor a URL",
    }
    for given, message in cases.items():
        with pytest.raises(PictureError, match=message):
            pixel_values(processor, chat(url=given))
