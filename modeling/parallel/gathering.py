"""Joining the shards of a model that several processes share, so that one of them can write it.

Each tensor is gathered by all processes together. A process that does so alone waits for the others until the process
group's time is over, if its backend has one, and is then ended without a word of the reason. So the processes meet
first, at the store through which they found each other. They do so only where there is something to gather: accelerate
and Trainer gather the weights of an FSDP2 model themselves, and have one process save them.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .._compat import default_store, gather

logger = logging.getLogger("llamoe")

_PATIENCE = 15.0  # seconds after which it is said for whom a process waits


def is_sharded(tensors: Iterable[Any]) -> bool:
    """Whether any of these is a part of a tensor that several processes hold, or is made to be."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def broadcast(value: Any) -> Any:
    """Give the first process's value in all of them."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def sharing_processes(model: PreTrainedModel, state_dict: dict[str, Any] | None) -> list[int]:
    """Name the processes that have to save a model together; none where one can do it alone.

    Args:
        model: the model.
        state_dict: what is to be written of it; None for all of it.
    """
    config = getattr(model.config, "distributed_config", None)
    sizes = [getattr(config, f"{name}_size", None) or 1 for name in ("tp", "fsdp", "dp_replicate", "ep")]
    if not dist.is_available() or not dist.is_initialized():
        return []
    # A model that transformers has sharded: it waits for all processes even where nothing is left to gather.
    if max(sizes) > 1:
        return list(range(dist.get_world_size()))
    tensors = model.parameters() if state_dict is None else state_dict.values()
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    ranks = {int(rank) for mesh in meshes for rank in mesh.mesh.flatten()}
    return sorted(ranks) if len(ranks) > 1 else []


def refuse_stages(model: PreTrainedModel) -> None:
    """Refuse to save a model in pipeline stages, of which each process has other layers.

    Raises:
        ValueError: it is one.
    """
    stages = getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1
    if stages > 1:
        raise ValueError(
            f"save_pretrained: this {type(model).__name__} is in {stages} pipeline stages, and no process has all of "
            "its weights. Load it without pp_size to save it."
        )


def meet_before_saving(model: PreTrainedModel, ranks: list[int]) -> None:
    """Wait until these processes, which share a model, have called `save_pretrained`.

    Raises:
        RuntimeError: not all of them have, in the time that the process group allows.
    """
    _meet(
        ranks,
        f"the weights of this {type(model).__name__.removeprefix('FSDP')} are shared by {len(ranks)} processes, all of "
        "which have to save it together. Call save_pretrained in every process (only the first one writes), not under "
        "`if rank == 0:`",
        patience=_PATIENCE,
    )


def meet_after_saving(ranks: list[int]) -> None:
    """Wait until the one of these processes that writes has written.

    Raises:
        RuntimeError: it has not, in the time that the process group allows.
    """
    _meet(ranks, "the files are not written yet, or writing them failed")


def _meet(ranks: list[int], reason: str, patience: float = float("inf")) -> None:
    """Wait for other processes; say after `patience` seconds, and in the end raise, who is missing and the reason."""
    if not ranks:
        return
    store = default_store()
    name = f"llamoe/save/{ranks[0]}-{ranks[-1]}-{len(ranks)}"
    mine = f"{name}/{dist.get_rank()}"
    # How often this process has come here, and how often all of them have, taken together.
    count = store.add(mine, 1)
    arrivals = store.add(name, 1)
    begin, pause = time.monotonic(), 0.001
    while arrivals < count * len(ranks):
        waited = time.monotonic() - begin
        is_over = waited > store.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]
        if is_over or waited > patience:
            patience = float("inf")
            missing = [rank for rank in ranks if store.add(f"{name}/{rank}", 0) < count]
            problem = f"save_pretrained waits for {_listed(missing)} since {waited:.0f} s: {reason}."
            if is_over and missing:
                store.add(name, -1)
                store.add(mine, -1)
                raise RuntimeError(problem)
            logger.warning(problem)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
        arrivals = store.add(name, 0)


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"


def sharded_adapter(model: PreTrainedModel) -> dict[str, Any] | None:
    """Give what `save_pretrained` writes of a sharded model with an adapter; None where transformers may choose.

    It does so in the first process alone, where shards cannot be joined any more.
    """
    whole = model.state_dict()
    if not is_sharded(whole.values()):
        return None
    # peft chooses by name. Given tensors, it may join them besides, in the first process alone.
    wanted = set(model.get_adapter_state_dict(state_dict={name: name for name in whole}).values())
    return {name: tensor for name, tensor in whole.items() if name in wanted}


def joined(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Join the shards of each tensor; all processes that have a shard call this, in the same order."""
    return {
        name: gather(value).detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
    }
