"""Test the presets of published models, and their numbers of parameters."""

import pytest

from llamoe.configuration import PRESETS, count_parameters, preset
from llamoe.modeling.registration import empty_model

# Numbers of parameters in the released files; those of Llama 4 include tower and projector.
TOTALS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "llama-4-scout": 108_641_793_536,
    "llama-4-maverick": 401_583_781_376,
}
# Millions of parameters, as published with one decimal.
TOWERS = {
    "metaclip-b32": 87.8,
    "metaclip-b16": 86.2,
    "metaclip-l14": 304.0,
    "metaclip-h14": 632.1,
    "metaclip-g14": 1844.9,
}
# One model of each family, and both of Llama 4.
BUILT = [
    "llama-2-70b",
    "llama-3.1-8b",
    "mistral-7b-v0.3",
    "mixtral-8x22b",
    "llama-4-scout",
    "llama-4-maverick",
]


@pytest.mark.parametrize("name", PRESETS)
def test_published_counts(name):
    count = count_parameters(preset(name))
    assert count.total == TOTALS[name] if name in TOTALS else round(count.total / 1e6, 1) == TOWERS[name]
    is_mixture = name.startswith(("mixtral", "llama-4"))
    assert count.active < count.total if is_mixture else count.active == count.total


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((name, {}) for name in (*BUILT, "metaclip-b32")),
        ("metaclip-g14", {"image_size": 378, "hidden_act": "gelu"}),
        ("llama-7b", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}),
        ("llama-3-8b", {"tie_word_embeddings": True, "num_hidden_layers": 2}),
        ("llama-2-7b", {"head_dim": 64, "num_key_value_heads": 1, "num_hidden_layers": 2}),
        ("mixtral-8x7b", {"use_shared_expert": True, "num_hidden_layers": 2}),
        ("llama-4-maverick", {"text_config": {"num_hidden_layers": 4, "attention_bias": True}}),
        ("llama-4-maverick", {"text_config": {"num_hidden_layers": 3, "moe_layers": []}}),
        ("llama-4-scout", {"text_config": {"num_hidden_layers": 2, "moe_layers": [0], "mlp_bias": True}}),
        ("llama-4-scout", {"text_config": {"num_hidden_layers": 2, "tie_word_embeddings": True}}),
        ("metaclip-b16", {"use_adapter": True, "projection_dim": None, "multi_modal_projector_bias": True}),
        ("metaclip-b16", {"use_post_layernorm": False, "attention_bias": False, "use_pre_layernorm": False}),
    ],
)
def test_counts_equal_the_model_on_the_meta_device(name, overrides):
    config = preset(name, **overrides)
    parameters = empty_model(config).parameters()
    assert sum(parameter.numel() for parameter in parameters) == count_parameters(config).total


def test_published_fields():
    assert set(PRESETS) == set(TOTALS) | set(TOWERS)
    llama_65b, llama_33b = preset("llama-65b"), preset("llama-33b")
    assert (llama_65b.rms_norm_eps, llama_33b.rms_norm_eps) == (1e-5, 1e-6)
    assert preset("llama-2-70b").num_key_value_heads == 8
    assert preset("llama-3-8b").rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert preset("llama-3.1-70b").rope_parameters["factor"] == 8.0
    scout, maverick = preset("llama-4-scout").text_config, preset("llama-4-maverick").text_config
    assert scout.moe_layers == list(range(48))
    assert maverick.moe_layers == list(range(1, 48, 2))
    assert (scout.use_qk_norm, maverick.use_qk_norm) == (True, False)
    assert [idx for idx in range(48) if not scout.layer_plan(idx).use_rope] == list(range(3, 48, 4))
    tower = preset("metaclip-h14", image_size=378)
    assert (tower.grid_size, tower.hidden_act, tower.use_rope) == (27, "quick_gelu", False)
    assert tower.projection_dim == 1024


def test_changing_a_result_changes_no_preset():
    preset("llama-4-scout").text_config.eos_token_id.append(1)
    assert preset("llama-4-scout").text_config.eos_token_id == [200001, 200007, 200008]
    with pytest.raises(TypeError):
        PRESETS["llama-7b"] = {}


def test_overrides():
    config = preset("llama-4-scout", image_token_index=5, vision_config={"num_hidden_layers": 1})
    assert (config.image_token_index, config.vision_config.num_hidden_layers) == (5, 1)
    assert config.vision_config.hidden_size == 1408


def test_unknown_names():
    with pytest.raises(ValueError, match="'xyzzy'.*llama-7b, "):
        preset("xyzzy")
    with pytest.raises(ValueError, match="hidden_sizes"):
        preset("llama-7b", hidden_sizes=3)
    with pytest.raises(ValueError, match="hidden_size"):
        preset("llama-7b", hidden_size=3.5)
