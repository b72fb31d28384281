"""Conversion of transformers' stock configurations to ours and back.

Reading needs no call: every configuration class here accepts a stock dictionary, folder or nested part.
`from_stock` also accepts configuration objects and chooses the class. `to_stock` writes what transformers, vLLM
and llama.cpp read without this package, and refuses what they could not compute.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from .base import ARCHITECTURES, READERS, LlamoeBaseConfig, as_dict, unreadable_as_value_error
from .checks import enumerate_words, fail
from .decoder import LlamoeDenseConfig
from .mixture import LlamoeMixtralConfig, LlamoeTextConfig
from .multimodal import LlamoeConfig
from .quantization import METHOD
from .vision import STOCK_CONSTANTS, LlamoeVisionConfig

CONFIG_CLASSES = tuple(dict.fromkeys(READERS.values()))

# Of several the first family is found. Stock has a single multimodal class.
_STOCK_ARCHITECTURES = {ours: stock for stock, ours in ARCHITECTURES.items()} | {
    "LlamoeModel": "Llama4ForConditionalGeneration"
}

# Fields of ours without an equivalent in stock: the values at which stock computes the same.
_REQUIRED = {
    LlamoeDenseConfig: {"rope_interleave": False},
    LlamoeMixtralConfig: {
        "rope_interleave": False,
        "router_score_function": "softmax",
        "router_pre_softmax": True,
        "norm_topk_prob": True,
        "apply_router_weight_on_input": False,
        "use_shared_expert": False,
        "router_balancing": None,
    },
    LlamoeTextConfig: {
        "rope_interleave": True,
        "mlp_bias": False,
        "router_score_function": "sigmoid",
        "router_pre_softmax": False,
        "norm_topk_prob": False,
        "apply_router_weight_on_input": True,
        "use_shared_expert": True,
        "router_balancing": None,
    },
    LlamoeVisionConfig: {
        **STOCK_CONSTANTS,
        "use_rope": True,
        "use_pre_layernorm": True,
        "use_post_layernorm": True,
        "projection_dim": None,
        "use_adapter": True,
        "projector_final_act": True,
        "attention_bias": True,
    },
    LlamoeConfig: {},
}

# Also left out: fields of ours that change only training or reporting, and one that stock never declared.
_OF_TRAINING = (
    "router_z_loss_coef",
    "router_dropout",
    "expert_capacity_factor",
    "output_expert_load",
    "skip_logits",
)
_DROPPED = {
    LlamoeDenseConfig: ("skip_logits", "read_from"),
    LlamoeMixtralConfig: (*_OF_TRAINING, "layer_types"),
    LlamoeTextConfig: _OF_TRAINING,
    LlamoeVisionConfig: ("vision_feature_layer",),
}


def from_stock(config: PreTrainedConfig | Mapping[str, Any]) -> LlamoeBaseConfig:
    """Our configuration for a stock one.

    Args:
        config: A configuration object or the content of a `config.json`, of model type llama, mistral, ministral,
            mixtral, llama4, llama4_text or llama4_vision_model. An object that is ours already is returned as it is, a
            dictionary of ours is read.
    """
    if isinstance(config, LlamoeBaseConfig):
        return config
    data = as_dict(config) if isinstance(config, PreTrainedConfig) else dict(config)
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in READERS:
        given = "without a model_type" if model_type is None else f"of model_type {model_type!r}"
        valid = enumerate_words(map(repr, READERS))
        raise ValueError(f"a configuration {given} has no equivalent in llamoe; valid: {valid}")
    config_class = READERS[model_type]
    with unreadable_as_value_error(config_class):
        return config_class(**data)


def to_stock(config: LlamoeBaseConfig) -> dict[str, Any]:
    """The stock equivalent of a configuration of ours, as the content of a `config.json`.

    Fields that change only training or reporting are dropped; attributes that are not fields, such as
    `quantization_config`, are kept, but not of llamoe's own formats: weights in stock's layout are plain. Model type
    and architectures are stock's throughout.
    """
    config.validate()
    config_class = next(known for known in CONFIG_CLASSES if isinstance(config, known))
    for name, needed in _REQUIRED[config_class].items():
        if (value := getattr(config, name)) != needed:
            problem = f"transformers' {config.stock_type()} cannot express it"
            fail(config, name, value, problem, repr(needed))
    unchanged = PreTrainedConfig().to_dict()
    dropped = {"_name_or_path", "auto_map", *_REQUIRED[config_class]} - set(STOCK_CONSTANTS)
    dropped.update(_DROPPED.get(config_class, ()))
    data = {
        name: value
        for name, value in config.to_dict().items()
        if name not in dropped
        and (name == "transformers_version" or name not in unchanged or value != unchanged[name])
    }
    if (data.get("quantization_config") or {}).get("quant_method") == METHOD:
        del data["quantization_config"]
    data["model_type"] = config.stock_type()
    if data.get("architectures"):
        data["architectures"] = [_STOCK_ARCHITECTURES.get(name, name) for name in data["architectures"]]
    _ADJUST[config_class](config, data)
    return data


def _adjust_dense(config: LlamoeDenseConfig, data: dict[str, Any]) -> None:
    stock_type = config.stock_type()
    if stock_type == "ministral":
        data["layer_types"] = config.attention_types()
    else:
        del data["layer_types"]
    if stock_type == "mistral" and "full_attention" in config.attention_types():
        # Its number is every layer's.
        data["sliding_window"] = None
    if stock_type != "llama":
        for name in ("attention_bias", "mlp_bias"):
            if data.pop(name):
                fail(config, name, True, f"transformers' {stock_type} cannot express it", "False")
        del data["pretraining_tp"]
        family = stock_type.capitalize()
        if "architectures" in data:
            data["architectures"] = [name.replace("Llama", family) for name in data["architectures"]]
        return
    del data["sliding_window"]
    if config.hidden_size % config.num_attention_heads:
        problem = "transformers' llama demands a multiple of num_attention_heads even where head_dim is given"
        valid = f"a multiple of {config.num_attention_heads}"
        fail(config, "hidden_size", config.hidden_size, problem, valid)


def _adjust_mixtral(config: LlamoeMixtralConfig, data: dict[str, Any]) -> None:
    if config.layer_types and len(set(config.layer_types)) > 1:
        problem = "transformers' mixtral has one kind of attention in all layers"
        fail(config, "layer_types", config.layer_types, problem, "the same for all layers, or None")
    if "full_attention" in (config.layer_types or ()):
        data["sliding_window"] = None


def _adjust_text(config: LlamoeTextConfig, data: dict[str, Any]) -> None:
    data["attn_temperature_tuning"] = bool(config.attn_temperature_tuning)
    # Stock makes a chunked mask for every model, even if no layer uses it, and divides by the interval even if the
    # layers are listed.
    if config.attention_chunk_size is None:
        data["attention_chunk_size"] = config.max_position_embeddings
    if not config.no_rope_layer_interval:
        data["no_rope_layer_interval"] = config.num_hidden_layers + 1


def _adjust_vision(config: LlamoeVisionConfig, data: dict[str, Any]) -> None:
    inner, output = config.adapter_input_dim, config.projector_output_dim
    if config.intermediate_size != inner:
        problem = (
            "transformers' adapter reads as many channels as intermediate_size says, and gets another number"
        )
        fail(config, "intermediate_size", config.intermediate_size, problem, f"{inner}")
    if config.projector_input_dim != output:
        problem = f"transformers' adapter needs it equal to projector_output_dim = {output}"
        fail(config, "projector_input_dim", config.projector_input_dim, problem, f"{output}")


def _adjust_multimodal(config: LlamoeConfig, data: dict[str, Any]) -> None:
    for name in config.sub_configs:
        data[name] = to_stock(getattr(config, name))
        data[name].pop("transformers_version", None)


_ADJUST = {
    LlamoeDenseConfig: _adjust_dense,
    LlamoeMixtralConfig: _adjust_mixtral,
    LlamoeTextConfig: _adjust_text,
    LlamoeVisionConfig: _adjust_vision,
    LlamoeConfig: _adjust_multimodal,
}
