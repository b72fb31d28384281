"""What libraries that train and adapt must know of offloaded experts.

accelerate and peft read `hf_device_map`. What is on "disk" or in RAM there they take for modules that accelerate's
hooks bring: they hook the model anew, count what would fit, or refuse to train it. Offloaded experts need none of it.
While those libraries look, the map names the devices on which rows are computed.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .experts import OffloadedExperts


def offloaded_in(model: nn.Module) -> list[OffloadedExperts]:
    """The experts of a model that are offloaded."""
    return [module for module in model.modules() if isinstance(module, OffloadedExperts)]


@contextmanager
def showing_devices_of_rows(model: nn.Module) -> Iterator[None]:
    """Context in which `hf_device_map` names the devices of offloaded experts' rows; other models stay as they are."""
    owner = next((m for m in model.modules() if isinstance(vars(m).get("hf_device_map"), dict)), None)
    experts = {each.name: each.device for each in offloaded_in(model) if each.store is not None}
    if owner is None or not experts:
        yield
        return
    places: Any = owner.hf_device_map
    others = {name: device for name, device in places.items() if name not in experts}
    if "disk" not in others.values() and len({torch.device(device) for device in others.values()}) <= 1:
        # Nothing has hooks. By the text "cpu" libraries would know modules that have.
        others = {name: torch.device(device) for name, device in others.items()}
    owner.hf_device_map = {**others, **experts}
    try:
        yield
    finally:
        owner.hf_device_map = places


def _preparing(prepare: Callable) -> Callable:
    @functools.wraps(prepare)
    def prepare_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        models = [each for each in args if isinstance(each, nn.Module) and offloaded_in(each)]
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
        with showing_devices_of_rows(models[0]):
            return prepare(self, *args, **kwargs)

    return prepare_here


def let_accelerate_train() -> None:
    """Let `Accelerator.prepare` take models with offloaded experts, or refuse them in a sentence; called once."""
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
