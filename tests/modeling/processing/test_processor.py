"""Our processor gives what transformers' Llama 4 processor does, and counts the pictures of each text."""

import os

import pytest
import torch
from support import programs
from support.models import stock_multimodal_config

import llamoe

Image = pytest.importorskip("PIL.Image", reason="pictures need the extra 'vision'")
pytest.importorskip("torchvision", reason="pictures need the extra 'vision'")
from support.pictures import make_processor  # noqa: E402


@pytest.fixture(scope="module")
def processor():
    return make_processor()


def picture(height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


# Tiles


@pytest.mark.parametrize(
    ("height", "width", "tiles"), [(80, 100, 1), (336, 337, 1 * 2 + 1), (500, 700, 2 * 3 + 1)]
)
def test_a_tile_has_as_many_tokens_as_our_config_says(height, width, tiles):
    """A picture of several tiles has one tile more, with the whole picture."""
    processor = make_processor(size=336)
    inputs = processor(text="<|image|> what ?", images=picture(height, width), return_tensors="pt")
    vision = llamoe.preset("llama-4-scout").vision_config
    assert vision.tokens_per_tile == 144
    assert inputs["pixel_values"].shape == (tiles, 3, vision.image_size, vision.image_size)
    patch = processor.tokenizer.convert_tokens_to_ids("<|patch|>")
    assert (inputs["input_ids"] == patch).sum() == tiles * vision.tokens_per_tile
    assert inputs.keys() == {"input_ids", "attention_mask", "pixel_values"}


# Our thin processor

BATCHES = {
    "one_picture": (["<|image|> what is this ?"], [(40, 50)]),
    "many_tiles": (["what is <|image|> ?"], [(120, 150)]),
    "two_in_a_prompt": (["<|image|> and <|image|> what is in the picture ?"], [(56, 56), (57, 56)]),
    "two_rows": (["<|image|> what ?", "this is the picture <|image|> and this one"], [(60, 60), (30, 110)]),
    "uneven_rows": (
        ["what is this ?", "<|image|> and <|image|> ?", "the picture <|image|> is what ?"],
        [(30, 40), (57, 90), (200, 60)],
    ),
    "no_picture": (["what is this ?", "is this the picture and what is in this one ?"], []),
}


def test_ours_gives_what_stocks_does(processor, tmp_path):
    from transformers import AutoProcessor

    mine = make_processor(llamoe.LlamoeProcessor)
    for text, sizes in BATCHES.values():
        pictures = [picture(*size, seed=seed) for seed, size in enumerate(sizes)] or None
        given, expected = (
            maker(text=text, images=pictures, padding=True, return_tensors="pt")
            for maker in (mine, processor)
        )
        assert given.keys() == expected.keys()
        # The dtypes of pixels differ: `test_processor_answers.py`.
        assert all(torch.equal(given[name], expected[name]) for name in expected)
    llamoe.LlamoeForConditionalGeneration(stock_multimodal_config()).save_pretrained(tmp_path)
    for saved in (mine, processor):
        saved.save_pretrained(tmp_path)
        found = AutoProcessor.from_pretrained(tmp_path)
        assert type(found) is llamoe.LlamoeProcessor
        again = found(text=text, images=pictures, padding=True, return_tensors="pt")
        assert all(torch.equal(given[name], again[name]) for name in given)


ONE, TWO = "<|image|> ?", "<|image|> and <|image|> ?"


@pytest.mark.parametrize(
    ("rows", "texts", "message"),
    [
        (0, ONE, r"1 <\|image\|> tokens"),
        (0, ["what ?", ONE], r"1 <\|image\|> tokens"),
        (1, "what ?", r"0 <\|image\|> tokens"),
        (1, TWO, r"2 <\|image\|> tokens"),
        (2, ["what ?", ONE], r"1 <\|image\|> tokens"),
        ([2, 0], [ONE, ONE], r"\[1, 1\] image markers.* \[2, 0\] pictures"),
        ([1, 0], [ONE, ONE], r"\[1, 1\] image markers.* \[1, 0\] pictures"),
        ([1, 2, 1], [TWO, ONE, ONE], r"\[2, 1, 1\] image markers.* \[1, 2, 1\] pictures"),
        ([0, 0], ["what ?", ONE], r"\[0, 1\] image markers.* \[0, 0\] pictures"),
        ([1, 1], [TWO], r"\[2\] image markers.* \[1, 1\] pictures"),
        ([2], [ONE, ONE], r"\[1, 1\] image markers.* \[2\] pictures"),
        ([1, 0, 2], [ONE, "what ?", TWO], None),
        ([2], TWO, None),
        ([0, 0], ["what ?", "is"], None),
        ([], ["what ?"], None),
    ],
)
def test_pictures_are_counted_for_each_text(rows, texts, message, processor):
    if isinstance(rows, int):
        images = [picture(60, 60, seed) for seed in range(rows)] or None
    else:
        images = [[picture(60, 60, seed) for seed in range(count)] for count in rows]
    if message is not None:
        with pytest.raises(ValueError, match=message):
            make_processor(llamoe.LlamoeProcessor)(text=texts, images=images, padding=True)
        return
    inputs = make_processor(llamoe.LlamoeProcessor)(text=texts, images=images, padding=True)
    assert len(inputs.get("pixel_values", [])) == 5 * sum(rows) and "input_ids" in inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [["processor"], ["processor", "model"], ["model", "processor"]], ids="-".join
)
def test_our_processor_loads_without_our_import(order, processor, tmp_path):
    model = llamoe.LlamoeForConditionalGeneration(stock_multimodal_config())
    parts = {"processor": make_processor(llamoe.LlamoeProcessor), "model": model}
    for name in order:
        parts[name].save_pretrained(tmp_path / "folder")
    code = """
import sys
from transformers import AutoProcessor
first = AutoProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)
first.save_pretrained(sys.argv[2])
again = AutoProcessor.from_pretrained(sys.argv[2], trust_remote_code=True)
print(type(first).__module__, type(first).__name__, type(again) is type(first), first.patch_size)
"""
    done = programs.run(
        ["-c", code, tmp_path / "folder", tmp_path / "again"],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "llamoe.modeling.processing.processor LlamoeProcessor True 14"
    assert [path.name for path in (tmp_path / "again").glob("*.py")] == ["llamoe_hub.py"]
