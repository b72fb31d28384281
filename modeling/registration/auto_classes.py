"""Registers our model types with transformers' Auto classes. Stock types stay as they are."""

import copy
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import AutoConfig, AutoProcessor, Llama4Processor
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming

from ...configuration import LlamoeConfig, LlamoeMixtralConfig
from ...configuration.hub import AUTO_CLASSES
from ...configuration.stock import CONFIG_CLASSES
from .._private_api import choose_processor, name_causal_model, publish, register_model
from ..adapters import register_with_peft
from ..checkpoints import SPLIT_LLAMA4
from ..processing import LlamoeProcessor, config_beside
from ..quantization import register_bitsandbytes, register_quantizers

CONFIGS = {config_class.model_type: config_class for config_class in CONFIG_CLASSES}
# Class name to model class; `register` fills it.
MODELS: dict[str, Any] = {}
# Model types for which AutoProcessor returns `LlamoeProcessor`, even if the folder names `Llama4Processor`.
PROCESSED = {LlamoeConfig.model_type}


def _processor_of(name_or_path: Any, **kwargs) -> type[LlamoeProcessor] | None:
    return LlamoeProcessor if config_beside(name_or_path, kwargs).get("model_type") in PROCESSED else None


def register(classes: Mapping[str, Any]) -> None:
    """Register configs, processor, renamings, and the classes that `AUTO_CLASSES` names; called once, at the import."""
    MODELS.update((name, classes[name]) for served in AUTO_CLASSES.values() for name in served.values())
    for model_type, config_class in CONFIGS.items():
        AutoConfig.register(model_type, config_class)
    for model_type, served in AUTO_CLASSES.items():
        for auto_name, name in served.items():
            register_model(getattr(transformers, auto_name), CONFIGS[model_type], MODELS[name])
    name_causal_model(LlamoeConfig.model_type, "LlamoeForConditionalGeneration")
    AutoProcessor.register(LlamoeConfig, LlamoeProcessor)
    choose_processor(Llama4Processor, _processor_of)
    register_with_peft()
    register_quantizers()
    register_bitsandbytes()
    publish(MODELS.values())
    for name, model_class in MODELS.items():
        prefixes = model_class._checkpoint_prefixes if model_class._registers_prefixes else {}
        rules: list[Any] = [WeightRenaming("^" + old, new) for old, new in prefixes.items()]
        # Register these by class name, so that no other class or adapter is affected; Mixtral's by model type, below.
        if model_class._has_experts and model_class.config_class is not LlamoeMixtralConfig:
            rules += copy.deepcopy(SPLIT_LLAMA4)
        if rules:
            register_checkpoint_conversion_mapping(name, rules)
    # Mixtral's files have a tensor for each expert and matrix: transformers' rules stack them, and undo it in saving.
    ours, stock = LlamoeMixtralConfig.model_type, LlamoeMixtralConfig.stock_model_type
    register_checkpoint_conversion_mapping(ours, get_checkpoint_conversion_mapping(stock))
