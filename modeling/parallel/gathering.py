"""Gathers the shards of a model from all processes, so that one of them can write it.

All processes must gather each tensor together. accelerate and Trainer gather the weights of an FSDP2 model themselves,
and have one process save them.
"""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


def size_of(config: Any, name: str) -> int:
    """Return `tp_size` for "tp", and so on; 1 if unset. `config` is a model's config or `distributed_config`."""
    return getattr(getattr(config, "distributed_config", config), f"{name}_size", None) or 1


def is_sharded(tensors: Iterable[Any]) -> bool:
    """Return True if any tensor is a `DTensor`, of which each process holds a shard."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def is_shared(model: PreTrainedModel, state_dict: dict[str, Any] | None) -> bool:
    """Return True if all processes must take part in saving `state_dict`, or the model's weights if it is None."""
    tensors = model.parameters() if state_dict is None else state_dict.values()
    sizes = [size_of(model.config, name) for name in ("tp", "fsdp", "dp_replicate", "ep")]
    # Saving a model that transformers has sharded waits for all processes, even if nothing is left to gather.
    return dist.is_initialized() and (max(sizes) > 1 or is_sharded(tensors))


def sharded_adapter(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return an adapter's tensors, not yet gathered, if the model is sharded; else None.

    transformers would select them in the first process only, but all must take part in gathering.
    """
    whole = model.state_dict()
    if not is_sharded(whole.values()):
        return None
    # peft selects by name. It gets names in place of tensors, which it might also gather.
    wanted = set(model.get_adapter_state_dict(state_dict={name: name for name in whole}).values())
    return {name: tensor for name, tensor in whole.items() if name in wanted}


def joined(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with each sharded tensor gathered, on the CPU; all processes call this together."""
    return {
        name: value.full_tensor().detach().cpu() if isinstance(value, DTensor) else value
        for name, value in state_dict.items()
    }
