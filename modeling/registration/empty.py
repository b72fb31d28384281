"""The llamoe class that belongs to a configuration, and an empty model of it."""

import copy

import torch
from torch import nn

from ...configuration.base import LlamoeBaseConfig
from ...configuration.hub import AUTO_CLASSES
from .auto_classes import MODELS


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
