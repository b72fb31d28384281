"""Tell transformers' Auto classes of our model types. Stock types are left as they are."""

import transformers
from transformers import AutoConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ..configuration import LlamoeConfig, LlamoeDenseConfig, LlamoeTextConfig, LlamoeVisionConfig
from ..configuration._hub import AUTO_CLASSES
from . import decoder, heads, multimodal, vision
from ._compat import publish, register_model
from .base import LlamoePreTrainedModel

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
    """Register configs, models and the renamings; called once, when llamoe is imported.

    Processors need none: AutoProcessor goes by the class that a folder's processor_config.json names, and to import
    that class here would bring torchvision in.
    """
    for model_type, config_class in CONFIGS.items():
        AutoConfig.register(model_type, config_class)
    for model_type, served in AUTO_CLASSES.items():
        for auto_name, name in served.items():
            register_model(getattr(transformers, auto_name), CONFIGS[model_type], MODELS[name])
    publish(MODELS.values())
    for name, model_class in MODELS.items():
        if model_class._checkpoint_prefixes:
            # By class name, so that no other class and no adapter is touched.
            renamings = [
                WeightRenaming("^" + old, new) for old, new in model_class._checkpoint_prefixes.items()
            ]
            register_checkpoint_conversion_mapping(name, renamings)
