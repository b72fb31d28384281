"""Folders that stock transformers and older releases wrote, parts of multimodal folders, configs that come along."""

import json
from functools import cache, partial

import pytest
import torch
import transformers
from support.models import (
    IMAGE_TOKEN,
    TEXT,
    TOKENS_PER_TILE,
    VISION,
    load_whole,
    max_abs,
    stock_dense_config,
    stock_model,
    stock_multimodal_config,
    stock_text_config,
)
from support.tables import in_turn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    LlamaForCausalLM,
)

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
for_pairs = pytest.mark.parametrize("pair", PAIRS)


def inputs_for(model):
    """Two rows without padding, where stock and ours must agree; with two tiles for a model that sees."""
    ids = torch.randint(3, 90, (2, 41), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids}
    if hasattr(model.config, "vision_config"):
        ids[:, 5 : 5 + TOKENS_PER_TILE] = IMAGE_TOKEN
        size = VISION["image_size"]
        inputs["pixel_values"] = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))
    return inputs


@torch.no_grad()
def logits(model, inputs=None):
    return model(**(inputs or inputs_for(model))).logits


@cache
def stock_of(pair):
    """A model that is only read."""
    stock_class, make_config, _ = PAIRS[pair]
    return stock_model(stock_class, make_config())


def save_stock(pair, folder, **options):
    model = stock_of(pair)
    model.save_pretrained(folder, **options)
    return model


def edit_json(path, **changes):
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


# Stock folders


@pytest.mark.parametrize(("files", "pair"), in_turn(["one", "sharded", "bin", "sharded_bin"], PAIRS, times=2))
def test_stock_folder_loads_by_its_path(pair, files, tmp_path):
    stock = save_stock(pair, tmp_path, max_shard_size="40KB" if files == "sharded" else "5GB")
    if "bin" in files:
        # What torch.save wrote before safetensors; transformers 5 reads it and no longer writes it.
        (tmp_path / "model.safetensors").unlink()
        weights = stock.state_dict()
        if files == "bin":
            torch.save(weights, tmp_path / "pytorch_model.bin")
        else:
            names = list(weights)
            halves = {"one.bin": names[: len(names) // 2], "two.bin": names[len(names) // 2 :]}
            for file, part in halves.items():
                torch.save({name: weights[name] for name in part}, tmp_path / file)
            weight_map = {name: file for file, part in halves.items() for name in part}
            index = {"metadata": {}, "weight_map": weight_map}
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    model = load_whole(PAIRS[pair][2], tmp_path)
    assert max_abs(logits(model), logits(stock)) < 2e-5 * logits(stock).std()


@for_pairs
def test_ways_to_say_config_agree(pair, tmp_path):
    stock = save_stock(pair, tmp_path)
    _, make_config, model_class = PAIRS[pair]
    expected = logits(load_whole(model_class, tmp_path))
    ways = [make_config(), llamoe.from_stock(make_config()), str(tmp_path)]
    for config in ways:
        assert torch.equal(logits(load_whole(model_class, tmp_path, config=config)), expected), type(config)
    built = model_class(make_config())
    assert type(built.config) is model_class.config_class
    built.load_state_dict(stock.state_dict())
    assert torch.equal(logits(built.eval()), expected)
    made = model_class._from_config(make_config())
    made.load_state_dict(stock.state_dict())
    assert torch.equal(logits(made.eval()), expected)


def test_old_stock_config(tmp_path):
    """Rotation and dtype under their old names, an integer for a truth value, an empty list for "derive it"."""
    stock = save_stock("text", tmp_path)
    expected = logits(stock)
    file = tmp_path / "config.json"
    edit_json(
        file,
        rope_parameters=...,
        rope_theta=TEXT.get("rope_theta", 500000.0),
        rope_scaling=None,
        dtype=...,
        torch_dtype="float32",
        attn_temperature_tuning=4,
        no_rope_layers=[],
        layer_types=...,
        moe_layers=...,
        for_llm_compressor=False,
        router_jitter_noise=0.0,
    )
    model = load_whole(llamoe.LlamoeForCausalLM, tmp_path, dtype="auto")
    assert model.dtype == torch.float32
    assert max_abs(logits(model), expected) < 2e-5 * expected.std()

    edit_json(file, rope_scaling={"type": "linear", "factor": 4.0}, torch_dtype="bfloat16")
    model = load_whole(llamoe.LlamoeForCausalLM, tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16
    rope = model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 4.0, 500000.0)


def test_old_dense_config(tmp_path):
    """The keys that LLaMA 2 was published with."""
    expected = logits(save_stock("dense", tmp_path))
    changes = dict(
        rope_parameters=..., rope_theta=10000.0, rope_scaling=None, dtype=..., torch_dtype="float16"
    )
    edit_json(tmp_path / "config.json", **changes)
    assert load_whole(llamoe.LlamoeDenseForCausalLM, tmp_path, dtype="auto").dtype == torch.float16
    model = load_whole(llamoe.LlamoeDenseForCausalLM, tmp_path, dtype=torch.float32)
    assert max_abs(logits(model), expected) < 2e-5 * expected.std()


def test_overrides_by_keyword(tmp_path):
    save_stock("multimodal", tmp_path)
    text = load_whole(
        llamoe.LlamoeForCausalLM, tmp_path, attention_chunk_size=7, num_experts=5, num_experts_per_tok=3
    )
    assert (text.config.attention_chunk_size, text.config.num_experts_per_tok) == (7, 3)
    expected = logits(text)
    whole = load_whole(
        llamoe.LlamoeForConditionalGeneration,
        tmp_path,
        text_config={"attention_chunk_size": 7, "num_experts_per_tok": 3},
    )
    assert whole.config.text_config.hidden_size == TEXT["hidden_size"]
    assert torch.equal(logits(whole, inputs_for(text)), expected)
    assert max_abs(logits(load_whole(llamoe.LlamoeForCausalLM, tmp_path), inputs_for(text)), expected) > 0.1
    with pytest.raises(ValueError, match="num_experts_per_tok = 6: .*1 to 5"):
        llamoe.LlamoeForCausalLM.from_pretrained(tmp_path, num_experts_per_tok=6)


@for_pairs
def test_config_of_nobody_we_know(pair, tmp_path):
    save_stock(pair, tmp_path)
    model_class = PAIRS[pair][2]
    for make in (
        lambda: model_class(GPT2Config()),
        lambda: model_class._from_config(GPT2Config()),
        lambda: model_class.from_pretrained(tmp_path, config=GPT2Config()),
    ):
        with pytest.raises(ValueError, match=r"'gpt2'.*'llama4'"):
            make()
    for wrong in (None, str(tmp_path), {"hidden_size": 72}):
        with pytest.raises(ValueError, match=rf"{model_class.__name__} .*{type(wrong).__name__}"):
            model_class(wrong)


# Parts of multimodal folders


@pytest.fixture(scope="module", params=["stock", "ours"])
def multimodal(request, tmp_path_factory):
    """A multimodal folder, written by stock or by us, and the model in it."""
    folder = tmp_path_factory.mktemp(request.param)
    save_stock("multimodal", folder / "stock")
    model = llamoe.LlamoeForConditionalGeneration.from_pretrained(folder / "stock")
    if request.param == "ours":
        model.save_pretrained(folder / "ours")
    return folder / request.param, model


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("LlamoeForCausalLM", "language_model"),
        ("LlamoeTextModel", "language_model.model"),
        ("LlamoeVisionModel", "vision_model"),
        ("LlamoeModel", "model"),
    ],
)
def test_part_of_a_multimodal_folder(name, part, multimodal):
    """Every class whose config is found in a multimodal one must find its weights there too."""
    folder, whole = multimodal
    expected = whole
    for step in part.split("."):
        expected = getattr(expected, step)
    model = load_whole(getattr(llamoe, name), folder)
    mine, theirs = model.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert type(model.config) is type(expected.config)


