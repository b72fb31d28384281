"""The tower's configuration: derived sizes, and what is refused."""

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


def test_derived_sizes():
    config = LlamoeVisionConfig(**SMALL)
    assert (config.grid_size, config.num_patches, config.head_dim) == (4, 16, 8)
    assert (config.shuffle_size, config.adapter_input_dim, config.tokens_per_tile) == (2, 128, 4)


def test_published_tile_has_144_tokens():
    assert LlamoeVisionConfig(image_size=336).tokens_per_tile == 144


@pytest.mark.parametrize(("ratio", "merged", "tokens"), [(1.0, 32, 36), (0.5, 128, 9), (1 / 3, 288, 4)])
def test_pixel_shuffle_ratios(ratio, merged, tokens):
    config = LlamoeVisionConfig(**(SMALL | {"image_size": 84}), pixel_shuffle_ratio=ratio)
    assert (config.adapter_input_dim, config.tokens_per_tile) == (merged, tokens)


@pytest.mark.parametrize(("strategy", "tokens"), [("default", 49), ("full", 50)])
def test_without_adapter_any_grid_is_fine(strategy, tokens):
    config = LlamoeVisionConfig(
        **(SMALL | {"image_size": 98}), use_adapter=False, vision_feature_select_strategy=strategy
    )
    assert config.tokens_per_tile == tokens


@pytest.mark.parametrize("pair", [[56, 56], (56, 56)])
def test_square_pairs_become_integers(pair):
    config = LlamoeVisionConfig(**(SMALL | {"image_size": pair, "patch_size": [14, 14]}))
    assert (config.image_size, config.patch_size) == (56, 14)


BAD = [
    ("image_size", 70, "its grid of 5 by 5 patches .* 2 by 2; valid: a multiple of 28"),
    ("image_size", 57, "multiple of patch_size = 14; valid: a multiple of 14"),
    ("image_size", [56, 28], "must be square; valid: an integer"),
    *((name, 0, "out of range; valid: at least 1 and at most ") for name in
      ("image_size", "patch_size", "num_attention_heads", "projection_dim", "projector_output_dim")),
    ("hidden_size", 30, "multiple of num_attention_heads = 4; valid: a multiple of 4"),
    *(("pixel_shuffle_ratio", ratio, "one over an integer; valid: 1.0, 0.5, 0.25") for ratio in (0.4, 0.0, 2.0)),
    ("vision_feature_layer", 3, "num_hidden_layers .*; valid: -3 to 2"),
    ("vision_feature_layer", -4, "num_hidden_layers .*; valid: -3 to 2"),
    ("vision_feature_select_strategy", "cls", "unknown strategy; valid: 'default' or 'full'"),
    ("vision_feature_select_strategy", "full", "pixel shuffle .*; valid: 'default', or use_adapter = False"),
    ("projector_dropout", 1.5, "out of range"),
    ("attention_dropout", -0.5, "out of range; valid: at least 0 and below 1"),
    ("norm_eps", -1.0, "out of range; valid: at least 0 and at most "),
    ("use_rope", None, "wrong type NoneType; valid: bool"),
    ("image_size", "336", "wrong type str"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "match"), BAD)
def test_refuses(field, value, match):
    start = "^" + re.escape(f"LlamoeVisionConfig.{field} = {value!r}: ")
    with pytest.raises(ValueError, match=f"{start}.*{match}"):
        LlamoeVisionConfig(**(SMALL | {field: value}))


def test_rotation_needs_heads_of_four_channels():
    sizes = SMALL | {"hidden_size": 24}
    with pytest.raises(ValueError, match="head_dim = 6"):
        LlamoeVisionConfig(**sizes)
    assert LlamoeVisionConfig(**sizes, use_rope=False).head_dim == 6


def test_rotation_of_a_grid_has_no_scaling():
    rope = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ValueError, match="rope_parameters"):
        LlamoeVisionConfig(**SMALL, rope_parameters=rope)


def consistent() -> LlamoeConfig:
    return LlamoeConfig(vision_config=SMALL | {"vision_output_dim": 24, "projector_output_dim": 24})


def test_multimodal_parts_fit():
    consistent().check_multimodal()


@pytest.mark.parametrize(
    ("part", "field", "value", "match"),
    [
        ("vision_config", "use_adapter", False, r"vision_config\.use_adapter = False: .*valid: True"),
        ("vision_config", "vision_output_dim", 25, r"vision_config\.vision_output_dim = 25: .*valid: 24"),
    ],
)
def test_multimodal_parts_that_do_not_fit(part, field, value, match):
    config = consistent()
    setattr(getattr(config, part) if part else config, field, value)
    with pytest.raises(ValueError, match=rf"^LlamoeConfig\.{match}"):
        config.check_multimodal()


def test_multimodal_refuses_a_class_token():
    config = consistent()
    config.vision_config.vision_feature_select_strategy = "full"
    with pytest.raises(ValueError, match="vision_feature_select_strategy"):
        config.check_multimodal()
    with pytest.raises(ValueError, match=r"^LlamoeVisionConfig\.vision_feature_select_strategy"):
        config.validate()


def test_class_defaults_construct_but_do_not_fit():
    with pytest.raises(ValueError, match="vision_output_dim = 7680"):
        LlamoeConfig().check_multimodal()


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
