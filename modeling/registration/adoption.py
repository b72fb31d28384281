"""Makes the Auto classes return our models for stock checkpoints, so that unchanged scripts use them.

`AutoModelForCausalLM.from_pretrained(stock_folder)` and pipelines choose a class by the type of the config. Adoption
changes these choices, in this process and for all threads. Configs and tokenizers stay stock's; models turn a stock
config into ours, and the processor of Llama 4 is ours. Models inside of other models (the language model of a LLaVA,
say) are chosen in the same place: they are ours too while `llama` is adopted.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import transformers
from transformers import CONFIG_MAPPING

from ...configuration.hub import AUTO_CLASSES
from .._private_api import point_at
from .auto_classes import CONFIGS, MODELS, PROCESSED

# Stock model type to the llamoe model type that replaces it.
_STAND_INS = {
    stock_type: model_type
    for model_type, config_class in CONFIGS.items()
    for stock_type in (config_class.stock_model_type, *config_class.stock_relatives)
}
# Accepted name to stock model types: Llama 4 as a whole includes its parts.
_NAMES = {name: (name,) for name in _STAND_INS} | {"llama4": ("llama4", "llama4_text", "llama4_vision_model")}

# Adopted stock model types, each with the functions that undo the adoption.
_undo: dict[str, list[Callable[[], None]]] = {}


class Adoption(AbstractContextManager):
    """Result of `adopt`: as a context manager it ends with its block, otherwise it stays until `release`.

    Attributes:
        model_types: the stock model types that it adopted; without those that were adopted already.
    """

    def __init__(self, model_types: tuple[str, ...]):
        self.model_types = model_types

    def __exit__(self, *_) -> None:
        if self.model_types:
            release(*self.model_types)


def adopt(*model_types: str) -> Adoption:
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
    new = tuple(name for name in _stock_types("adopt", model_types) if name not in _undo)
    for model_type in new:
        _undo[model_type] = _point_auto_classes(model_type)
    return Adoption(new)


def release(*model_types: str) -> None:
    """Return stock checkpoints to transformers' own classes; loaded models stay as they are.

    Args:
        *model_types: as in `adopt`. None: all of them. Types that are not adopted are ignored.

    Raises:
        ValueError: a model type that llamoe has no models for; nothing is released then.
    """
    for model_type in _stock_types("release", model_types):
        for undo in _undo.pop(model_type, ()):
            undo()


def _stock_types(function: str, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str) or name not in _NAMES:
            valid = ", ".join(map(repr, _NAMES))
            raise ValueError(
                f"llamoe.{function}({name!r}): not a stock model type that llamoe has models for; valid: {valid} "
                "(each as an argument of its own)."
            )
    chosen = [model_type for name in names or _NAMES for model_type in _NAMES[name]]
    return tuple(dict.fromkeys(chosen))


def _point_auto_classes(model_type: str) -> list[Callable[[], None]]:
    stand_in = _STAND_INS[model_type]
    undo = [
        point_at(getattr(transformers, auto_name), CONFIG_MAPPING[model_type], MODELS[name])
        for auto_name, name in AUTO_CLASSES[stand_in].items()
    ]
    PROCESSED.add(model_type)
    return [*undo, lambda: PROCESSED.discard(model_type)]