@pytest.mark.parametrize(
    ("auto", "name"),
    [
        (AutoModelForCausalLM, "LlamoeForCausalLM"),
        (AutoModel, "LlamoeModel"),
        (AutoModelForImageTextToText, "LlamoeForConditionalGeneration"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_auto_classes_on_our_multimodal_folder(auto, name, multimodal, tmp_path):
    _, whole = multimodal
    whole.save_pretrained(tmp_path, max_shard_size="40KB")
    assert type(load_whole(auto, tmp_path)) is getattr(llamoe, name)


def test_text_part_goes_its_own_way(multimodal, tmp_path):
    """Loaded from a multimodal folder, saved as a text model, read by stock's text class."""
    folder, whole = multimodal
    text = load_whole(llamoe.LlamoeForCausalLM, folder)
    expected = logits(whole, inputs_for(text))
    assert torch.equal(logits(text), expected)
    text.save_pretrained(tmp_path / "ours")
    assert torch.equal(logits(load_whole(AutoModelForCausalLM, tmp_path / "ours")), expected)
    text.save_pretrained(tmp_path / "stock", layout="stock")
    stock = load_whole(AutoModelForCausalLM, tmp_path / "stock")
    assert type(stock) is Llama4ForCausalLM
    assert max_abs(logits(stock), expected) < 2e-5 * expected.std()


# Quantized folders


@pytest.mark.parametrize("by", ["folder", "config", "argument"])
@pytest.mark.parametrize("pair", ["text", "multimodal"])
def test_quantized_mixture_is_refused_by_name(pair, by, tmp_path, monkeypatch):
    _, make_config, model_class = PAIRS[pair]
    save_stock(pair, tmp_path)
    content, options = {"quant_method": "fp8"}, {}
    monkeypatch.setattr(
        LlamoePreTrainedModel, "_load_pretrained_model", lambda *_, **__: pytest.fail("weights read")
    )
    if by == "argument":
        options["quantization_config"] = transformers.FineGrainedFP8Config()
    elif by == "config":
        content["quant_method"] = "eetq"
        options["config"] = make_config()
        options["config"].quantization_config = content
    else:
        content["quant_method"] = "higgs"
        edit_json(tmp_path / "config.json", quantization_config=content)
    method = content["quant_method"]
    with pytest.raises(ValueError, match=rf"{model_class.__name__} .*'{method}'.*QuantizationConfig"):
        model_class.from_pretrained(tmp_path, **options)


def test_quantization_inside_the_text_part_is_refused(tmp_path):
    """Where the text part is what is loaded; transformers reads nobody else's."""
    save_stock("multimodal", tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["text_config"]["quantization_config"] = {"quant_method": "eetq"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="'eetq'"):
        llamoe.LlamoeForCausalLM.from_pretrained(tmp_path)
