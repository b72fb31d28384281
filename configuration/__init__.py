"""Configurations of models, which are data without tensors, and the errors that all packages raise.

Reading order: errors, json_files, sizes, checks, fields, hub, base, parallel, decoder, mixture, vision, multimodal,
quantization, stock, presets, parameter_count, scaling, recipe, memory. A file imports only files that come before it.
"""

from .decoder import LayerPlan, LlamoeDenseConfig
from .errors import CheckpointError, ConfigurationError
from .memory import cache_bytes, cache_tokens
from .mixture import LlamoeMixtralConfig, LlamoeTextConfig
from .multimodal import LlamoeConfig
from .parameter_count import ParameterCount, count_parameters
from .presets import PRESETS, preset
from .quantization import QuantizationConfig
from .recipe import llama_recipe
from .scaling import ComputeOptimal, compute_optimal
from .stock import from_stock, to_stock
from .vision import LlamoeVisionConfig

__all__ = [
    "PRESETS",
    "CheckpointError",
    "ComputeOptimal",
    "ConfigurationError",
    "LayerPlan",
    "LlamoeConfig",
    "LlamoeDenseConfig",
    "LlamoeMixtralConfig",
    "LlamoeTextConfig",
    "LlamoeVisionConfig",
    "ParameterCount",
    "QuantizationConfig",
    "cache_bytes",
    "cache_tokens",
    "compute_optimal",
    "count_parameters",
    "from_stock",
    "llama_recipe",
    "preset",
    "to_stock",
]
