"""Plan the placement of a model on one machine: accelerators first, then experts and layers in RAM or on disk."""

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
    """A placement of a model on one machine. Sizes are bytes; devices are 0, 1, ... for accelerators, "cpu" and "disk".

    `from_pretrained(folder, **plan.arguments())` loads the model by it.

    Attributes:
        device_map: argument of `from_pretrained`.
        experts_memory: argument of `from_pretrained`: bytes for recently used experts, in RAM if all experts are on
            disk, on each accelerator if they are in RAM. None if no experts are offloaded.
        room: device to the bytes that it has for weights and cache: its memory without headroom.
        weights: device to bytes of weights, with experts.
        cache: device to bytes of the full KV cache.
        experts: device to bytes of routed experts, which are part of `weights`.
        remaining: device to unused bytes of its room; `experts_memory` counts as used.
        parts: part of the model to its numbers of parameters and of bytes.
        form: dtype or format of the weights.
        context, prefill, batch: tokens in the KV cache, tokens of the prompt in one forward pass, and rows.
        expert_bytes_per_step: bytes of routed experts that a decoding step of all rows reads, from any device.
        hit_share: share of the offloaded experts that fit into `experts_memory`: the cache's hit rate if all experts
            are chosen equally often.
        seconds: estimated seconds of one decoding step, by cause.
        tokens_per_second: of all rows together, estimated from bandwidths alone; None for a vision tower.
        bandwidths: bandwidths of the estimate.
        notes: advice, in sentences.
        dtype: argument of `from_pretrained` if `bits` was 16 or 32; None keeps the dtype of the files.
        training: memory of a training step with adapters, which `room` leaves out; None if none was planned.
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
        """Return the arguments of `from_pretrained`: device_map, and experts_memory and dtype if they are not None."""
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

    The whole model goes to the accelerators if it fits. If not, the routed experts of as few layers as possible are
    kept in RAM and computed there. If they do not fit into RAM, they stay on disk, and the free RAM caches recently
    used ones. If all other weights do not fit on the accelerators either, the last layers are copied from RAM or disk
    in every forward pass, as accelerate does. Without accelerators the CPU computes everything.

    Args:
        model: a configuration, ours or stock, the name of a preset, a config.json, or a folder; or a `Source` of
            `llamoe.planning`, if its headers are read already.
        gpus: number of accelerators, or the memory of each; None: those of this machine, with their free memory.
        gpu_memory: memory of each accelerator if `gpus` is a number; bytes, or a text like "24GB".
        ram: bytes of RAM, or a text like "64GB"; None: the free RAM of this machine.
        disk: whether weights may stay on disk.
        bits: bits of a weight: 32, 16, or 8 or 4, which bitsandbytes applies to linear layers and routed experts. None:
            the dtypes of the folder's files, or 16 without files.
        quantization: plan one of llamoe's formats instead: a `QuantizationConfig`, or "int8", "int4", "int4:128" with
            the size of its groups.
        context: tokens of prompt and answer in the KV cache; by default 8192, or the model's limit if lower.
        batch: rows in the KV cache.
        prefill: most tokens of the prompt in one forward pass; by default all.
        headroom: memory of each device that is kept free for activations.
        bandwidths: result of `measure_bandwidths()`; by default assumed ones.
        nodes: number of equal machines. With more than one, the plan divides the model among their accelerators: heads,
            inner sizes and experts within a node, and pipeline stages over nodes if one node is too small.
        training: plan training with FSDP2: weights, gradients and AdamW's averages are divided within each node if they
            fit, else over all nodes.
        adapters: plan training of LoRA adapters of this rank: memory for a step is kept free, and the plan's `training`
            itemises it. Then `context` is the tokens of a row, 1024 by default, `batch` the rows of a step, and there
            is no KV cache.
        adapt_experts: whether routed experts get adapters, too.

    Returns:
        a `PlacementPlan`; a `NodesPlan` for several nodes or for training.

    Raises:
        ValueError: a wrong argument, or a model that does not fit on these devices, with the sizes.
    """
    source, packing = read_source(model), as_quantization(quantization)
    config, sizes = source.config, sizes_of(source, bits, packing)
    room = _room(gpus, gpu_memory, ram, bytes_of("headroom", headroom))
    count_of("batch", batch)
    step = None
    if adapters is not None:
        if count_of("nodes", nodes) > 1 or training:
            raise ValueError(
                f"adapters={adapters}: needs a plan for one machine; leave nodes and training out."
            )
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
                f"gpus={gpus!r}: plans with nodes or training need equal accelerators, at least one."
            )
        cache = (context, batch, prefill)
        return plan_nodes(source.model, sizes, nodes, len(room) - 1, gpu_sizes.pop(), training, cache)
    placement = choose(sizes, room, disk)
    if placement is None:
        parts = {"weights": sum(unit.weights for unit in sizes.units), "routed experts": sizes.experts}
        parts[f"the cache of {context} tokens in {batch} rows"] = sum(unit.cache for unit in sizes.units)
        if step is not None:
            parts["memory for a training step, taken off the room"] = step.memory
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
    """Return the bytes of each device for weights and cache; accelerators come before "cpu"."""
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
            f"a device has no memory beside headroom={headroom / GB:g} GB, which is kept free for activations: give "
            "more memory, or a smaller headroom."
        )
    return room


def _remaining(placement: Placement, room: dict[Any, int]) -> tuple[dict[Any, int], float]:
    """Return each device's unused bytes, and the share of offloaded experts that fit into the experts' memory."""
    weights, cache, memory = placement.weights(), placement.cache(), placement.memory
    remaining = {
        device: size - weights.get(device, 0) - cache.get(device, 0) for device, size in room.items()
    }
    if memory is None:
        return remaining, 0.0
    leaving = [(unit, device) for unit, device, place in placement.rows() if place is not None]
    # Each accelerator with layers of offloaded experts has its own cache of experts.
    holders = {placement.main if device in ("cpu", "disk") else device for _, device in leaving}
    if placement.place == "disk":
        holders = {"cpu"}
    for holder in holders:
        remaining[holder] -= memory
    return remaining, min(1.0, len(holders) * memory / sum(unit.experts for unit, _ in leaving))


def _notes(place: str, bits: int | None, quantization: QuantizationConfig | None) -> list[str]:
    """Return advice on how to get weights of the planned format; `place` is the device of offloaded experts."""
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
        run = f"run `llamoe quantize IN OUT --to int{bits}`, and plan OUT."
        return [f"Offloaded experts are read in the format of the files: {run}"]
    argument = f"quantization_config=BitsAndBytesConfig(load_in_{bits}bit=True)"
    return [
        f"bitsandbytes quantizes while the model is loaded: add {argument} to the arguments of from_pretrained."
    ]
