"""Gathers the shards of a model from all processes, so that one of them can write it.

All processes must gather each tensor together. accelerate and Trainer gather the weights of an FSDP2 model themselves,
and have one process save them.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .._private_api import gather


def size_of(distributed_config: Any, name: str) -> int:
    """Return a size, such as `tp_size`, from a model's `distributed_config`; 1 if unset or without a config."""
    return getattr(distributed_config, f"{name}_size", None) or 1


def is_sharded(tensors: Iterable[Any]) -> bool:
    """Return True if any of these is a `DTensor`, whose shards several processes hold."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def broadcast(value: Any) -> Any:
    """Broadcast the first process's value to every process."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def is_shared(model: PreTrainedModel, state_dict: dict[str, Any] | None) -> bool:
    """Return whether all processes must save a model together.

    Args:
        model: the model.
        state_dict: the part of it to be written; None for all of it.
    """
    config = getattr(model.config, "distributed_config", None)
    sizes = [size_of(config, name) for name in ("tp", "fsdp", "dp_replicate", "ep")]
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    # transformers has sharded the model: it waits for all processes even where nothing is left to gather.
    return max(sizes) > 1 or is_sharded(model.parameters() if state_dict is None else state_dict.values())


def refuse_stages(model: PreTrainedModel) -> None:
    """Raise a `ValueError` for a model in pipeline stages: each process has other layers."""
    stages = size_of(getattr(model.config, "distributed_config", None), "pp")
    if stages > 1:
        raise ValueError(
            f"save_pretrained: this {type(model).__name__} is in {stages} pipeline stages, and no process has all of "
            "its weights. Load it without pp_size to save it."
        )


def sharded_adapter(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return an adapter's tensors, gathered for saving, if the model is sharded; else None.

    transformers would select them in the first process only, where shards cannot be gathered.
    """
    whole = model.state_dict()
    if not is_sharded(whole.values()):
        return None
    # peft selects by name. Given tensors, it might also gather them, in the first process alone.
    wanted = set(model.get_adapter_state_dict(state_dict={name: name for name in whole}).values())
    return {name: tensor for name, tensor in whole.items() if name in wanted}


def joined(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Gather the shards of each tensor; all processes that have a shard call this, in the same order."""
    return {
        name: gather(value).detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
    }
