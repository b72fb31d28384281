"""What trainers ask of a processor: pixels as arrays and in the model's dtype, marks on the assistant's tokens."""

import numpy as np
import pytest
import torch
from support.models import stock_multimodal_config
from support.paths import TINY
from transformers import AutoProcessor

import llamoe

pytest.importorskip("PIL", reason="pictures need the extra 'vision'")
pytest.importorskip("torchvision", reason="pictures need the extra 'vision'")
from support.pictures import drawn, make_processor
from transformers import Llama4Processor


@pytest.fixture(scope="module")
def processors():
    return make_processor(llamoe.LlamoeProcessor), make_processor(Llama4Processor)


# Pixels

PICTURES = [drawn("RGB"), drawn("RGB").resize((150, 90)), drawn("RGB").resize((20, 31))]
TEXTS = ["<|image|> what ?", "<|image|> and <|image|> ?"]


def test_pixels_as_arrays_and_as_lists(processors):
    """Pixels are returned as tensors, arrays or lists; TRL's GRPO makes an array of the lists."""
    ours, _ = processors
    expected = ours(text=TEXTS, images=PICTURES, padding=True, return_tensors="pt")["pixel_values"]
    array = ours(text=TEXTS, images=PICTURES, padding=True, return_tensors="np")["pixel_values"]
    assert array.dtype == np.float32 and np.array_equal(array, expected.numpy())
    listed = ours(text=TEXTS, images=PICTURES)
    assert isinstance(listed["pixel_values"], list) and isinstance(listed["input_ids"][0], list)
    assert torch.equal(torch.tensor(np.array(listed["pixel_values"])), expected)
    only = ours(text="<|image|>", images=PICTURES[0], images_kwargs={"return_tensors": "np"})["pixel_values"]
    assert isinstance(only, np.ndarray) and only.dtype == np.float32


RAW = dict(do_rescale=False, do_normalize=False)


@pytest.mark.parametrize("options", [{}, dict(max_patches=3), dict(do_normalize=False), RAW], ids=str)
def test_pixels_are_float32_with_stocks_numbers(options, processors):
    """Pixels in bfloat16 become float32; integers, which stock returns without normalizing, stay integers."""
    ours, stock = (
        processor(text=TEXTS, images=PICTURES, padding=True, return_tensors="pt", **options)
        for processor in processors
    )
    given, expected = ours["pixel_values"], stock["pixel_values"]
    assert (expected.dtype is torch.bfloat16) == ("do_normalize" not in options)
    assert given.dtype is (torch.float32 if expected.dtype is torch.bfloat16 else expected.dtype)
    assert torch.equal(given, expected.to(given.dtype))
    assert ours.keys() == stock.keys() and torch.equal(ours["input_ids"], stock["input_ids"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_cast_pixels_wherever_they_come_in(dtype, processors):
    """Each method that takes pixels casts them to the model's dtype."""
    config = stock_multimodal_config()
    config.image_token_index = processors[0].tokenizer.convert_tokens_to_ids("<|patch|>")
    model = llamoe.LlamoeForConditionalGeneration(config).to(dtype).eval()
    inputs = processors[0](text=TEXTS, images=PICTURES, padding=True, return_tensors="pt")
    exact = dict(inputs, pixel_values=inputs["pixel_values"].to(dtype))
    calls = {
        "forward": lambda inputs: model(**inputs).logits,
        "base": lambda inputs: model.model(**inputs).last_hidden_state,
        "features": lambda inputs: model.get_image_features(inputs["pixel_values"]).pooler_output,
        "tower": lambda inputs: model.vision_model(inputs["pixel_values"]).last_hidden_state,
        "generate": lambda inputs: model.generate(**inputs, max_new_tokens=3, do_sample=False),
        "beams": lambda inputs: model.generate(**inputs, max_new_tokens=3, num_beams=2, do_sample=False),
    }
    with torch.no_grad():
        for name, call in calls.items():
            expected = call(exact)
            for given in (torch.float32, torch.bfloat16, torch.float64):
                # bfloat16 can represent these pixels, so that each dtype has the same numbers.
                pixels = inputs["pixel_values"].to(given)
                assert torch.equal(call(dict(inputs, pixel_values=pixels)), expected), (name, given)


# The assistant's tokens


@pytest.mark.parametrize("max_patches", [1, 4])
def test_the_assistants_tokens_are_marked_behind_pictures(max_patches):
    """The mask marks the answers alone, in rows of different lengths whose pictures have one tile or several."""
    processor = AutoProcessor.from_pretrained(TINY)
    picture = {"type": "image", "path": str(TINY.parent / "pictures" / "two_shapes.png")}
    question = {"role": "user", "content": [picture, {"type": "text", "text": "What is in the picture?"}]}
    answer = {"role": "assistant", "content": "a red circle."}
    inputs = processor.apply_chat_template(
        [[question, answer, question, answer], [question]],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True, "max_patches": max_patches},
    )
    assert len(inputs["pixel_values"]) == 3 * (1 if max_patches == 1 else 5)
    rows = zip(inputs["input_ids"], inputs["assistant_masks"], strict=True)
    texts = [processor.decode(ids[marks.bool()]) for ids, marks in rows]
    assert texts == ["a red circle.<|eot|>" * 2, ""]
