"""Preparation of offloaded experts for peft."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .experts import OffloadedExperts


def offloaded_in(model: nn.Module) -> list[OffloadedExperts]:
    """Return the offloaded experts of a model."""
    return [module for module in model.modules() if isinstance(module, OffloadedExperts)]


def freeze_for_training(prepare: Callable, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a function that freezes all weights and casts those of 16 bits, which offloaded experts cannot be."""
    taken = [(experts, dict(experts._parameters)) for experts in offloaded_in(model)]
    try:
        for experts, parameters in taken:
            experts._parameters.clear()
            for parameter in parameters.values():
                parameter.requires_grad_(False)
        return prepare(model, *args, **kwargs)
    finally:
        for experts, parameters in taken:
            experts._parameters.update(parameters)
