"""Wrong files and inputs each give an error that says what is wrong, before any heavy work."""

from contextlib import nullcontext

import pytest
import torch
from support.models import (
    IMAGE_TOKEN,
    TOKENS_PER_TILE,
    VISION,
    make_asymmetric,
    stock_dense_config,
    stock_multimodal_config,
    stock_text_config,
)
from support.spoilt_folders import refused
from support.tables import in_turn

import llamoe
from llamoe.modeling.decoder import DecoderLayer
from llamoe.modeling.input_checks import check_classes

# Damaged safetensors files; the tests of hostile files have other damage of headers.


def put_a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "damaged or cut short"),
    "empty": (lambda path: path.write_bytes(b""), "damaged or cut short"),
    "integers": (
        lambda path: path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1)),
        "has dtype I32, where the model needs BF16, F16, F32, F64",
    ),
    "gone": (lambda path: path.unlink(), "No such file"),
    "a folder": (put_a_folder, "not a file|Is a directory"),
}


@pytest.mark.parametrize(
    ("damage", "kind"),
    [*in_turn([*DAMAGE][:3], ["sharded", "single"]), ("gone", "sharded"), ("a folder", "sharded")],
)
def test_damaged_file(damage, kind, model_copy):
    spoil, says = DAMAGE[damage]
    path = sorted(model_copy(kind).glob("*.safetensors"))[-1]
    spoil(path)
    assert str(path) in refused(path.parent, says)


@pytest.mark.parametrize("name", ["params.json", "consolidated.00.pth"])
@pytest.mark.parametrize("subfolder", ["", "original"])
def test_metas_folder_says_how_to_convert_it(name, subfolder, tmp_path):
    """Meta's folders have two files by which they are recognised; after an interrupted download there may be one."""
    place = tmp_path / subfolder
    place.mkdir(exist_ok=True)
    (place / name).write_text("{}")
    for model_class in (llamoe.LlamoeDenseForCausalLM, llamoe.LlamoeForConditionalGeneration):
        with pytest.raises(llamoe.CheckpointError, match=f"`llamoe convert {place}/? OUT`"):
            model_class.from_pretrained(tmp_path, subfolder=subfolder)


# Saving


@pytest.mark.parametrize(
    ("name", "make", "fields", "layout", "says"),
    [
        (
            "LlamoeForCausalLM",
            stock_text_config,
            {"rope_interleave": False},
            "stock",
            "rope_interleave = False",
        ),
        ("LlamoeModel", stock_multimodal_config, {}, "stock", "has no class like LlamoeModel"),
        ("LlamoeDenseForCausalLM", stock_dense_config, {}, "gguf", "layout='gguf'.*'llamoe' and 'stock'"),
    ],
)
def test_a_layout_that_cannot_be_written_writes_nothing(name, make, fields, layout, says, tmp_path):
    config = llamoe.from_stock(make())
    for field, value in fields.items():
        setattr(config, field, value)
    with pytest.raises(ValueError, match=says):
        getattr(llamoe, name)(config).save_pretrained(tmp_path / "model", layout=layout)
    assert not (tmp_path / "model").exists()


