"""Test the tower's configuration: sizes that follow from others, and errors."""

import re

import pytest

from llamoe.configuration import LlamoeConfig, LlamoeVisionConfig

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "image_size": 56,
    "patch_size": 14,
}


# Fields, and the sizes that follow from them.
DERIVED = [
    ({}, dict(grid_size=4, num_patches=16, head_dim=8, shuffle_size=2, adapter_input_dim=128, tokens_per_tile=4)),
    # The published tile.
    (dict(image_size=336), dict(tokens_per_tile=144)),
    (dict(image_size=84, pixel_shuffle_ratio=1.0), dict(adapter_input_dim=32, tokens_per_tile=36)),
    (dict(image_size=84, pixel_shuffle_ratio=1 / 3), dict(adapter_input_dim=288, tokens_per_tile=4)),
    (dict(image_size=98, use_adapter=False), dict(tokens_per_tile=49)),
    (dict(image_size=98, use_adapter=False, vision_feature_select_strategy="full"), dict(tokens_per_tile=50)),
    *((dict(image_size=pair, patch_size=[14, 14]), dict(image_size=56, patch_size=14))
      for pair in ([56, 56], (56, 56))),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), DERIVED)
def test_derived_sizes(fields, expected):
    config = LlamoeVisionConfig(**SMALL | fields)
    assert {name: getattr(config, name) for name in expected} == expected


BAD = [
    ("image_size", 70, "merges 2 by 2 patches, and the picture has 5 by 5; valid: a multiple of 28"),
    ("image_size", 57, "multiple of patch_size = 14; valid: a multiple of 14"),
    ("image_size", [56, 28], "must be square; valid: an integer"),
    *((name, 0, "out of range; valid: at least 1 and at most ") for name in
      ("image_size", "patch_size", "num_attention_heads", "projection_dim", "projector_output_dim")),
    ("hidden_size", 30, "multiple of num_attention_heads = 4; valid: a multiple of 4"),
    *(("pixel_shuffle_ratio", ratio, "one over an integer; valid: 1.0, 0.5, 0.25") for ratio in (0.4, 0.0, 2.0)),
    ("vision_feature_select_strategy", "cls", "no such choice; valid: 'default' or 'full'"),
    ("vision_feature_select_strategy", "full", "class token; valid: 'default', or use_adapter = False"),
    *(("vision_feature_layer", layer, "there are 3 hidden states; valid: -3 to 2") for layer in (-4, 3)),
    ("projector_dropout", 1.5, "out of range"),
    ("attention_dropout", -0.5, "out of range; valid: at least 0 and below 1"),
    ("norm_eps", -1.0, "out of range; valid: at least 0 and at most "),
    ("use_rope", None, "wrong type NoneType; valid: bool"),
    ("image_size", "336", "wrong type str"),
    ("rope_parameters['rope_type']", "linear", "no scaling; valid: 'default'"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "match"), BAD)
def test_wrong_fields_are_refused(field, value, match):
    start = "^" + re.escape(f"LlamoeVisionConfig.{field} = {value!r}: ")
    fields = (
        {"rope_parameters": {"rope_type": value, "factor": 2.0}}
        if "rope" in field and value
        else {field: value}
    )
    with pytest.raises(ValueError, match=f"{start}.*{match}"):
        LlamoeVisionConfig(**SMALL | fields)


def test_rotation_needs_heads_of_four_channels():
    sizes = SMALL | {"hidden_size": 24}
    with pytest.raises(ValueError, match="head_dim = 6"):
        LlamoeVisionConfig(**sizes)
    assert LlamoeVisionConfig(**sizes, use_rope=False).head_dim == 6


def consistent() -> LlamoeConfig:
    return LlamoeConfig(vision_config=SMALL | {"vision_output_dim": 24, "projector_output_dim": 24})


@pytest.mark.parametrize(
    ("field", "value", "valid"), [("use_adapter", False, "True"), ("vision_output_dim", 25, "24")]
)
def test_multimodal_parts_that_do_not_fit(field, value, valid):
    config = consistent()
    config.check_multimodal()
    setattr(config.vision_config, field, value)
    with pytest.raises(
        ValueError, match=rf"^LlamoeConfig\.vision_config\.{field} = {value}: .*valid: {valid}"
    ):
        config.check_multimodal()
    # A configuration with the class defaults can be constructed, but its parts do not fit, as in transformers.
    with pytest.raises(ValueError, match="vision_output_dim = 7680"):
        LlamoeConfig().check_multimodal()


def test_multimodal_refuses_a_class_token():
    config = consistent()
    config.vision_config.vision_feature_select_strategy = "full"
    with pytest.raises(ValueError, match="vision_feature_select_strategy"):
        config.check_multimodal()
    with pytest.raises(ValueError, match=r"^LlamoeVisionConfig\.vision_feature_select_strategy"):
        config.validate()


def test_nested_errors_name_the_nested_class():
    with pytest.raises(ValueError, match=r"^LlamoeTextConfig\.num_experts_per_tok = 99"):
        LlamoeConfig(text_config={"num_experts_per_tok": 99})


def test_a_dictionary_set_later_becomes_a_configuration():
    config = consistent()
    config.vision_config = SMALL | {"image_size": 84}
    assert isinstance(config.vision_config, LlamoeVisionConfig)
    with pytest.raises(ValueError, match=r"^LlamoeVisionConfig\.image_size = 70"):
        config.vision_config = SMALL | {"image_size": 70}
    config.text_config = None
    with pytest.raises(ValueError, match="text_config"):
        config.validate()
