"""What a model is: pure data, no tensors.

A file imports only files that stand above it in this order: `_checks`, `_hub`, `_base`, `decoder`, `vision`,
`multimodal`, `stock`, `presets`, `parameter_count`.
"""

from .decoder import LayerPlan, LlamoeDenseConfig, LlamoeTextConfig
from .multimodal import LlamoeConfig
from .parameter_count import ParameterCount, count_parameters
from .presets import PRESETS, preset
from .stock import from_stock, to_stock
from .vision import LlamoeVisionConfig

__all__ = [
    "PRESETS",
    "LayerPlan",
    "LlamoeConfig",
    "LlamoeDenseConfig",
    "LlamoeTextConfig",
    "LlamoeVisionConfig",
    "ParameterCount",
    "count_parameters",
    "from_stock",
    "preset",
    "to_stock",
]