def test_saving_onto_a_file(tmp_path):
    """transformers would only log that nothing was saved."""
    (tmp_path / "model").write_text("mine")
    with pytest.raises((OSError, ValueError), match="model"):
        llamoe.LlamoeDenseForCausalLM(stock_dense_config()).save_pretrained(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"


# Inputs of `forward`

IDS = torch.arange(3, 45).view(2, 21)
EMBEDS = torch.ones(2, 21, 72)
MASK = torch.ones_like(IDS)


@pytest.fixture(scope="module")
def heads():
    configs = [
        ("LlamoeDenseForCausalLM", stock_dense_config),
        ("LlamoeForCausalLM", stock_text_config),
        ("LlamoeForConditionalGeneration", stock_multimodal_config),
    ]
    models = {name: make_asymmetric(getattr(llamoe, name)(config())) for name, config in configs}
    for model in models.values():
        for module in model.modules():
            if isinstance(module, DecoderLayer):
                module.register_forward_pre_hook(lambda *_: pytest.fail("a layer ran"))
    return models


# The last entry of each row is a part of the error.
BAD_INPUTS = [
    {},
    {"input_ids": IDS, "inputs_embeds": EMBEDS},
    {"input_ids": IDS + 80},
    {"input_ids": IDS - 4},
    {"input_ids": IDS, "attention_mask": MASK[:, 1:]},
    {"input_ids": IDS, "attention_mask": torch.ones(2, 22)},
    {"input_ids": IDS, "attention_mask": torch.ones(3, 21)},
    {"input_ids": IDS, "attention_mask": MASK[0]},
    {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 21, 21, dtype=torch.long)},
    {"input_ids": IDS, "labels": IDS[:, 1:]},
    {"input_ids": IDS, "labels": IDS.T},
    {"input_ids": IDS, "labels": torch.where(IDS == 7, -1, IDS)},
    {"input_ids": IDS, "labels": IDS + 80},
]
NAMES = ["LlamoeDenseForCausalLM", "LlamoeForCausalLM", "LlamoeForConditionalGeneration"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", range(len(BAD_INPUTS)))
def test_bad_inputs(number, name, heads):
    given = BAD_INPUTS[number]
    with pytest.raises(ValueError, match=[*given][-1] if given else "input_ids or inputs_embeds"):
        heads[name](**given)


@pytest.mark.parametrize("how", ["first of a row", "ignore_index", "shift_labels", "a loss of one's own"])
def test_labels_that_mean_something_else(how):
    """Labels that no loss uses, or that a loss of the user's reads in its own way, are not refused."""
    model = make_asymmetric(llamoe.LlamoeDenseForCausalLM(stock_dense_config()))
    labels, extra = torch.where(torch.arange(21) % 5 == 2, -1, IDS), {}
    counts = torch.where(labels == -1, -100, labels)
    expected = model(input_ids=IDS, labels=counts).loss
    if how == "first of a row":
        labels = counts.index_fill(1, torch.tensor([0]), -1)
    elif how == "ignore_index":
        extra = {"ignore_index": -1}
    elif how == "shift_labels":
        extra = {"shift_labels": torch.cat([counts[:, 1:], torch.full((2, 1), -100)], 1)}
    else:
        loss = model.loss_function
        model.loss_function = lambda labels, **kwargs: loss(labels=labels.where(labels != -1, -100), **kwargs)
    assert torch.equal(model(input_ids=IDS, labels=labels, **extra).loss, expected)


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("meta", False)])
def test_values_are_read_on_the_cpu_alone(device, refused):
    """Values on a GPU are not read, since the CPU would wait for it; tensors on the meta device have none."""
    with pytest.raises(ValueError, match="labels contain -1") if refused else nullcontext():
        check_classes(torch.full((2, 3), -1, device=device), 99)


def test_mask_of_the_new_tokens_only(heads):
    """With a cache the mask must cover cached tokens, too; a shorter one would hide the new tokens in silence."""
    model = make_asymmetric(llamoe.LlamoeForCausalLM(stock_text_config()))
    past = model(input_ids=IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="attention_mask"):
        model(input_ids=IDS[:, :3], attention_mask=MASK[:, :3], past_key_values=past)


SIZE = VISION["image_size"]
PIXELS = torch.zeros(2, 3, SIZE, SIZE)


def ids_with_images(tiles, less=0):
    ids = IDS.clone()
    ids.view(-1)[5 : 5 + TOKENS_PER_TILE * tiles - less] = IMAGE_TOKEN
    return ids


# test_vision.py has more wrong tiles, for the tower alone.
BAD_PIXELS = {
    "shape": (PIXELS[0], 2, 0, "pixel_values"),
    "integers": (PIXELS.to(torch.uint8), 2, 0, "pixel_values"),
    "too_few_tokens": (torch.cat([PIXELS, PIXELS[:1]]), 2, 0, "8 image tokens.* 12 image features"),
    "too_many_tokens": (PIXELS[:1], 2, 0, "8 image tokens.* 4 image features"),
    "no_pixels": (None, 2, 0, "8 image tokens.* 0 image features"),
    "truncated": (PIXELS, 2, 2, "6 image tokens.* 8 image features"),
    "not_expanded": (PIXELS[:1], 0, 0, "0 image tokens.* 4 image features"),
}


@pytest.mark.parametrize("pixels", BAD_PIXELS)
def test_bad_pixels(pixels, heads):
    given, tiles, less, says = BAD_PIXELS[pixels]
    with pytest.raises(ValueError, match=says):
        heads["LlamoeForConditionalGeneration"](input_ids=ids_with_images(tiles, less), pixel_values=given)


def test_image_features_of_another_size_or_twice(heads):
    model = heads["LlamoeForConditionalGeneration"]
    features = model.get_image_features(PIXELS)
    features.pooler_output = features.pooler_output[..., :60]
    with pytest.raises(ValueError, match="hidden_size = 72"):
        model(input_ids=ids_with_images(2), mm_encoder_outputs={"image": features})
    with pytest.raises(ValueError, match="pixel_values or mm_encoder_outputs"):
        model(input_ids=ids_with_images(2), pixel_values=PIXELS, mm_encoder_outputs={"image": object()})
