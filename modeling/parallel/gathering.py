"""Gathers the shards of a model from all processes, so that one of them can write it.

All processes must gather each tensor together. A process that gathers alone waits until the process group's timeout,
if its backend has one, and then ends without a reason. So the processes first meet at the process group's store. They
do so only where shards must be gathered: accelerate and Trainer gather the weights of an FSDP2 model themselves, and
have one process save them.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...configuration.checks import listed
from .._private_api import default_store, gather

logger = logging.getLogger("llamoe")

# Seconds of waiting after which the missing processes are named.
_PATIENCE = 15.0


def size_of(distributed_config: Any, name: str) -> int:
    """A size of a model's sharing by processes; unset ones, and those of a model that is not shared, are 1."""
    return getattr(distributed_config, f"{name}_size", None) or 1


def is_sharded(tensors: Iterable[Any]) -> bool:
    """Whether any of these is a `DTensor`, whose shards several processes hold."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def broadcast(value: Any) -> Any:
    """The first process's value, in every process."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def sharing_processes(model: PreTrainedModel, state_dict: dict[str, Any] | None) -> list[int]:
    """Ranks of the processes that must save a model together; empty if one process can save it alone.

    Args:
        model: the model.
        state_dict: the part of it to be written; None for all of it.
    """
    config = getattr(model.config, "distributed_config", None)
    sizes = [size_of(config, name) for name in ("tp", "fsdp", "dp_replicate", "ep")]
    if not dist.is_available() or not dist.is_initialized():
        return []
    # transformers has sharded the model: it waits for all processes even where nothing is left to gather.
    if max(sizes) > 1:
        return list(range(dist.get_world_size()))
    tensors = model.parameters() if state_dict is None else state_dict.values()
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    ranks = {int(rank) for mesh in meshes for rank in mesh.mesh.flatten()}
    return sorted(ranks) if len(ranks) > 1 else []


def refuse_stages(model: PreTrainedModel) -> None:
    """Raise a `ValueError` for a model in pipeline stages: each process has other layers."""
    stages = size_of(getattr(model.config, "distributed_config", None), "pp")
    if stages > 1:
        raise ValueError(
            f"save_pretrained: this {type(model).__name__} is in {stages} pipeline stages, and no process has all of "
            "its weights. Load it without pp_size to save it."
        )


def meet_before_saving(model: PreTrainedModel, ranks: list[int]) -> None:
    """Wait until all processes that share a model have called `save_pretrained`; a `RuntimeError` at the timeout."""
    _meet(
        ranks,
        f"the weights of this {type(model).__name__.removeprefix('FSDP')} are shared by {len(ranks)} processes, all of "
        "which have to save it together. Call save_pretrained in every process (only the first one writes), not under "
        "`if rank == 0:`",
        patience=_PATIENCE,
    )


def meet_after_saving(ranks: list[int]) -> None:
    """Wait until the process that writes has written; a `RuntimeError` at the process group's timeout."""
    _meet(ranks, "the files are not written yet, or writing them failed")


def _meet(ranks: list[int], reason: str, patience: float = float("inf")) -> None:
    """Wait for other processes; after `patience` seconds report, and at the timeout raise, who is missing and why."""
    if not ranks:
        return
    store = default_store()
    name = f"llamoe/save/{ranks[0]}-{ranks[-1]}-{len(ranks)}"
    mine = f"{name}/{dist.get_rank()}"
    # Number of calls by this process, and by all of them together.
    count = store.add(mine, 1)
    arrivals = store.add(name, 1)
    begin, pause = time.monotonic(), 0.001
    while arrivals < count * len(ranks):
        waited = time.monotonic() - begin
        is_over = waited > store.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]
        if is_over or waited > patience:
            patience = float("inf")
            missing = [rank for rank in ranks if store.add(f"{name}/{rank}", 0) < count]
            noun = "process" if len(missing) == 1 else "processes"
            problem = f"save_pretrained waits for {noun} {listed(missing, 8)} since {waited:.0f} s: {reason}."
            if is_over and missing:
                store.add(name, -1)
                store.add(mine, -1)
                raise RuntimeError(problem)
            logger.warning(problem)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
        arrivals = store.add(name, 0)


def sharded_adapter(model: PreTrainedModel) -> dict[str, Any] | None:
    """What `save_pretrained` writes of a sharded model with an adapter; None where transformers may select it.

    transformers selects in the first process alone, where shards can no longer be gathered.
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
