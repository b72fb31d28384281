"""Placement of a model on one machine: accelerators first, then routed experts and layers in RAM or on disk."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..configuration import LlamoeVisionConfig, QuantizationConfig, cache_bytes
from ..configuration.base import LlamoeBaseConfig
from ..configuration.memory import default_context
from ..configuration.quantization import as_quantization
from ..configuration.sizes import GB, bytes_of, count_of
from .bandwidths import Bandwidths
from .filling import Placement, choose
from .nodes import NodesPlan, plan_nodes
from .source import Source, read_source
from .speed import bytes_of_step, seconds_of_step
from .table import lines_of
from .training import DEFAULT_TOKENS, TrainingPlan, training_sizes
from .units import sizes_of


@dataclass(frozen=True)
class PlacementPlan:
    """Placement of a model on one machine. Sizes are bytes; devices are 0, 1, ... for accelerators, "cpu" and "disk".

    `from_pretrained(folder, **plan.arguments())` loads the model so.

    Attributes:
        device_map: for `from_pretrained`.
        experts_memory: for `from_pretrained`; memory for recently used experts, of RAM where they are on disk, of each
            accelerator where they are in RAM. None where no experts are offloaded.
        room: device to bytes for weights and cache: its memory without headroom.
        weights: device to bytes of weights, experts among them.
        cache: device to bytes of keys and values at their fullest.
        experts: device to bytes of routed experts, which `weights` count, too.
        remaining: device to bytes of its room that nothing takes, `experts_memory` taken off.
        parts: part of the model to its parameters and bytes.
        form: dtype or format of the weights.
        context, prefill, batch: tokens, tokens of the prompt in one pass, and rows that the cache is for.
        expert_bytes_per_step: bytes of routed experts that one token of each row reads, wherever they are.
        hit_share: share of the offloaded experts that `experts_memory` holds, which is the share of hits if all experts
            are chosen equally often.
        seconds: of one decoding step, by cause.
        tokens_per_second: of all rows together, by the bandwidths alone (`speed`); None for a tower.
        bandwidths: that these follow from.
        notes: what else to know, in sentences.
        dtype: for `from_pretrained`, where `bits` was 16 or 32; None: that of the files.
        training: what a step of training adapters takes; None unless it was planned. The room is without it.
    """

    device_map: dict[str, Any]
    experts_memory: int | None
    room: dict[Any, int]
    weights: dict[Any, int]
    cache: dict[Any, int]
    experts: dict[Any, int]
    remaining: dict[Any, int]
    parts: dict[str, tuple[int, int]] = field(repr=False)
    form: str
    context: int | None
    prefill: int | None
    batch: int
    expert_bytes_per_step: int
    hit_share: float
    seconds: dict[str, float]
    tokens_per_second: float | None
    bandwidths: Bandwidths
    notes: list[str]
    dtype: str | None = None
    training: TrainingPlan | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`: device_map, and where the plan has them experts_memory and dtype."""
        more = {"experts_memory": self.experts_memory, "dtype": self.dtype}
        given = {name: value for name, value in more.items() if value is not None}
        return {"device_map": dict(self.device_map), **given}

    def __str__(self) -> str:
        return "\n".join(lines_of(self))


