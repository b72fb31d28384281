"""The whole multimodal model against transformers' `Llama4ForConditionalGeneration`."""

import pytest
import torch
from support.models import (
    IMAGE_TOKEN,
    TOKENS_PER_TILE,
    VISION,
    check_bfloat16_errors,
    check_choices,
    deviation_in_range,
    gradient_differences,
    load_whole,
    max_abs,
    mixtures,
    record_calls,
    stock_model,
    stock_multimodal_config,
)
from transformers import Llama4ForConditionalGeneration

from llamoe import LlamoeForCausalLM, LlamoeForConditionalGeneration, LlamoeModel

NAME, STOCK = "LlamoeForConditionalGeneration", "Llama4ForConditionalGeneration"
BEGIN_IMAGE, END_IMAGE, BETWEEN_TILES = 97, 98, 96
# Rows of a batch: n is a run of n text tokens, -n an image of n tiles.
PROMPTS = {
    "text-only": [[50], [31]],
    "one-image": [[7, -1, 40]],
    "two-images-in-a-row": [[3, -1, 9, -1, 30]],
    "image-first-and-last": [[-1, 40], [40, -1]],
    "several-tiles": [[5, -3, 31], [20, -2, 7, -1]],
    "rows-without-an-image": [[30], [9, -1, 28], [45]],
}


def prompt(name):
    """Token ids with padding on the right, mask and tiles, as the processor would make them."""
    generator = torch.Generator().manual_seed(2)
    tile = [IMAGE_TOKEN] * TOKENS_PER_TILE
    rows, num_tiles = [], 0
    for pieces in PROMPTS[name]:
        row = []
        for piece in pieces:
            if piece > 0:
                row += torch.randint(1, 96, (piece,), generator=generator).tolist()
            else:
                num_tiles += -piece
                row += [BEGIN_IMAGE, *tile, *([BETWEEN_TILES, *tile] * (-piece - 1)), END_IMAGE]
        rows.append(row)
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    inputs = dict(input_ids=ids, attention_mask=(ids != 0).long())
    if num_tiles:
        size = VISION["image_size"]
        # A slope over the picture, so that no two places of a tile, nor two tiles, look alike.
        slope = torch.linspace(-1, 1, num_tiles * 3 * size * size).view(num_tiles, 3, size, size)
        inputs["pixel_values"] = slope + torch.randn(num_tiles, 3, size, size, generator=generator)
    return inputs


def real(inputs, logits):
    return logits[inputs["attention_mask"].bool()]


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def attention(request):
    return request.param


@pytest.fixture(scope="module")
def stock(attention):
    config = stock_multimodal_config()
    config._attn_implementation = attention
    model = stock_model(Llama4ForConditionalGeneration, config, exact_in_bfloat16=True)
    assert model.config.text_config._attn_implementation == attention
    assert model.config.vision_config._attn_implementation == attention
    return model


@pytest.fixture(scope="module")
def folder(stock, tmp_path_factory):
    path = tmp_path_factory.mktemp("stock")
    stock.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ours(folder, attention):
    return load_whole(LlamoeForConditionalGeneration, folder, attn_implementation=attention)


@torch.no_grad()
@pytest.mark.parametrize("name", PROMPTS)
def test_logits(name, stock, ours, record_parity):
    inputs = prompt(name)
    expected, given = stock(**inputs), ours(**inputs)
    assert deviation_in_range(real(inputs, expected.logits))
    difference = max_abs(real(inputs, given.logits), real(inputs, expected.logits))
    record_parity(NAME, STOCK, "float32", difference, "logits")
    assert difference <= 1e-4
    if name == "text-only":
        assert given.image_hidden_states is None
    else:
        assert given.image_hidden_states.shape == (len(inputs["pixel_values"]), TOKENS_PER_TILE, 44)
        features = stock.get_image_features(pixel_values=inputs["pixel_values"], return_dict=True)
        difference = max_abs(given.image_hidden_states, features.last_hidden_state)
        record_parity(NAME, STOCK, "float32", difference, "image_hidden_states")
        assert difference <= 1e-4
        # The picture is seen: without it the logits are others.
        blank = ours(**{**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}).logits
        assert max_abs(real(inputs, blank), real(inputs, given.logits)) > 0.1


@torch.no_grad()
@pytest.mark.parametrize("name", ["text-only", "several-tiles", "rows-without-an-image"])
def test_bfloat16(name, stock, folder, attention, record_parity):
    inputs = prompt(name)
    options = dict(attn_implementation=attention, dtype=torch.bfloat16)
    stock_16 = load_whole(Llama4ForConditionalGeneration, folder, **options)
    ours_16 = load_whole(LlamoeForConditionalGeneration, folder, **options)
    inputs_16 = dict(inputs)
    if "pixel_values" in inputs:
        inputs_16["pixel_values"] = inputs["pixel_values"].bfloat16()
        inputs["pixel_values"] = inputs_16["pixel_values"].float()
    calls = record_calls(mixtures(stock_16.language_model))
    expected, given = stock_16(**inputs_16), ours_16(**inputs_16, output_router_logits=True)
    reference = stock(**inputs).logits
    logits = (real(inputs, x) for x in (given.logits, expected.logits, reference))
    check_bfloat16_errors(*logits, (NAME, STOCK), record_parity)
    is_real = inputs["attention_mask"].flatten().bool()
    its_choices = [logits[is_real] for _, (_, logits) in calls.values()]
    check_choices([logits[is_real] for logits in given.router_logits], its_choices, top_k=1)


