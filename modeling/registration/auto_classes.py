"""Registers our model types with transformers' Auto classes, and finds the class of a configuration."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoProcessor, Llama4Processor, conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ...configuration import LlamoeConfig, LlamoeMixtralConfig
from ...configuration.base import READERS, LlamoeBaseConfig
from ...configuration.hub import AUTO_CLASSES
from .._private_api import choose_processor, name_causal_model, publish, register_model
from ..adapters import register_with_peft
from ..checkpoints import SPLIT_LLAMA4
from ..processing import LlamoeProcessor, config_beside
from ..quantization import register_bitsandbytes, register_quantizers

# Class name to model class; `register` fills it.
MODELS: dict[str, Any] = {}
# Model types for which AutoProcessor returns `LlamoeProcessor`, even if the folder names `Llama4Processor`.
PROCESSED = {LlamoeConfig.model_type}


def _processor_of(name_or_path: Any, **kwargs) -> type[LlamoeProcessor] | None:
    return LlamoeProcessor if config_beside(name_or_path, kwargs).get("model_type") in PROCESSED else None


def register(classes: Mapping[str, Any]) -> None:
    """Register configs, processor, renamings, and the classes that `AUTO_CLASSES` names; called once, at the import."""
    MODELS.update((name, classes[name]) for served in AUTO_CLASSES.values() for name in served.values())
    for model_type, served in AUTO_CLASSES.items():
        AutoConfig.register(model_type, READERS[model_type])
        for auto_name, name in served.items():
            register_model(getattr(transformers, auto_name), READERS[model_type], MODELS[name])
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
            conversion_mapping.register_checkpoint_conversion_mapping(name, rules)
    # Mixtral's files have a tensor for each expert and matrix: transformers' rules stack them, and undo it in saving.
    rules = conversion_mapping.get_checkpoint_conversion_mapping(LlamoeMixtralConfig.stock_model_type)
    conversion_mapping.register_checkpoint_conversion_mapping(LlamoeMixtralConfig.model_type, rules)


def model_class(config: LlamoeBaseConfig) -> type[nn.Module]:
    """Return the model class of a configuration: with a language model head, or a vision tower."""
    served = AUTO_CLASSES[config.model_type]
    names = ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel")
    return MODELS[next(served[name] for name in names if name in served)]


def empty_model(config: LlamoeBaseConfig) -> nn.Module:
    """Build the model of a configuration on the meta device, without weights."""
    with torch.device("meta"):
        # Copy the configuration: building a model sets attributes of it.
        return model_class(config)(copy.deepcopy(config))
