"""The class of ours that a configuration describes, and its model without weights."""

import copy

import torch
from torch import nn

from ...configuration import (
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeMixtralConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
)
from ...configuration.base import LlamoeBaseConfig
from ..decoder import LlamoeDenseForCausalLM, LlamoeForCausalLM, LlamoeMixtralForCausalLM
from ..multimodal import LlamoeForConditionalGeneration
from ..vision import LlamoeVisionModel

_CLASSES: dict[type, type[nn.Module]] = {
    LlamoeConfig: LlamoeForConditionalGeneration,
    LlamoeTextConfig: LlamoeForCausalLM,
    LlamoeDenseConfig: LlamoeDenseForCausalLM,
    LlamoeMixtralConfig: LlamoeMixtralForCausalLM,
    LlamoeVisionConfig: LlamoeVisionModel,
}


def model_class(config: LlamoeBaseConfig) -> type[nn.Module]:
    """The class that a configuration describes: a model with its language model head, or a tower."""
    return _CLASSES[type(config)]


def empty_model(config: LlamoeBaseConfig) -> nn.Module:
    """The model of a configuration, without weights: on the meta device."""
    with torch.device("meta"):
        # Building sets attributes of a configuration.
        return model_class(config)(copy.deepcopy(config))