def test_loss_and_gradients(stock, ours, record_parity):
    inputs = prompt("several-tiles")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[labels == IMAGE_TOKEN] = -100
    losses, pixel_gradients = [], []
    for model in (stock, ours):
        model.zero_grad()
        pixels = inputs["pixel_values"].clone().requires_grad_()
        losses.append(model(**{**inputs, "pixel_values": pixels}, labels=labels, num_items_in_batch=131).loss)
        losses[-1].backward()
        pixel_gradients.append(pixels.grad)
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-5)
    differences = gradient_differences(ours, stock)
    parts = {name.split(".")[0] for name in differences}
    assert parts == {"vision_model", "multi_modal_projector", "language_model"}
    difference = max_abs(*pixel_gradients)
    differences["pixel_values"] = (difference, difference / pixel_gradients[0].abs().max().item())
    absolute, relative = (max(values) for values in zip(*differences.values(), strict=True))
    record_parity(NAME, STOCK, "float32", absolute, "gradients")
    record_parity(NAME, STOCK, "float32", relative, "gradients, relative to each parameter's largest")
    # About 1e-6 as a rule: sums over all tokens in another order, through eight layers.
    assert relative <= 2e-5, max(differences.items(), key=lambda item: item[1][1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["text-only", "two-images-in-a-row", "image-first-and-last"])
def test_greedy_generation(name, stock, ours):
    inputs = prompt(name)
    if name == "text-only":  # stock's temperature would count the padding of the shorter row
        inputs = dict(input_ids=inputs["input_ids"][:1])
    options = dict(max_new_tokens=14, min_new_tokens=14, do_sample=False)
    options |= dict(return_dict_in_generate=True, output_logits=True)
    # One reference for both caches.
    expected = stock.generate(**inputs, **options)
    for cache in (None, "static"):
        given = ours.generate(**inputs, cache_implementation=cache, disable_compile=True, **options)
        assert given.sequences.tolist() == expected.sequences.tolist()
        for mine, its in zip(given.logits, expected.logits, strict=True):
            assert max_abs(mine, its) <= 1e-4


@torch.no_grad()
def test_image_features(stock, ours):
    pixels = prompt("several-tiles")["pixel_values"]
    expected = stock.vision_model(pixels).last_hidden_state
    given = ours.get_image_features(pixels)
    assert given.last_hidden_state.shape == expected.shape
    assert max_abs(given.last_hidden_state, expected) <= 1e-4
    # Stock returns the tower's output and projects later; ours holds both, with one entry for each tile.
    assert given.pooler_output.shape == (len(pixels), TOKENS_PER_TILE, ours.config.text_config.hidden_size)
    assert max_abs(given.pooler_output, stock.multi_modal_projector(expected)) <= 1e-4


@torch.no_grad()
def test_embeddings_with_pixels(stock, ours):
    inputs = prompt("several-tiles")
    expected = ours(**inputs).logits
    embedded = {key: value for key, value in inputs.items() if key != "input_ids"}
    embedded["inputs_embeds"] = ours.get_input_embeddings()(inputs["input_ids"])
    assert max_abs(ours(**embedded).logits, expected) == 0
    with pytest.raises(ValueError, match="pixel_values"):
        stock(**embedded)


@torch.no_grad()
@pytest.mark.parametrize("name", ["text-only", "several-tiles"])
def test_model_without_a_head(name, stock, folder, attention):
    inputs = prompt(name)
    model, info = LlamoeModel.from_pretrained(folder, output_loading_info=True, attn_implementation=attention)
    assert not any(info.values()), info  # the head's key is passed over on purpose
    logits = stock.language_model.lm_head(model(**inputs).last_hidden_state)
    assert max_abs(real(inputs, logits), real(inputs, stock(**inputs).logits)) <= 1e-4


@torch.no_grad()
def test_text_model_from_the_multimodal_folder(stock, folder, attention):
    inputs = prompt("text-only")
    model = load_whole(LlamoeForCausalLM, folder, attn_implementation=attention)
    given, expected = model(**inputs).logits, stock(**inputs).logits
    assert max_abs(real(inputs, given), real(inputs, expected)) <= 1e-4


@torch.no_grad()
def test_hidden_states(stock, ours, attention):
    inputs = prompt("two-images-in-a-row")
    wanted = dict(output_hidden_states=True, output_attentions=attention == "eager")
    expected, given = stock(**inputs, **wanted), ours(**inputs, **wanted)
    assert len(given.hidden_states) == len(expected.hidden_states) == 6
    for mine, its in zip(given.hidden_states, expected.hidden_states, strict=True):
        assert max_abs(mine, its) <= 1e-4
    if attention == "eager":
        assert len(given.attentions) == len(expected.attentions) == 5
        for mine, its in zip(given.attentions, expected.attentions, strict=True):
            assert mine.shape == its.shape and max_abs(mine, its) <= 1e-5  # at most 1
