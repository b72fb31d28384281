"""Images, arrays and tensors give the pixels of the file of the same picture, or are refused with range and dtype."""

import io

import numpy as np
import pytest
import torch

import llamoe

pytest.importorskip("PIL", reason="pictures need the extra 'vision'")
pytest.importorskip("torchvision", reason="pictures need the extra 'vision'")
from PIL import Image
from support.pictures import drawn, encode, make_processor
from torchvision.transforms.functional import to_tensor

from llamoe.modeling.processing.pictures import PictureError

RGB = np.array(drawn("RGB"))
GREY = RGB[..., 0]


@pytest.fixture(scope="module")
def processor():
    return make_processor(llamoe.LlamoeProcessor)


def pixels(processor, picture, **options):
    return processor(text="<|image|>", images=picture, return_tensors="pt", **options)["pixel_values"]


def photo():
    """Return a picture as Pillow opens it, whose EXIF says to turn it."""
    exif = Image.Exif()
    exif[0x112] = 6
    return Image.open(io.BytesIO(encode(drawn("RGB"), "PNG", exif=exif.tobytes())))


def of_mode(mode):
    return {
        # The upper byte is the shade; Pillow itself would make every number above 255 white.
        "I;16": lambda: Image.fromarray(GREY.astype(np.uint16) * 256 + GREY[::-1]),
        "I;16B": lambda: Image.fromarray((GREY.astype(np.int32) * 257).astype(">u2")),
        "I": lambda: Image.fromarray(GREY.astype(np.int32) * 257),
        "I of 8 bits": lambda: drawn("L").convert("I"),
        "F": lambda: Image.fromarray(GREY.astype(np.float32)),
        "F in 0..1": lambda: Image.fromarray(GREY / np.float32(255)),
        "La": lambda: drawn("LA").convert("La"),
        "photo": photo,
    }.get(mode, lambda: drawn(mode))()


# Mode to the same picture in 8 bits.
MODES = {
    **{
        mode: lambda mode=mode: drawn(mode).convert("RGB")
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
    },
    **dict.fromkeys(("I;16", "I;16B", "I", "F", "F in 0..1"), lambda: Image.fromarray(GREY)),
    "I of 8 bits": lambda: drawn("L"),
    "La": lambda: of_mode("La").convert("LA").convert("L"),
    "photo": lambda: drawn("RGB").transpose(Image.Transpose.ROTATE_270),
}


@pytest.mark.parametrize("mode", MODES)
def test_pictures_of_every_mode(mode, processor):
    """The processor and `read_picture` give the pixels of the picture in 8-bit RGB."""
    picture, expected = of_mode(mode), MODES[mode]()
    if picture.mode != "La" and mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "photo"):
        exif = picture.getexif().tobytes()
        file = llamoe.read_picture(encode(picture, "PNG", exif=exif))
        assert np.array_equal(np.asarray(file), np.asarray(expected.convert("RGB")))
    assert torch.equal(pixels(processor, picture), pixels(processor, np.array(expected.convert("RGB"))))


first = torch.from_numpy(RGB).permute(2, 0, 1)
WHOLE = ("int16", "int32", "int64")
NUMBERS = {
    **{f"numpy {name}": RGB.astype(name) for name in ("uint8", *WHOLE, "float32", "float64", "float16")},
    **{
        f"torch {name}": first.to(getattr(torch, name)) for name in (*WHOLE, "float32", "float16", "bfloat16")
    },
    **{f"0..1 {name}": (RGB / 255).astype(name) for name in ("float64", "float32", "float16")},
    "ToTensor": to_tensor(RGB),
    "ToTensor with noise": to_tensor(RGB) + 1e-4,
    "16 bits": RGB.astype(np.uint16) * 257,
    "16 bits, other byte order": (RGB.astype(np.uint16) * 257).astype(">u2"),
    "torch 16 bits": torch.from_numpy(RGB.astype(np.uint16) * 257),
    "16 bits as int32": RGB.astype(np.int32) * 257,
    "channels first": RGB.transpose(2, 0, 1),
    "negative strides": np.ascontiguousarray(RGB[::-1])[::-1],
    "with transparency": np.dstack([RGB, GREY]),
    "bytes": encode(drawn("RGB"), "PNG"),
    "bytearray": bytearray(encode(drawn("RGB"), "PNG")),
    "file": io.BytesIO(encode(drawn("RGB"), "PNG")),
}


@pytest.mark.parametrize("given", NUMBERS)
def test_numbers_of_every_dtype(given, processor):
    """The processor and a chat give the pixels of the picture, whatever the dtype of its numbers."""
    expected = pixels(processor, drawn("RGB"))
    assert torch.equal(pixels(processor, NUMBERS[given]), expected)
    if not given.endswith("es") and given != "file":
        content = [{"type": "image", "image": NUMBERS[given]}, {"type": "text", "text": "what ?"}]
        template = "{% for part in messages[0]['content'] %}{{ part['text'] or '<|image|>' }}{% endfor %}"
        options = dict(chat_template=template, tokenize=True, return_dict=True, return_tensors="pt")
        chat = processor.apply_chat_template([{"role": "user", "content": content}], **options)
        assert torch.equal(chat["pixel_values"], expected)


BITS = np.array(drawn("1"))
ONE_SHADE = [(grey, GREY) for grey in (GREY, GREY[None], GREY[..., None], np.dstack([GREY, GREY]))]
ONE_SHADE += [(bits, BITS) for bits in (BITS, torch.from_numpy(BITS)[None])]


@pytest.mark.parametrize(("given", "expected"), ONE_SHADE)
def test_grey_and_black_and_white_with_and_without_an_axis_of_channels(given, expected, processor):
    assert torch.equal(pixels(processor, given), pixels(processor, Image.fromarray(expected)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.where(RGB > 9, np.nan, 0.5), "float64.* from nan to nan"),
        (torch.full((3, 9, 8), torch.inf), "float32.* from inf to inf"),
        (RGB / 127.5 - 1, "float64.* from -1 to 0.85"),
        (RGB / np.float32(200), "float32.* from 0 to 1.18"),
        (RGB.astype(np.float32) * 257, "float32.* from 0 to 60652"),
        (RGB.astype(np.uint16), "uint16.* from 0 to 236"),
        (RGB.astype(np.int16) - 9, "int16.* from -9 to 227"),
        (RGB.astype(np.int16) * 100, "int16.* from 0 to 23600"),
        (Image.fromarray(GREY.astype(np.int32) * 300), "int32.* from 0 to 70800"),
        (RGB * 1j, "complex128"),
        (np.array([["a"]]), "str"),
        (np.zeros((5, 6, 7)), r"shape \[5, 6, 7\]"),
        (np.zeros(5), r"shape \[5\]"),
        (np.zeros((0, 4, 3)), r"\[0, 4, 3\]"),
        ({}, "a dict is not a picture"),
        (b"no picture", "of 10 bytes: is not a picture"),
    ],
)
def test_what_has_no_plain_reading(given, message, processor):
    with pytest.raises(PictureError, match=message):
        pixels(processor, [given])


def test_without_rescaling(processor):
    """With `do_rescale=False` floats are passed to stock as they are."""
    unit = to_tensor(RGB)
    for picture, do_normalize in ((unit, True), (unit, False), (unit * 2 - 1, False)):
        given, expected = (
            pixels(maker, picture, do_rescale=False, do_normalize=do_normalize)
            for maker in (processor, make_processor())
        )
        assert torch.equal(given, expected)
