"""What a model is: pure data, no tensors.

A file imports only files that stand above it in this order: `_files`, `_checks`, `_hub`, `parallel`, `_base`,
`decoder`, `vision`, `multimodal`, `stock`, `presets`, `parameter_count`, `memory`.
"""

from .decoder import LayerPlan, LlamoeDenseConfig, LlamoeTextConfig
from .memory import cache_bytes, cache_tokens
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
    "cache_bytes",
    "cache_tokens",
    "count_parameters",
    "from_stock",
    "preset",
    "to_stock",
]