def plan_placement(
    model: LlamoeBaseConfig | Source | str | os.PathLike,
    *,
    gpus: int | Sequence[int | str] | None = None,
    gpu_memory: int | str = "80GB",
    ram: int | str | None = None,
    disk: bool = True,
    bits: int | None = None,
    quantization: QuantizationConfig | str | None = None,
    context: int | None = None,
    batch: int = 1,
    prefill: int | None = None,
    headroom: int | str = "4GB",
    bandwidths: Bandwidths | None = None,
    nodes: int = 1,
    training: bool = False,
    adapters: int | None = None,
    adapt_experts: bool = True,
) -> PlacementPlan | NodesPlan:
    """Plan the device of each part of a model, before a weight is read or downloaded.

    Everything goes to the accelerators if it fits. Else routed experts leave them, of as few layers as need be, for
    RAM, where they are computed. If they do not fit there, they stay on disk, with what RAM is left as memory for those
    used last. If the rest does not fit on the accelerators either, its last layers are copied from RAM, then from
    disk, in every forward pass, as accelerate does. Without accelerators RAM is where everything is computed.

    Args:
        model: a configuration, ours or stock, the name of a preset, a config.json, or a folder; or a `Source`, which
            `llamoe.planning` has for what is open already.
        gpus: number of accelerators, or the memory of each; None: those of this machine, with what is free there.
        gpu_memory: of each accelerator, where `gpus` is a number; bytes, or a text like "24GB".
        ram: None: what is free on this machine.
        disk: whether anything may stay on disk.
        bits: of a weight: 32, 16, or 8 or 4 of linear layers and routed experts as bitsandbytes stores them. None: as
            the folder's files have them, or 16 where there are none.
        quantization: plan for llamoe's own formats instead: a `QuantizationConfig`, or "int8", "int4", "int4:128" with
            the size of its groups.
        context: tokens of prompt and answer that the cache is for; by default 8192, or the model's limit if lower.
        batch: rows that the cache is for.
        prefill: most tokens of the prompt in one pass; by default all.
        headroom: of each device, kept free for what a pass computes with.
        bandwidths: of `measure_bandwidths()`; by default assumptions.
        nodes: machines like this one. Of more than one it is planned how their accelerators share the model: heads,
            widths and experts inside of a node, and stages of layers between nodes if it fits into none.
        training: plan FSDP2 instead: weights, gradients and AdamW's averages are shared inside of each node if they fit
            there, else by all.
        adapters: rank of LoRA adapters that are trained: memory for a step is kept free, and the plan's `training` says
            what takes it. `context` are then the tokens of a row, 1024 by default, `batch` the rows of a step, and
            there is no cache.
        adapt_experts: whether routed experts have adapters, too.

    Returns:
        a `PlacementPlan`; a `NodesPlan` for several nodes or for training.

    Raises:
        ValueError: arguments that are wrong, or a model that has no place on these devices, with the sizes.
    """
    source, packing = read_source(model), as_quantization(quantization)
    config, sizes = source.config, sizes_of(source, bits, packing)
    room = _room(gpus, gpu_memory, ram, bytes_of("headroom", headroom))
    count_of("batch", batch)
    step = None
    if adapters is not None:
        if count_of("nodes", nodes) > 1 or training:
            raise ValueError(f"adapters={adapters}: is planned on one machine; leave nodes and training out.")
        context, prefill = count_of("context", DEFAULT_TOKENS if context is None else context), None
        rank, on_cpu = count_of("adapters", adapters), len(room) == 1
        step = training_sizes(source.model, sizes, rank, adapt_experts, context, batch, on_cpu)
        computing = [device for device in room if device != "cpu"] or ["cpu"]
        room |= {device: max(0, room[device] - step.memory) for device in computing}
    elif isinstance(config, LlamoeVisionConfig):
        context = prefill = None
    else:
        context = default_context(config) if context is None else context
        prefill = context if prefill is None else min(count_of("prefill", prefill), context)
        sizes = sizes.with_cache(cache_bytes(config, context, batch, sizes.element_size, prefill))
    if count_of("nodes", nodes) > 1 or training:
        gpu_sizes = {size for device, size in room.items() if device != "cpu"}
        if len(gpu_sizes) != 1:
            raise ValueError(
                f"gpus={gpus!r}: nodes and training are planned for equal accelerators, at least one."
            )
        cache = (context, batch, prefill)
        return plan_nodes(source.model, sizes, nodes, len(room) - 1, gpu_sizes.pop(), training, cache)
    placement = choose(sizes, room, disk)
    if placement is None:
        parts = {"weights": sum(unit.weights for unit in sizes.units), "routed experts": sizes.experts}
        parts[f"the cache of {context} tokens in {batch} rows"] = sum(unit.cache for unit in sizes.units)
        if step is not None:
            parts["taken off the room for a step of training"] = step.memory
        takes = ", ".join(f"{part} {size / GB:.1f}" for part, size in parts.items())
        has = ", ".join(f"{device} {size / GB:.1f}" for device, size in room.items())
        raise ValueError(
            f"the model does not fit ({takes} GB) into the devices' room ({has} GB): take more memory, fewer bits, a "
            f"smaller context{'' if disk else ', or disk=True'}"
        )
    remaining, hit_share = _remaining(placement, room)
    seconds = seconds_of_step(placement, sizes.chosen, batch, hit_share, bandwidths or Bandwidths())
    if step is not None and placement.memory is not None:
        leaving = (unit for unit, _, place in placement.rows() if place is not None)
        read = sum(bytes_of_step(unit, sizes.chosen, step.tokens * batch) for unit in leaving)
        # The backward pass reads experts in reverse order, so the last used ones are still cached.
        step = replace(step, expert_bytes=round(2 * read * (1 - hit_share)))
    # Towers and training steps generate no tokens.
    generates = step is None and context is not None
    return PlacementPlan(
        device_map=placement.device_map(),
        experts_memory=placement.memory,
        room=room,
        weights=placement.weights(),
        cache=placement.cache(),
        experts=placement.experts(),
        remaining=remaining,
        parts=sizes.parts,
        form=sizes.form,
        context=context,
        prefill=prefill,
        batch=batch,
        expert_bytes_per_step=round(sum(bytes_of_step(unit, sizes.chosen, batch) for unit in sizes.units)),
        hit_share=hit_share,
        seconds=seconds,
        tokens_per_second=batch / sum(seconds.values()) if generates else None,
        bandwidths=bandwidths or Bandwidths(),
        notes=_notes(placement.place, bits, packing),
        dtype=sizes.form if bits in (16, 32) else None,
        training=step,
    )


