"""Test reading transformers' configurations in every form, and writing them again; "stock" means transformers' own."""

import copy
import dataclasses
import json
import logging

import pytest
import transformers
from support import models
from transformers import GenerationConfig, Llama4Config, Llama4TextConfig, Llama4VisionConfig, LlamaConfig

from llamoe.configuration import (
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeMixtralConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
    from_stock,
    preset,
    to_stock,
)

PAIRS = [
    (LlamaConfig, LlamoeDenseConfig),
    (Llama4TextConfig, LlamoeTextConfig),
    (Llama4VisionConfig, LlamoeVisionConfig),
    (Llama4Config, LlamoeConfig),
]
TEXT = models.TEXT | {
    "num_hidden_layers": 6,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    "eos_token_id": [2, 3],
}
VISION = models.VISION
STOCK = {
    "llama": lambda: models.stock_dense_config(
        **models.scaled_rope("llama3"),
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ),
    "llama4_text": lambda: Llama4TextConfig(**TEXT, architectures=["Llama4ForCausalLM"]),
    "llama4_vision_model": lambda: Llama4VisionConfig(**VISION, architectures=["Llama4VisionModel"]),
    "llama4": lambda: Llama4Config(
        text_config=copy.deepcopy(TEXT),
        vision_config=dict(VISION),
        image_token_index=90,
        architectures=["Llama4ForConditionalGeneration"],
        dtype="bfloat16",
    ),
}
OURS = {stock.model_type: ours for stock, ours in PAIRS}
kinds = pytest.mark.parametrize("kind", STOCK)


