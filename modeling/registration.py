"""Tell transformers' Auto classes of our model types. Stock types are left as they are."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ..configuration import LlamoeConfig, LlamoeDenseConfig, LlamoeTextConfig, LlamoeVisionConfig
from ._compat import name_causal_models, register_text_model_for_composite
from .decoder import LlamoeDenseForCausalLM, LlamoeDenseModel, LlamoeForCausalLM, LlamoeTextModel
from .multimodal import LlamoeForConditionalGeneration, LlamoeModel
from .peft_targets import register_with_peft
from .processing import LlamoeProcessor
from .vision import LlamoeVisionModel

_BASE_MODELS = (LlamoeDenseModel, LlamoeTextModel, LlamoeVisionModel, LlamoeModel)
_READERS_OF_OTHER_CHECKPOINTS = (
    LlamoeTextModel,
    LlamoeForCausalLM,
    LlamoeModel,
    LlamoeForConditionalGeneration,
)


def register() -> None:
    """Register configs, models and the renamings; called once, when llamoe is imported."""
    for config_class in (LlamoeDenseConfig, LlamoeTextConfig, LlamoeVisionConfig, LlamoeConfig):
        AutoConfig.register(config_class.model_type, config_class)
    for model_class in _BASE_MODELS:
        AutoModel.register(model_class.config_class, model_class)
    AutoModelForCausalLM.register(LlamoeDenseConfig, LlamoeDenseForCausalLM)
    AutoModelForCausalLM.register(LlamoeTextConfig, LlamoeForCausalLM)
    register_text_model_for_composite(AutoModelForCausalLM, LlamoeConfig, LlamoeForCausalLM)
    AutoModelForImageTextToText.register(LlamoeConfig, LlamoeForConditionalGeneration)
    AutoProcessor.register(LlamoeConfig, LlamoeProcessor)
    name_causal_models(
        {
            LlamoeDenseConfig.model_type: LlamoeDenseForCausalLM.__name__,
            LlamoeTextConfig.model_type: LlamoeForCausalLM.__name__,
            LlamoeConfig.model_type: LlamoeForConditionalGeneration.__name__,
        }
    )
    register_with_peft()
    for model_class in _READERS_OF_OTHER_CHECKPOINTS:
        # By class name, so that no other class and no adapter is touched.
        register_checkpoint_conversion_mapping(
            model_class.__name__,
            [WeightRenaming("^" + old, new) for old, new in model_class._checkpoint_prefixes.items()],
        )
