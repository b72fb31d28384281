"""Convert configurations of transformers to llamoe's and back.

Every configuration class of llamoe reads a dictionary or folder of transformers. `from_stock` also takes configuration
objects, and chooses the class. `to_stock` writes what transformers, vLLM and llama.cpp read without llamoe, and raises
an error for a model that transformers cannot compute.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from .base import ARCHITECTURES, READERS, LlamoeBaseConfig, as_dict, unreadable_as_value_error
from .checks import enumerate_words, fail
from .decoder import LlamoeDenseConfig
from .mixture import LlamoeMixtralConfig, LlamoeTextConfig
from .multimodal import LlamoeConfig
from .quantization import METHOD
from .vision import LlamoeVisionConfig

CONFIG_CLASSES = tuple(dict.fromkeys(READERS.values()))

# Name of each of llamoe's model classes to transformers'. transformers has only one multimodal class.
_STOCK_ARCHITECTURES = {ours: stock for stock, ours in ARCHITECTURES.items()} | {
    "LlamoeModel": "Llama4ForConditionalGeneration"
}


def from_stock(config: PreTrainedConfig | Mapping[str, Any]) -> LlamoeBaseConfig:
    """Convert a configuration of transformers to llamoe's.

    Args:
        config: A configuration object or the content of a `config.json`, of model type llama, mistral, ministral,
            mixtral, llama4, llama4_text or llama4_vision_model. A configuration of llamoe is returned as it is, and the
            content of llamoe's `config.json` is read.
    """
    if isinstance(config, LlamoeBaseConfig):
        return config
    data = as_dict(config) if isinstance(config, PreTrainedConfig) else dict(config)
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in READERS:
        valid = enumerate_words(map(repr, READERS))
        raise ValueError(f"model_type = {model_type!r}: llamoe has no such model; valid: {valid}")
    config_class = READERS[model_type]
    with unreadable_as_value_error(config_class):
        return config_class(**data)


def to_stock(config: LlamoeBaseConfig) -> dict[str, Any]:
    """Convert a configuration of llamoe to the content of transformers' `config.json`.

    Fields that transformers' class lacks are left out. Other attributes are kept, except for a `quantization_config` of
    llamoe's own formats, since weights in transformers' layout are plain.

    Raises:
        ConfigurationError: A field changes what the model computes, and transformers' class lacks or ignores it.
    """
    config.validate()
    config_class = next(known for known in CONFIG_CLASSES if isinstance(config, known))
    stock_type = config.stock_type()
    stock_fields = {field.name for field in fields(CONFIG_MAPPING[stock_type])}
    dropped = {"_name_or_path", "auto_map"}
    for name, meaning in config_class.meanings.items():
        if name in stock_fields and meaning.stock != "ignored":
            continue
        value, computed = getattr(config, name), config_class.__dataclass_fields__[name].default
        if meaning.has_effect and meaning.stock != "model type" and value != computed:
            fail(config, name, value, f"transformers' {stock_type} cannot compute with it", repr(computed))
        if name not in stock_fields:
            dropped.add(name)
    unchanged = PreTrainedConfig().to_dict()
    data = {
        name: value
        for name, value in config.to_dict().items()
        if name not in dropped
        and (name == "transformers_version" or name not in unchanged or value != unchanged[name])
    }
    if (data.get("quantization_config") or {}).get("quant_method") == METHOD:
        del data["quantization_config"]
    data["model_type"] = stock_type
    if data.get("architectures"):
        data["architectures"] = [_STOCK_ARCHITECTURES.get(name, name) for name in data["architectures"]]
    _ADJUST[config_class](config, data)
    return data


def _adjust_dense(config: LlamoeDenseConfig, data: dict[str, Any]) -> None:
    stock_type, kinds = config.stock_type(), config.attention_types()
    if stock_type == "llama":
        heads = config.num_attention_heads
        if config.hidden_size % heads:
            problem = (
                f"transformers' llama needs a multiple of num_attention_heads = {heads}, also with head_dim"
            )
            fail(config, "hidden_size", config.hidden_size, problem, f"a multiple of {heads}")
        return
    if stock_type == "ministral":
        data["layer_types"] = kinds
    elif "full_attention" in kinds:
        # transformers' Mistral has a window in every layer if this field is a number.
        data["sliding_window"] = None
    if "architectures" in data:
        family = stock_type.capitalize()
        data["architectures"] = [name.replace("Llama", family) for name in data["architectures"]]


def _adjust_mixtral(config: LlamoeMixtralConfig, data: dict[str, Any]) -> None:
    kinds = config.layer_types or []
    if len(set(kinds)) > 1:
        problem = "transformers' mixtral has one kind of attention in all layers"
        fail(config, "layer_types", kinds, problem, "the same for all layers, or None")
    if "full_attention" in kinds:
        data["sliding_window"] = None


def _adjust_text(config: LlamoeTextConfig, data: dict[str, Any]) -> None:
    data["attn_temperature_tuning"] = bool(config.attn_temperature_tuning)
    # transformers needs both numbers: it makes a mask of chunks even if no layer has chunks, and divides by the
    # interval even if `no_rope_layers` is given.
    if config.attention_chunk_size is None:
        data["attention_chunk_size"] = config.max_position_embeddings
    if not config.no_rope_layer_interval:
        data["no_rope_layer_interval"] = config.num_hidden_layers + 1


def _adjust_vision(config: LlamoeVisionConfig, data: dict[str, Any]) -> None:
    inner, output = config.adapter_input_dim, config.projector_output_dim
    for name, needed in (("intermediate_size", inner), ("projector_input_dim", output)):
        if getattr(config, name) != needed:
            problem = "transformers' adapter needs another width"
            fail(config, name, getattr(config, name), problem, f"{needed}")


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
