"""Preparation of offloaded experts for accelerate, Trainer and peft."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from .experts import OffloadedExperts


def offloaded_in(model: nn.Module) -> list[OffloadedExperts]:
    """Return the offloaded experts of a model."""
    return [module for module in model.modules() if isinstance(module, OffloadedExperts)]


def _preparing(prepare: Callable) -> Callable:
    @functools.wraps(prepare)
    def prepare_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        models = [arg for arg in args if isinstance(arg, nn.Module) and offloaded_in(arg)]
        if not models:
            return prepare(self, *args, **kwargs)
        kind = str(getattr(self.distributed_type, "value", self.distributed_type))
        if kind != "NO":
            experts = offloaded_in(models[0])[0]
            raise ValueError(
                f"{experts.name} is {experts.storage}, and accelerate is to train it under {kind}, where processes "
                "share or copy all weights: start one process without FSDP, DeepSpeed and data parallelism, or load "
                "the model without offloaded experts."
            )
        return prepare(self, *args, **kwargs)

    return prepare_here


def let_accelerate_train() -> None:
    """Let `Accelerator.prepare` refuse offloaded experts under several processes in a sentence; called once."""
    from accelerate import Accelerator

    Accelerator.prepare = _preparing(Accelerator.prepare)


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
