"""LLaMA 1, LLaMA 2, Llama 3, Mistral, Mixtral and Llama-4-style multimodal mixtures of experts for transformers.

Importing this package registers its model types (`llamoe_dense`, `llamoe_mixtral`, `llamoe_text`, `llamoe_vision`,
`llamoe`) with the Auto classes; transformers' own types stay as they are, until `adopt` is called.
"""

import os as _os

# In a checkout the library folders stand beside this package, in a wheel inside it. Appending the parent folder
# makes both import as `llamoe.modeling` and so on.
_here = _os.path.dirname(_os.path.abspath(__file__))
if not _os.path.isdir(_os.path.join(_here, "modeling")):
    __path__.append(_os.path.dirname(_here))

from llamoe.configuration import (  # noqa: E402
    PRESETS,
    CheckpointError,
    ConfigurationError,
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeMixtralConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
    QuantizationConfig,
    compute_optimal,
    count_parameters,
    from_stock,
    llama_recipe,
    preset,
    to_stock,
)
from llamoe.modeling.adapters import lora_config  # noqa: E402
from llamoe.modeling.classification import (  # noqa: E402
    LlamoeDenseForQuestionAnswering,
    LlamoeDenseForSequenceClassification,
    LlamoeDenseForTokenClassification,
    LlamoeForSequenceClassification,
    LlamoeForTokenClassification,
    LlamoeMixtralForSequenceClassification,
    LlamoeMixtralForTokenClassification,
)
from llamoe.modeling.decoder import (  # noqa: E402
    LlamoeDenseForCausalLM,
    LlamoeDenseModel,
    LlamoeForCausalLM,
    LlamoeMixtralForCausalLM,
    LlamoeMixtralModel,
    LlamoeTextModel,
)
from llamoe.modeling.moe import ExpertTrace, RouterWatch, trace_experts, watch_routers  # noqa: E402
from llamoe.modeling.multimodal import LlamoeForConditionalGeneration, LlamoeModel  # noqa: E402
from llamoe.modeling.processing import LlamoeProcessor, read_picture  # noqa: E402
from llamoe.modeling.registration import adopt, release  # noqa: E402
from llamoe.modeling.registration import register as _register  # noqa: E402
from llamoe.modeling.vision import LlamoeVisionModel  # noqa: E402
from llamoe.planning import (  # noqa: E402
    Bandwidths,
    NodesPlan,
    PlacementPlan,
    measure_bandwidths,
    plan_placement,
)

_register(globals())

__version__ = "0.2.0"

__all__ = [
    "PRESETS",
    "Bandwidths",
    "CheckpointError",
    "ConfigurationError",
    "ExpertTrace",
    "LlamoeConfig",
    "LlamoeDenseConfig",
    "LlamoeDenseForCausalLM",
    "LlamoeDenseForQuestionAnswering",
    "LlamoeDenseForSequenceClassification",
    "LlamoeDenseForTokenClassification",
    "LlamoeDenseModel",
    "LlamoeForCausalLM",
    "LlamoeForConditionalGeneration",
    "LlamoeForSequenceClassification",
    "LlamoeForTokenClassification",
    "LlamoeMixtralConfig",
    "LlamoeMixtralForCausalLM",
    "LlamoeMixtralForSequenceClassification",
    "LlamoeMixtralForTokenClassification",
    "LlamoeMixtralModel",
    "LlamoeModel",
    "LlamoeProcessor",
    "LlamoeTextConfig",
    "LlamoeTextModel",
    "LlamoeVisionConfig",
    "LlamoeVisionModel",
    "NodesPlan",
    "PlacementPlan",
    "QuantizationConfig",
    "RouterWatch",
    "adopt",
    "compute_optimal",
    "count_parameters",
    "from_stock",
    "llama_recipe",
    "lora_config",
    "measure_bandwidths",
    "plan_placement",
    "preset",
    "read_picture",
    "release",
    "to_stock",
    "trace_experts",
    "watch_routers",
]
