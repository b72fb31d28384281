"""Folders of stock with a config in every form, parts of multimodal folders, and quantizations that are refused."""

import json
from functools import partial
from operator import attrgetter

import pytest
import torch
import transformers
from support.models import (
    TEXT,
    assert_same_weights,
    load_whole,
    max_abs,
    stock_dense_config,
    stock_model,
    stock_multimodal_config,
    stock_text_config,
)
from transformers import GPT2Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, LlamaForCausalLM

import llamoe
from llamoe.modeling.base import LlamoePreTrainedModel

TWO = dict(num_hidden_layers=2)
PAIRS = {
    "dense": (LlamaForCausalLM, partial(stock_dense_config, **TWO), llamoe.LlamoeDenseForCausalLM),
    "text": (Llama4ForCausalLM, partial(stock_text_config, **TWO), llamoe.LlamoeForCausalLM),
    "multimodal": (
        Llama4ForConditionalGeneration,
        partial(stock_multimodal_config, TWO, TWO),
        llamoe.LlamoeForConditionalGeneration,
    ),
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Return stock's model of each pair and the folder that stock saved it to; tests change neither."""
    place, models = tmp_path_factory.mktemp("stock"), {}
    for pair, (stock_class, make_config, _) in PAIRS.items():
        models[pair] = stock_model(stock_class, make_config()), place / pair
        models[pair][0].save_pretrained(place / pair)
    return models


@torch.no_grad()
def logits(model):
    return model(torch.randint(3, 90, (2, 41), generator=torch.Generator().manual_seed(1))).logits


@pytest.mark.parametrize("pair", PAIRS)
def test_a_config_of_stock_of_ours_or_a_path_gives_the_same_model(pair, stock):
    weights, (_, make_config, model_class) = stock[pair][0].state_dict(), PAIRS[pair]
    models = [
        load_whole(model_class, stock[pair][1], config=config)
        for config in (None, make_config(), llamoe.from_stock(make_config()), str(stock[pair][1]))
    ]
    for make in (model_class, model_class._from_config):
        models.append(make(make_config()).eval())
        models[-1].load_state_dict(weights)
    expected = logits(models[0])
    for model in models:
        assert type(model.config) is model_class.config_class
        assert torch.equal(logits(model), expected)


def test_overrides_by_keyword(stock):
    """Fields that a call names replace those of the folder, in a part and in the whole model, and are checked."""
    folder, fields = stock["multimodal"][1], {"attention_chunk_size": 7, "num_experts_per_tok": 3}
    text = load_whole(llamoe.LlamoeForCausalLM, folder, **fields)
    whole = load_whole(llamoe.LlamoeForConditionalGeneration, folder, text_config=fields)
    assert whole.config.text_config.hidden_size == TEXT["hidden_size"]
    assert torch.equal(logits(whole), logits(text))
    assert max_abs(logits(load_whole(llamoe.LlamoeForCausalLM, folder)), logits(text)) > 0.1
    with pytest.raises(ValueError, match="num_experts_per_tok = 6: .*1 to 5"):
        llamoe.LlamoeForCausalLM.from_pretrained(folder, num_experts_per_tok=6)


def test_a_config_of_another_model_is_refused(stock):
    model_class = llamoe.LlamoeForCausalLM
    for make in (
        lambda: model_class(GPT2Config()),
        lambda: model_class._from_config(GPT2Config()),
        lambda: model_class.from_pretrained(stock["text"][1], config=GPT2Config()),
    ):
        with pytest.raises(ValueError, match=r"'gpt2'.*'llama4'"):
            make()
    for wrong in (None, "folder", {"hidden_size": 72}):
        with pytest.raises(ValueError, match=rf"{model_class.__name__} .*{type(wrong).__name__}"):
            model_class(wrong)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("LlamoeForCausalLM", "language_model"),
        ("LlamoeTextModel", "language_model.model"),
        ("LlamoeVisionModel", "vision_model"),
        ("LlamoeModel", "model"),
    ],
)
def test_part_of_a_multimodal_folder(name, part, stock):
    """A class for a part of a multimodal model finds its config and its weights in the folder of the whole model."""
    whole = load_whole(llamoe.LlamoeForConditionalGeneration, stock["multimodal"][1])
    expected = attrgetter(part)(whole)
    model = load_whole(getattr(llamoe, name), stock["multimodal"][1])
    assert_same_weights(model.state_dict(), expected.state_dict())
    assert type(model.config) is type(expected.config)


# Quantized folders


@pytest.mark.parametrize(
    ("pair", "by", "method"),
    [
        ("text", "folder", "higgs"), ("multimodal", "config", "eetq"), ("text", "argument", "fp8"),
        ("multimodal", "text part", "eetq"),
    ],
)  # fmt: skip
def test_a_quantization_that_no_mixture_has_is_refused_before_a_weight_is_read(
    pair, by, method, stock, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        LlamoePreTrainedModel, "_load_pretrained_model", lambda *_, **__: pytest.fail("weights read")
    )
    model_class, content, options = PAIRS[pair][2], {"quant_method": method}, {}
    config = json.loads((stock[pair][1] / "config.json").read_text())
    if by == "argument":
        options["quantization_config"] = transformers.FineGrainedFP8Config()
    elif by == "config":
        options["config"] = PAIRS[pair][1]()
        options["config"].quantization_config = content
    elif by == "folder":
        config["quantization_config"] = content
    else:
        # transformers reads this entry if only the text part is loaded.
        config["text_config"]["quantization_config"] = content
        model_class = llamoe.LlamoeForCausalLM
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(stock[pair][1] / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{model_class.__name__} .*'{method}'.*QuantizationConfig"):
        model_class.from_pretrained(tmp_path, **options)