def _room(gpus: Any, gpu_memory: Any, ram: Any, headroom: int) -> dict[Any, int]:
    """Return the bytes of each device for weights and cache, the computing device first."""
    from accelerate.utils import get_max_memory

    here = get_max_memory() if gpus is None or ram is None else {}
    if gpus is None:
        sizes = [size for device, size in here.items() if device != "cpu"]
    elif isinstance(gpus, int):
        sizes = [bytes_of("gpu_memory", gpu_memory)] * count_of("gpus", gpus, least=0)
    else:
        sizes = [bytes_of("gpus", size) for size in gpus]
    memory = here["cpu"] if ram is None else bytes_of("ram", ram)
    room: dict[Any, int] = {device: size - headroom for device, size in enumerate(sizes)}
    room["cpu"] = max(0, memory - headroom)
    if min(list(room.values())[: len(sizes) or 1]) <= 0:
        raise ValueError(
            f"a device that computes has no room beside headroom={headroom / GB:g} GB, which is kept free for what a "
            "forward computes with: give more memory, or a smaller headroom."
        )
    return room


def _remaining(placement: Placement, room: dict[Any, int]) -> tuple[dict[Any, int], float]:
    """Return each device's unused bytes, and the share of offloaded experts that is in memory."""
    weights, cache, memory = placement.weights(), placement.cache(), placement.memory
    remaining = {
        device: size - weights.get(device, 0) - cache.get(device, 0) for device, size in room.items()
    }
    if memory is None:
        return remaining, 0.0
    leaving = [(unit, device) for unit, device, place in placement.rows() if place is not None]
    # Each accelerator that has layers of such experts holds some of its own.
    holders = {placement.main if device in ("cpu", "disk") else device for _, device in leaving}
    if placement.place == "disk":
        holders = {"cpu"}
    for holder in holders:
        remaining[holder] -= memory
    return remaining, min(1.0, len(holders) * memory / sum(unit.experts for unit, _ in leaving))


def _notes(place: str, bits: int | None, quantization: QuantizationConfig | None) -> list[str]:
    """Say how weights of the planned format are made; `place` is where offloaded experts are."""
    if quantization is not None:
        form, size = quantization.weights, quantization.group_size
        group, argument = (f" --group-size {size}", f", group_size={size}") if form == "int4" else ("", "")
        loads = (
            f', or load IN with these and quantization_config=llamoe.QuantizationConfig("{form}"{argument})'
        )
        run = f"Run `llamoe quantize IN OUT --to {form}{group}`, and load OUT with these arguments"
        return [f"{run}{'' if place else loads}."]
    if bits not in (4, 8):
        return []
    if place:
        run = f"run `llamoe quantize IN OUT --to int{bits}`, and plan OUT, whose files say the sizes."
        return [f"Offloaded experts are read as files have them: {run}"]
    argument = f"quantization_config=BitsAndBytesConfig(load_in_{bits}bit=True)"
    return [f"bitsandbytes stores weights so: add {argument} to the arguments of from_pretrained."]
