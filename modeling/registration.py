"""Tell transformers' Auto classes of our model types. Stock types are left as they are."""

import transformers
from transformers import AutoConfig, AutoProcessor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ..configuration import LlamoeConfig, LlamoeDenseConfig, LlamoeTextConfig, LlamoeVisionConfig
from ..configuration._hub import AUTO_CLASSES
from . import decoder, heads, multimodal, vision
from ._compat import name_causal_model, publish, register_model
from .base import LlamoePreTrainedModel
from .peft_targets import register_with_peft
from .processing import LlamoeProcessor

CONFIGS = {
    config_class.model_type: config_class
    for config_class in (LlamoeDenseConfig, LlamoeTextConfig, LlamoeVisionConfig, LlamoeConfig)
}
MODELS: dict[str, type[LlamoePreTrainedModel]] = {
    name: getattr(module, name)
    for module in (decoder, heads, vision, multimodal)
    for served in AUTO_CLASSES.values()
    for name in served.values()
    if hasattr(module, name)
}


def register() -> None:
    """Register configs, models, the processor and the renamings; called once, when llamoe is imported."""
    for model_type, config_class in CONFIGS.items():
        AutoConfig.register(model_type, config_class)
    for model_type, served in AUTO_CLASSES.items():
        for auto_name, name in served.items():
            register_model(getattr(transformers, auto_name), CONFIGS[model_type], MODELS[name])
    name_causal_model(LlamoeConfig.model_type, "LlamoeForConditionalGeneration")
    AutoProcessor.register(LlamoeConfig, LlamoeProcessor)
    register_with_peft()
    publish(MODELS.values())
    for name, model_class in MODELS.items():
        if model_class._checkpoint_prefixes:
            # By class name, so that no other class and no adapter is touched.
            renamings = [
                WeightRenaming("^" + old, new) for old, new in model_class._checkpoint_prefixes.items()
            ]
            register_checkpoint_conversion_mapping(name, renamings)
