"""Which models llama.cpp computes as they are. What it makes of the others: tests/tools/test_llama_cpp.py."""

import pytest
from support.models import DENSE, MIXTRAL, ROPES, TEXT, VISION, scaled_rope

from llamoe.configuration import (
    PRESETS,
    ConfigurationError,
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeMixtralConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
    preset,
)
from llamoe.serving import check_for_gguf, gguf_problems

# What llama.cpp fixes for Llama 4.
FIXED = dict(attention_chunk_size=8192, floor_scale=8192)


def dense(**fields):
    return LlamoeDenseConfig(**{**DENSE, "hidden_size": 84, **fields})


def mixtral(**fields):
    return LlamoeMixtralConfig(**{**MIXTRAL, "sliding_window": None, **fields})


def text(**fields):
    return LlamoeTextConfig(**{**TEXT, "num_experts_per_tok": 2, **FIXED, **fields})


def multimodal(**fields):
    return LlamoeConfig(text_config=text(**fields), vision_config=VISION)


WINDOWED = ["sliding_attention"] * 3
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = scaled_rope("yarn")["rope_parameters"] | {"beta_fast": 32.0}


def yarn(**fields):
    return {"rope_parameters": {**YARN, **fields}}


REFUSED = {
    "activation": (dense(hidden_act="gelu"), "hidden_act = 'gelu'"),
    "activation of experts": (mixtral(hidden_act="relu"), "hidden_act = 'relu'"),
    "layers": (dense(num_hidden_layers=513), "num_hidden_layers = 513"),
    "experts": (mixtral(num_local_experts=1025), "num_local_experts = 1025"),
    "window": (dense(sliding_window=16), "position 16 on"),
    "window of experts": (mixtral(sliding_window=255), "max_position_embeddings = 255"),
    "layers with and without window": (
        dense(sliding_window=300, layer_types=MIXED, architectures=["LlamoeDenseForCausalLM"]),
        "architectures = 'MinistralForCausalLM'",
    ),
    "dynamic": (dense(**scaled_rope("dynamic")), "set rope_type = 'default'"),
    "longrope": (dense(**scaled_rope("longrope")), "'longrope'"),
    "proportional": (dense(**scaled_rope("proportional")), "'proportional'"),
    "yarn's blend begins": (dense(**yarn(beta_fast=4.0)), "beta_fast = 4"),
    "yarn's blend ends": (text(**yarn(beta_slow=2)), "beta_slow = 2"),
    "yarn's factor": (dense(**yarn(attention_factor=1.5)), "attention factor of 1.5"),
    "yarn's scales": (dense(**yarn(mscale=0.7, mscale_all_dim=0.4)), "takes 0.1 ln(factor) + 1 = 1.13863"),
    "yarn's rounding": (dense(**yarn(truncate=False)), "truncate = False"),
    "no layout of stock's": (dense(rope_interleave=True), "rope_interleave = True"),
    "router": (mixtral(norm_topk_prob=False), "norm_topk_prob = False"),
    "shared expert": (text(use_shared_expert=False), "use_shared_expert = False"),
    "chunk": (text(attention_chunk_size=16), "position 16 on"),
    "shorter than its chunk, longer than llama.cpp's": (
        text(attention_chunk_size=10000, max_position_embeddings=9000),
        "max_position_embeddings = 8192",
    ),
    "chunk in other layers": (
        text(max_position_embeddings=9000, layer_types=["full_attention"] + ["chunked_attention"] * 4),
        "in 4 of 5 layers",
    ),
    "no chunk": (text(attention_chunk_size=None), "Set attention_chunk_size = 8192, layer_types to None."),
    "no chunk in a long context": (
        text(attention_chunk_size=None, max_position_embeddings=9000),
        "max_position_embeddings to at most 8192",
    ),
    "rotation": (text(no_rope_layers=[1, 1, 0, 1, 1]), "no_rope_layers = [1, 1, 0, 1, 1]"),
    "rotation everywhere": (text(no_rope_layer_interval=None), "no_rope_layers = [1, 1, 1, 1, 1]"),
    "temperature begins": (text(floor_scale=8), "position 7 on"),
    "temperature from the first token": (text(floor_scale=1), "Serve this model"),
    "strength of temperature": (text(attn_scale=0.2, max_position_embeddings=8192), "attn_scale = 0.2"),
    "no temperature": (
        text(attn_temperature_tuning=False, max_position_embeddings=8192),
        "max_position_embeddings = 8191",
    ),
    "no norm": (text(use_qk_norm=False), "use_qk_norm = False with num_local_experts = 5"),
    "a norm": (text(num_local_experts=128), "use_qk_norm = True with num_local_experts = 128"),
    "mixtures": (text(moe_layers=[1, 2]), "every interleave_moe_layer_step-th layer, [1, 3] here"),
    "no experts": (
        text(num_local_experts=0, num_experts_per_tok=0, interleave_moe_layer_step=0),
        "Set both to 1",
    ),
    "biases": (text(attention_bias=True), "attention_bias = True"),
    "decoder of a multimodal model": (multimodal(use_qk_norm=False), "use_qk_norm = False"),
    "tower": (LlamoeVisionConfig(**VISION), "only beside its decoder"),
}
TAKEN = {
    "dense": dense(),
    "biases": dense(attention_bias=True, mlp_bias=True),
    "tied": dense(tie_word_embeddings=True),
    "swish": dense(hidden_act="swish"),
    "a window as long as the context": dense(sliding_window=256, layer_types=WINDOWED),
    "a window that no layer has": dense(sliding_window=16, layer_types=["full_attention"] * 3),
    "linear": dense(**scaled_rope("linear")),
    "llama3": dense(**scaled_rope("llama3")),
    "yarn": dense(**yarn()),
    "yarn that names its defaults": dense(
        **yarn(attention_factor=1.1386294361119892, truncate=True, beta_slow=1)
    ),
    "512 layers": dense(num_hidden_layers=512),
    "mixtral": mixtral(),
    "1024 experts": mixtral(num_local_experts=1024),
    "text": text(),
    "chunks": text(max_position_embeddings=20000),
    "a chunk that nothing reaches": text(attention_chunk_size=4096, max_position_embeddings=4096),
    "a temperature that nothing reaches": text(floor_scale=100, max_position_embeddings=99, attn_scale=3.0),
    "a temperature without layers that have it": text(num_hidden_layers=3, floor_scale=8),
    "no temperature in a short context": text(attn_temperature_tuning=False, max_position_embeddings=8191),
    "a strength of nothing": text(floor_scale=8, attn_scale=0.0),
    "128 experts without a norm": text(num_local_experts=128, use_qk_norm=False),
    "dense layers alone": text(num_local_experts=1, num_experts_per_tok=1, interleave_moe_layer_step=0),
    "multimodal": multimodal(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_misread_is_told_in_one_sentence_each(name):
    config, told = REFUSED[name]
    (problem,) = gguf_problems(config)
    assert told in problem
    assert problem.endswith(".")
    assert "\n" not in problem
    with pytest.raises(ConfigurationError) as error:
        check_for_gguf(config)
    assert f"\n- {problem}\n" in str(error.value)


@pytest.mark.parametrize("name", TAKEN)
def test_what_llama_cpp_computes_as_it_is_is_taken(name):
    assert gguf_problems(TAKEN[name]) == []
    check_for_gguf(TAKEN[name])


def test_every_kind_of_scaled_rotation_is_decided():
    """A kind that is new in the list of all kinds must be read in llama.cpp's source."""
    decided = {"default", "linear", "dynamic", "yarn", "yarn-mscale", "longrope", "llama3", "proportional"}
    assert set(ROPES) == decided


@pytest.mark.parametrize("name", PRESETS)
def test_published_models_are_taken_where_llama_cpp_computes_them(name):
    """It has never known the window of Mistral's first release."""
    config = preset(name)
    problems = gguf_problems(config)
    assert bool(problems) == (isinstance(config, LlamoeVisionConfig) or name == "mistral-7b-v0.1")


def test_what_a_sentence_asks_for_is_taken():
    """Each change that a sentence names, made as it says."""
    changed = {
        "window": {"max_position_embeddings": 16},
        "dynamic": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "chunk": {"max_position_embeddings": 16},
        "shorter than its chunk, longer than llama.cpp's": {"max_position_embeddings": 8192},
        "no chunk": {"attention_chunk_size": 8192, "layer_types": None},
        "no chunk in a long context": {
            "attention_chunk_size": 8192,
            "layer_types": None,
            "max_position_embeddings": 8192,
        },
        "temperature begins": {"max_position_embeddings": 7},
        "no temperature": {"max_position_embeddings": 8191},
        "no experts": {"num_local_experts": 1, "num_experts_per_tok": 1},
        "layers with and without window": {
            "max_position_embeddings": 300,
            "layer_types": None,
            "sliding_window": None,
        },
    }
    for name, fields in changed.items():
        config = REFUSED[name][0]
        assert gguf_problems(type(config)(**config.to_dict() | fields)) == [], name


def test_the_class_that_is_saved_decides_too():
    assert gguf_problems(dense(), "LlamoeDenseForCausalLM") == []
    assert gguf_problems(dense(), "LlamoeDenseModel") == []
    for config, name in (
        (dense(), "LlamoeDenseForSequenceClassification"),
        (mixtral(), "LlamoeMixtralModel"),
        (text(), "LlamoeTextModel"),
        (text(), "MyOwnModel"),
        (dense(sliding_window=256), "LlamoeDenseModel"),
    ):
        (problem,) = gguf_problems(config, name)
        assert problem.startswith("architectures = ")
        assert config.architectures != [name]


def test_weights_that_others_packed_are_for_no_converter():
    config = dense()
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (problem,) = gguf_problems(config)
    assert problem.startswith("quant_method = 'bitsandbytes'")
    config.quantization_config = {"quant_method": "fp8"}
    assert gguf_problems(config) == []
    # The layout stock has them plain.
    config.quantization_config = {"quant_method": "llamoe", "weights": "int8"}
    assert gguf_problems(config) == []


def test_all_that_is_wrong_is_said_at_once():
    problems = gguf_problems(text(use_qk_norm=False, attention_bias=True, hidden_act="gelu"))
    assert len(problems) == 3
