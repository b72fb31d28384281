"""Makes the Auto classes return our models for stock checkpoints, so that unchanged scripts use them.

`AutoModelForCausalLM.from_pretrained(stock_folder)` and pipelines choose a class by the type of the config. Adoption
changes these choices, in this process and for all threads. Configs and tokenizers stay stock's; models turn a stock
config into ours, and the processor of Llama 4 is ours. Models inside of other models (the language model of a LLaVA,
say) are chosen in the same place: they are ours too while `llama` is adopted.
"""

import threading
from collections import defaultdict
from collections.abc import Callable

import transformers
from transformers import CONFIG_MAPPING

from ...configuration.hub import AUTO_CLASSES
from .._private_api import point_at
from .auto_classes import CONFIGS, MODELS, PROCESSED

# Stock model type to the one of ours that replaces it.
_STAND_INS = {
    stock_type: model_type
    for model_type, config_class in CONFIGS.items()
    for stock_type in (config_class.stock_model_type, *config_class.stock_relatives)
}
# Accepted name to stock model types: Llama 4 as a whole includes its parts.
_NAMES = {name: (name,) for name in _STAND_INS} | {"llama4": ("llama4", "llama4_text", "llama4_vision_model")}

_lock = threading.RLock()
_undo: dict[str, list[Callable[[], None]]] = {}
# Adoptions that are in force, by stock model type.
_holders: defaultdict[str, set["Adoption"]] = defaultdict(set)


class Adoption:
    """Result of `adopt`: as a context manager it ends with its block, otherwise it stays until `release`.

    Attributes:
        model_types: the stock model types that it adopts.
    """

    def __init__(self, model_types: tuple[str, ...]):
        self.model_types = model_types
        self._depth = 0

    def _hold(self) -> None:
        for model_type in self.model_types:
            _holders[model_type].add(self)
            if model_type not in _undo:
                _undo[model_type] = _point_auto_classes(model_type)

    def __enter__(self) -> "Adoption":
        with _lock:
            self._depth += 1
            if self._depth == 1:
                self._hold()
        return self

    def __exit__(self, *_) -> None:
        with _lock:
            self._depth -= 1
            if self._depth == 0:
                for model_type in self.model_types:
                    # `release` may have ended it already, and others may have adopted the type since.
                    _holders[model_type].discard(self)
                    _restore_unless_held(model_type)

    def __repr__(self) -> str:
        return f"<llamoe adoption of {', '.join(self.model_types)}>"


def adopt(*model_types: str) -> Adoption:
    """Make the Auto classes return llamoe's models for stock checkpoints.

    This holds in this process, for all threads, from the next load on; a load that has begun keeps its class. Several
    calls add up to one adoption, which `release` ends. A `with` statement ends it with the block, unless it was in
    force before or another block still needs it.

    Args:
        *model_types: "llama" (LLaMA 1, 2, 3 and all their heads), "mistral", "ministral", "mixtral", "llama4" (the
            multimodal model, its text model and its tower; "llama4_text" and "llama4_vision_model" name these alone).
            None: all.

    Returns:
        a context manager, whose use is optional.

    Raises:
        ValueError: a model type that llamoe has no models for; nothing is adopted then.
    """
    adoption = Adoption(_stock_types("adopt", model_types))
    with _lock:
        adoption._hold()
    return adoption


def release(*model_types: str) -> None:
    """Return stock checkpoints to transformers' own classes; loaded models stay as they are.

    Args:
        *model_types: as in `adopt`. None: all of them. Types that are not adopted are ignored.

    Raises:
        ValueError: a model type that llamoe has no models for; nothing is released then.
    """
    chosen = _stock_types("release", model_types)
    with _lock:
        for model_type in chosen:
            _holders[model_type].clear()
            _restore_unless_held(model_type)


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


def _restore_unless_held(model_type: str) -> None:
    if not _holders[model_type]:
        for undo in _undo.pop(model_type, ()):
            undo()
