"""Makes the Auto classes return our models for stock checkpoints, so that unchanged scripts use them.

`AutoModelForCausalLM.from_pretrained(stock_folder)` and pipelines choose a class by the type of the config. Adoption
changes these choices, in this process and for all threads. Configs and tokenizers stay stock's; models turn a stock
config into ours, and the processor of Llama 4 is ours. Models inside of other models (the language model of a LLaVA,
say) are chosen in the same place: they are ours too while `llama` is adopted.
"""

from contextlib import ExitStack

import transformers
from transformers import CONFIG_MAPPING

from ...configuration.base import READERS
from ...configuration.hub import AUTO_CLASSES
from .._private_api import point_at
from .auto_classes import MODELS, PROCESSED

# Accepted name to stock model types: Llama 4 as a whole includes its parts.
_NAMES = {name: (name,) for name in READERS if name not in AUTO_CLASSES}
_NAMES["llama4"] = ("llama4", "llama4_text", "llama4_vision_model")

# Adopted stock model types, each with what undoes the adoption.
_undo: dict[str, ExitStack] = {}


def adopt(*model_types: str) -> ExitStack:
    """Make the Auto classes return llamoe's models for stock checkpoints.

    This holds in this process, for all threads, from the next load on; a load that has begun keeps its class.

    Args:
        *model_types: "llama" (LLaMA 1, 2, 3 and all their heads), "mistral", "ministral", "mixtral", "llama4" (the
            multimodal model, its text model and its tower; "llama4_text" and "llama4_vision_model" name these alone).
            None: all.

    Returns:
        a context manager, whose use is optional: at the end of a `with` block what it has adopted is released.

    Raises:
        ValueError: a model type that llamoe has no models for; nothing is adopted then.
    """
    adopted = ExitStack()
    for model_type in _stock_types("adopt", model_types):
        if model_type in _undo:
            continue
        _undo[model_type] = undo = ExitStack()
        for auto_name, name in AUTO_CLASSES[READERS[model_type].model_type].items():
            undo.callback(
                point_at(getattr(transformers, auto_name), CONFIG_MAPPING[model_type], MODELS[name])
            )
        PROCESSED.add(model_type)
        undo.callback(PROCESSED.discard, model_type)
        adopted.callback(release, model_type)
    return adopted


def release(*model_types: str) -> None:
    """Return stock checkpoints to transformers' own classes; loaded models stay as they are.

    Args:
        *model_types: as in `adopt`. None: all of them. Types that are not adopted are ignored.

    Raises:
        ValueError: a model type that llamoe has no models for; nothing is released then.
    """
    for model_type in _stock_types("release", model_types):
        _undo.pop(model_type, ExitStack()).close()


def _stock_types(function: str, names: tuple[str, ...]) -> list[str]:
    if unknown := [name for name in names if name not in list(_NAMES)]:
        raise ValueError(f"llamoe.{function}: no models for {unknown}; valid: {list(_NAMES)}.")
    return list(dict.fromkeys(model_type for name in names or _NAMES for model_type in _NAMES[name]))
