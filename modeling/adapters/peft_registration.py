"""Adds llamoe's model types to peft's tables of default target layers, when peft is imported."""

from types import ModuleType
from typing import Any

from ...configuration import LlamoeVisionConfig
from ...configuration.stock import CONFIG_CLASSES
from .._compat import accept_peft
from .when_imported import when_imported

# The vision tower's layers, by the names of the decoder's like layers.
_IN_THE_TOWER = {"up_proj": "fc1", "down_proj": "fc2", "norm": "layernorm_post"}


def register_with_peft() -> None:
    """Add llamoe's model types to peft's tables and patch peft, now or when peft is imported."""
    accept_peft()
    when_imported("peft", _register)


def _register(peft: ModuleType) -> None:
    from peft.utils import constants

    from . import _private_api  # noqa: F401

    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MAPPING") and "llama" in table:
            for config_class in CONFIG_CLASSES:
                table.setdefault(config_class.model_type, _default_targets(config_class.model_type, table))


def _default_targets(model_type: str, stock: dict[str, Any]) -> Any:
    """Return a model type's entry for one of peft's tables: that of its stock model type, else that of `llama`."""
    name = {"llamoe_dense": "llama", "llamoe_mixtral": "mixtral"}.get(model_type, "llama4")
    targets = list(stock.get(name, stock["llama"]))
    if model_type == LlamoeVisionConfig.model_type:
        targets = [_IN_THE_TOWER.get(target, target) for target in targets if target != "gate_proj"]
    return targets
