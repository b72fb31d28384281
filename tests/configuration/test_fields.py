"""Test the effect that each field declares, and that it depends on the parts that a model has."""

import dataclasses

import pytest

from llamoe.configuration import LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeTextConfig, LlamoeVisionConfig
from llamoe.configuration.fields import fields_without_effect
from llamoe.configuration.stock import CONFIG_CLASSES

ROUTER = {
    "router_score_function", "router_pre_softmax", "norm_topk_prob", "apply_router_weight_on_input",
    "use_shared_expert", "router_balancing",
}  # fmt: skip


@pytest.mark.parametrize("config_class", CONFIG_CLASSES)
def test_every_field_declares_its_effect(config_class):
    bases = [base for base in config_class.__mro__ if base.__module__.startswith("llamoe.configuration")]
    inherited = {field.name for field in dataclasses.fields(bases[-1])}
    names = {field.name for field in dataclasses.fields(config_class)} - inherited
    assert config_class.meanings.keys() == names
    for name in names:
        declared = [base.__dataclass_fields__[name] for base in bases if name in base.__dataclass_fields__]
        assert any("meaning" in field.metadata for field in declared), name


@pytest.mark.parametrize(
    ("config", "without", "with_effect"),
    [
        (LlamoeDenseConfig(), {"sliding_window", "layer_types"}, {"rope_interleave", "rope_parameters"}),
        (
            LlamoeDenseConfig(sliding_window=8),
            {"skip_logits", "read_from"},
            {"sliding_window", "layer_types"},
        ),
        (
            LlamoeMixtralConfig(),
            {"router_z_loss_coef", "output_router_logits"},
            ROUTER | {"num_local_experts"},
        ),
        (
            LlamoeTextConfig(moe_layers=[]),
            ROUTER | {"intermediate_size", "num_local_experts", "num_experts_per_tok"},
            {"intermediate_size_mlp", "attn_scale", "attention_chunk_size", "moe_layers"},
        ),
        (
            LlamoeTextConfig(),
            {"intermediate_size_mlp", "no_rope_layer_interval"},
            ROUTER | {"intermediate_size"},
        ),
        (
            LlamoeTextConfig(no_rope_layer_interval=0, attention_chunk_size=None),
            {"attn_temperature_tuning", "floor_scale", "attn_scale", "attention_chunk_size"},
            {"use_qk_norm", "rope_parameters", "no_rope_layers"},
        ),
        (
            LlamoeTextConfig(num_hidden_layers=1, no_rope_layers=[0]),
            {"use_qk_norm", "rope_parameters", "rope_interleave"},
            {"attn_temperature_tuning", "floor_scale"},
        ),
        (
            LlamoeTextConfig(attn_temperature_tuning=False),
            {"floor_scale", "attn_scale"},
            {"attn_temperature_tuning"},
        ),
        (LlamoeVisionConfig(), {"projector_dropout"}, {"pixel_shuffle_ratio", "hidden_act"}),
        (
            LlamoeVisionConfig(use_adapter=False),
            {"pixel_shuffle_ratio", "vision_output_dim"},
            {"use_adapter"},
        ),
    ],
)
def test_a_field_has_an_effect_if_the_model_has_its_part(config, without, with_effect):
    unused = fields_without_effect(config)
    assert without <= unused and not with_effect & unused