@pytest.fixture
def warnings(caplog):
    """Return the warnings that transformers and llamoe log."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    # A command that ran before in this process may have turned off transformers' warnings.
    caplog.set_level(logging.WARNING, logger="transformers")
    caplog.set_level(logging.WARNING)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(("stock", "ours"), PAIRS)
def test_every_stock_field_has_the_stock_default(stock, ours):
    mine, theirs = ours(), stock()
    for field in dataclasses.fields(stock):
        if field.name in ("text_config", "vision_config"):
            continue
        assert field.name in {f.name for f in dataclasses.fields(ours)}
        assert getattr(mine, field.name) == getattr(theirs, field.name), field.name
    assert mine.model_type == ours.model_type


@kinds
def test_all_ways_of_reading_give_the_same(kind, tmp_path, warnings):
    stock, ours = STOCK[kind](), OURS[kind]
    stock.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["model_type"] == kind
    before = copy.deepcopy(content)
    ways = [
        ours.from_pretrained(tmp_path),
        ours.from_pretrained(str(tmp_path / "config.json")),
        ours.from_dict(content),
        ours(**content),
        ours.from_json_file(tmp_path / "config.json"),
        from_stock(stock),
        from_stock(content),
        from_stock(stock.to_dict()),
    ]
    assert content == before, "the caller's dictionary was changed"
    for config in ways:
        assert type(config) is ours
        assert config == ways[0]
        assert config.model_type == config.to_dict()["model_type"] == ours.model_type
    assert not warnings.records


@kinds
def test_a_configuration_is_written_as_it_was_read(kind, tmp_path):
    stock = STOCK[kind]()
    written = to_stock(from_stock(stock))
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert written["model_type"] == kind
    assert written.keys() <= stock.to_dict().keys(), "fields of stock only"
    assert type(stock).from_pretrained(tmp_path).to_dict() == stock.to_dict()


def test_equality_compares_nested_fields():
    config = from_stock(STOCK["llama4"]())
    other = copy.deepcopy(config)
    other.text_config.router_z_loss_coef = 0.5
    assert config != other
    assert config != config.text_config


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        ("LlamaModel", "LlamoeDenseModel"),
        ("LlamaForCausalLM", "LlamoeDenseForCausalLM"),
        ("LlamaForSequenceClassification", "LlamoeDenseForSequenceClassification"),
        ("LlamaForTokenClassification", "LlamoeDenseForTokenClassification"),
        ("LlamaForQuestionAnswering", "LlamoeDenseForQuestionAnswering"),
        ("SomethingElse", "SomethingElse"),
    ],
)
def test_architectures(stock, ours):
    assert hasattr(transformers, stock) or stock == "SomethingElse"
    config = LlamoeDenseConfig(model_type="llama", architectures=[stock])
    assert config.architectures == [ours]
    assert to_stock(config)["architectures"] == [stock]


@pytest.mark.parametrize("kind", ["llama4", "llamoe"])
def test_parts_of_a_multimodal_folder(kind, tmp_path, warnings):
    whole = STOCK["llama4"]()
    ours = from_stock(whole)
    (whole if kind == "llama4" else ours).save_pretrained(tmp_path)
    for part_class, part in ((LlamoeTextConfig, ours.text_config), (LlamoeVisionConfig, ours.vision_config)):
        part = copy.deepcopy(part)
        part.dtype = ours.dtype
        assert part_class.from_pretrained(tmp_path) == part
        assert part_class.from_dict(json.loads((tmp_path / "config.json").read_text())) == part
        assert part_class(**json.loads((tmp_path / "config.json").read_text())) == part
    assert not warnings.records


def test_a_part_takes_the_quantization_of_the_whole():
    content = STOCK["llama4"]().to_dict() | {"quantization_config": {"quant_method": "fp8"}}
    assert LlamoeTextConfig.from_dict(content).quantization_config == {"quant_method": "fp8"}


def test_unknown_attributes_are_kept():
    stock = STOCK["llama"]().to_dict() | {"quantization_config": {"quant_method": "fp8"}, "note": "kept"}
    config = LlamoeDenseConfig.from_dict(stock)
    assert (config.note, config.dtype) == ("kept", LlamoeDenseConfig(dtype="bfloat16").dtype)
    written = to_stock(config)
    assert written["note"] == "kept"
    assert written["quantization_config"] == {"quant_method": "fp8"}
    assert written["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("config_class", "name", "field", "way"),
    [
        (LlamoeTextConfig, "hidden_sise", "hidden_size", "call"),
        (LlamoeDenseConfig, "num_attention_head", "num_attention_heads", "from_dict"),
        (LlamoeVisionConfig, "pixel_shuffle_ration", "pixel_shuffle_ratio", "part"),
        (LlamoeConfig, "image_token_indx", "image_token_index", "override"),
        (LlamoeTextConfig, "num_expert", "num_experts", "from_pretrained"),
    ],
)
def test_a_misspelt_field_is_reported_once(config_class, name, field, way, warnings, tmp_path):
    # Forget which warnings earlier tests have logged.
    logging.Logger.warning_once.cache_clear()
    fields = {name: 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": config_class.model_type} | fields))
    make = {
        "call": lambda: config_class(**fields),
        "from_dict": lambda: config_class.from_dict(fields),
        "override": lambda: config_class.from_dict({}, **fields),
        "from_pretrained": lambda: config_class.from_pretrained(tmp_path),
        "part": lambda: LlamoeConfig(**{config_class.base_config_key: fields}),
    }[way]
    make()
    make()
    (record,) = warnings.records
    says = (
        f"{config_class.__name__} has no field {name!r}, so its value has no effect. Did you mean {field!r}?"
    )
    assert record.getMessage() == says


@kinds
def test_fields_of_stock_are_not_reported_as_misspelt(kind, warnings):
    """Neither are generation settings, which transformers 4 wrote into config.json."""
    logging.Logger.warning_once.cache_clear()
    former = ("pruned_heads", "tie_encoder_decoder", "sep_token_id", "torchscript", "rope_theta")
    generation = GenerationConfig().to_dict()
    content = {**dict.fromkeys(former), **generation, **STOCK[kind]().to_dict(), "some_key_of_a_user": 5}
    OURS[kind].from_dict(content)
    from_stock(STOCK[kind]())
    if kind == "llama4":
        LlamoeTextConfig.from_dict(content)
        LlamoeVisionConfig.from_dict(content)
    OURS[kind](**OURS[kind]().to_dict())
    OURS[kind](num_labels=3)
    assert not warnings.records


def test_nested_stock_objects():
    config = LlamoeConfig(text_config=STOCK["llama4_text"](), vision_config=STOCK["llama4_vision_model"]())
    assert config.text_config == from_stock(STOCK["llama4_text"]())
    assert config.vision_config == from_stock(STOCK["llama4_vision_model"]())
    own = LlamoeTextConfig()
    assert LlamoeConfig(text_config=own).text_config is own


def test_the_attention_backend_is_kept():
    stock = STOCK["llama"]()
    stock._attn_implementation = "eager"
    assert from_stock(stock)._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("config_class", "model_type", "match"),
    [
        (LlamoeDenseConfig, "qwen2", "valid: 'llamoe_dense', 'llama', 'mistral' or 'ministral'$"),
        (LlamoeDenseConfig, "llama4", r"LlamoeConfig reads 'llama4'"),
        (LlamoeTextConfig, "llama", r"LlamoeDenseConfig reads 'llama'"),
        (LlamoeTextConfig, "llama4", r"LlamoeConfig reads 'llama4'"),
        (LlamoeVisionConfig, "clip_vision_model", "valid: 'llamoe_vision' or 'llama4_vision_model'$"),
        (LlamoeConfig, "llama4_text", "LlamoeTextConfig reads 'llama4_text'"),
        (LlamoeConfig, 4, "valid: 'llamoe' or 'llama4'$"),
    ],
)
def test_model_types_of_other_classes_are_refused(config_class, model_type, match, tmp_path):
    content = {"model_type": model_type, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(content))
    match = rf"^{config_class.__name__}\.model_type = {model_type!r}: .*{match}"
    for make in (lambda: config_class(**content), lambda: config_class.from_pretrained(tmp_path)):
        with pytest.raises(ValueError, match=match):
            make()


def test_parts_of_other_model_types_are_refused():
    with pytest.raises(ValueError, match=r"LlamoeTextConfig\.model_type = 'llama': "):
        LlamoeConfig(text_config=LlamaConfig())
    with pytest.raises(ValueError, match=r"LlamoeTextConfig\.model_type = 'llava': "):
        LlamoeTextConfig.from_dict({"model_type": "llava", "text_config": {"model_type": "llama4_text"}})
    with pytest.raises(ValueError, match="model_type = 'qwen2': llamoe has no such model"):
        from_stock({"model_type": "qwen2"})
    with pytest.raises(ValueError, match="model_type = None: llamoe has no such model"):
        from_stock({"hidden_size": 64})


def test_the_model_type_cannot_be_changed():
    config = LlamoeTextConfig()
    config.model_type = "llama4_text"
    assert config.model_type == config.to_dict()["model_type"] == "llamoe_text"
    with pytest.raises(ValueError, match=r"LlamoeTextConfig\.model_type = 'qwen2'"):
        config.model_type = "qwen2"


def test_layers_with_fields_of_their_own_are_refused():
    with pytest.raises(ValueError, match=r"^LlamoeDenseConfig\.per_layer_config = "):
        LlamoeDenseConfig(per_layer_config={"0": {"intermediate_size": 3}})


@pytest.mark.parametrize(
    ("field", "value", "computed"),
    [
        ("hidden_act", "quick_gelu", "gelu"),
        ("norm_eps", 1e-3, 1e-5),
        ("multi_modal_projector_bias", True, False),
        ("vision_feature_layer", -2, -1),
        ("vision_feature_select_strategy", "full", "default"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_fields_that_stock_ignores_get_its_default(field, value, computed, nested, warnings):
    logging.Logger.warning_once.cache_clear()
    content = VISION | {field: value}
    if nested:
        config = LlamoeConfig.from_dict({"model_type": "llama4", "vision_config": content}).vision_config
    else:
        config = LlamoeVisionConfig.from_dict(content | {"model_type": "llama4_vision_model"})
    assert getattr(config, field) == computed
    assert [record for record in warnings.records if f"{field} = {value!r}" in record.getMessage()]


UNSTOCK = [
    (LlamoeDenseConfig, {}, {"rope_interleave": True}),
    (LlamoeDenseConfig, {"num_attention_heads": 6, "head_dim": 16}, {"hidden_size": 100}),
    (LlamoeDenseConfig, {"sliding_window": 8}, {"attention_bias": True, "mlp_bias": True}),
    (LlamoeMixtralConfig, {"num_hidden_layers": 2, "sliding_window": 8},
     {"layer_types": ["full_attention", "sliding_attention"]}),
    (LlamoeMixtralConfig, {}, {"rope_interleave": True, "use_shared_expert": True, "norm_topk_prob": False}),
    (LlamoeTextConfig, {}, {"rope_interleave": False, "mlp_bias": True, "router_score_function": "softmax",
     "norm_topk_prob": True, "apply_router_weight_on_input": False, "use_shared_expert": False,
     "router_balancing": "bias"}),
    (LlamoeVisionConfig, VISION, {"use_rope": False, "use_pre_layernorm": False, "use_post_layernorm": False,
     "vision_feature_layer": -2, "projection_dim": 8, "use_adapter": False, "projector_final_act": False,
     "attention_bias": False, "hidden_act": "quick_gelu", "norm_eps": 1e-6, "multi_modal_projector_bias": True,
     "intermediate_size": 100, "projector_input_dim": 40}),
]  # fmt: skip


@pytest.mark.parametrize(("config_class", "fields", "unknown"), UNSTOCK)
def test_fields_that_stock_cannot_compute_with_are_refused(config_class, fields, unknown):
    for name, value in unknown.items():
        config = config_class(**fields | {name: value})
        with pytest.raises(ValueError, match=rf"^{config_class.__name__}\.{name} = .*valid: "):
            to_stock(config)


def test_a_part_that_stock_cannot_compute_is_refused():
    config = LlamoeConfig(text_config={"mlp_bias": True}, vision_config=VISION)
    with pytest.raises(ValueError, match=r"^LlamoeTextConfig\.mlp_bias = True"):
        to_stock(config)


def test_training_fields_are_left_out():
    config = LlamoeTextConfig(
        router_z_loss_coef=0.1, router_dropout=0.1, expert_capacity_factor=1.5, output_expert_load=True
    )
    assert to_stock(config) == to_stock(LlamoeTextConfig())


def test_overrides_are_applied_before_fields_that_depend_on_them(tmp_path):
    STOCK["llama4_text"]().save_pretrained(tmp_path)
    config = LlamoeTextConfig.from_pretrained(tmp_path, num_hidden_layers=3)
    assert (config.no_rope_layers, config.moe_layers, len(config.layer_types)) == ([1, 1, 1], [1], 3)
    with pytest.raises(ValueError, match="entries for num_hidden_layers = 7"):
        LlamoeTextConfig.from_pretrained(tmp_path, num_hidden_layers=7)
    config = LlamoeTextConfig.from_pretrained(
        tmp_path, num_hidden_layers=8, layer_types=None, no_rope_layers=None, moe_layers=None
    )
    assert config.moe_layers == [1, 3, 5, 7]
    config, unused = LlamoeTextConfig.from_pretrained(
        tmp_path, num_experts=8, foo=1, return_unused_kwargs=True
    )
    assert config.num_local_experts == 8
    assert unused == {"foo": 1}
    with pytest.raises(ValueError, match=r"^LlamoeTextConfig\.num_key_value_heads = 4"):
        LlamoeTextConfig.from_pretrained(tmp_path, num_key_value_heads=4)


def test_the_text_part_decides_whether_embeddings_are_tied():
    whole = Llama4Config(text_config=TEXT | {"tie_word_embeddings": True}, vision_config=VISION)
    config = from_stock(whole)
    assert not config.tie_word_embeddings
    assert config.text_config.tie_word_embeddings


@pytest.mark.parametrize(("high", "warned"), [(1.0, False), (4.0, False), (0.5, True)])
def test_equal_frequency_factors_raise_no_warning(high, warned, warnings):
    """Scout has 1.0 for both: no frequency lies between the scaled ones and the others."""
    published = preset("llama-4-scout").text_config.rope_parameters
    assert published["high_freq_factor"] == published["low_freq_factor"] == 1.0
    LlamoeTextConfig(rope_parameters=published | {"high_freq_factor": high})
    assert any("high_freq_factor" in record.getMessage() for record in warnings.records) == warned
    assert bool(warnings.records) == warned
