"""Plan the placement of a model: on one machine's accelerators, with experts and layers in RAM or on disk if needed."""

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
from .filling import choose
from .nodes import NodesPlan, plan_nodes
from .source import Source, read_source
from .speed import expert_bytes, seconds_of_step
from .table import lines_of
from .training import DEFAULT_TOKENS, TrainingPlan, training_sizes
from .units import sizes_of


@dataclass(frozen=True)
class PlacementPlan:
    """A placement of a model on one machine. Devices are 0, 1, ... for accelerators, "cpu" for RAM, and "disk".

    `from_pretrained(folder, **plan.arguments())` loads the model as planned. Sizes are bytes.

    Attributes:
        device_map: argument of `from_pretrained`.
        experts_memory: argument of `from_pretrained`: size of the cache of recently used experts. If the experts are on
            disk, the cache is in RAM; if they are in RAM, each accelerator has one. None if no experts are offloaded.
        room: device to the memory that it has for weights and cache. Headroom and training steps are subtracted.
        weights: device to size of its weights, with experts.
        cache: device to size of its full KV cache.
        experts: device to size of its routed experts, which are part of `weights`.
        remaining: device to unused memory of its room; `experts_memory` counts as used.
        parts: name of each part of the model to its number of parameters and its bytes.
        form: dtype or format of the weights.
        context, prefill, batch: tokens in the KV cache, tokens of the prompt in one forward pass, and rows.
        expert_bytes_per_step: routed experts that a decoding step of all rows reads, from all devices together.
        hit_share: share of the offloaded experts that fit into `experts_memory`: the cache's hit rate if all experts
            are equally likely.
        seconds: estimated seconds of one decoding step, by what is read.
        tokens_per_second: of all rows together, estimated from bandwidths alone; None for vision towers and training.
        bandwidths: bandwidths of the estimate.
        notes: advice, in sentences.
        dtype: argument of `from_pretrained` if `bits` was given; None keeps the dtype of the files.
        training: memory of a training step with adapters; None if no training was planned.
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
        optional = {"experts_memory": self.experts_memory, "dtype": self.dtype}
        optional = {name: value for name, value in optional.items() if value is not None}
        return {"device_map": dict(self.device_map), **optional}

    def __str__(self) -> str:
        return "\n".join(lines_of(self))


def plan_placement(
    model: LlamoeBaseConfig | Source | str | os.PathLike,
    *,
    gpus: int | Sequence[int | str] | None = None,
    gpu_memory: int | str = "80GB",
    ram: int | str | None = None,
    bits: int | None = None,
    quantization: QuantizationConfig | str | None = None,
    disk: bool = True,
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

    The whole model goes to the accelerators if it fits. If not, the routed experts of as few layers as possible stay in
    RAM, and the CPU computes them when they are not in the accelerators' cache. If these experts do not fit into RAM,
    they stay on disk, and free RAM caches the recently used ones. If the other weights do not fit on the accelerators
    either, the last layers are copied from RAM or disk in every forward pass, as accelerate does. Without accelerators
    the CPU computes everything.

    Args:
        model: a configuration of llamoe or transformers, the name of a preset, a config.json, a folder, or the result
            of `llamoe.planning.read_source`.
        gpus: number of accelerators, or a list with the memory of each. None takes those of this machine, with the
            memory that is free now.
        gpu_memory: memory of each accelerator if `gpus` is a number; bytes, or a text like "24GB".
        ram: bytes of RAM, or a text like "64GB"; None takes the RAM of this machine that is free now.
        bits: bits of a weight: 32 or 16; 8 for "int8" or 4 for "int4:64", which take as many bytes as bitsandbytes'
            formats. None takes the dtypes of the folder's files, or 16 bits without files.
        quantization: one of llamoe's formats, in place of `bits`: a `QuantizationConfig`, or "int8", "int4", or
            "int4:128" for groups of 128 inputs.
        disk: whether weights may stay on disk.
        context: tokens of prompt and answer in the KV cache; by default 8192, or the model's limit if that is lower.
        batch: rows in the KV cache.
        prefill: most tokens of the prompt in one forward pass; by default all.
        headroom: memory of each device that stays free for activations.
        bandwidths: result of `measure_bandwidths()`; by default the assumed ones of `Bandwidths`.
        nodes: number of equal machines. With more than one, the plan divides the model among their accelerators:
            attention heads, inner sizes and experts within a node, and layers over nodes if one node is too small.
        training: plan training of all weights with FSDP2. Weights, gradients and AdamW's averages are divided within
            each node if they fit, else over all nodes.
        adapters: plan training of LoRA adapters of this rank. Memory for a training step stays free, and the plan's
            `training` lists what takes it. Then `context` is the number of tokens of a row, 1024 by default, `batch`
            the number of rows of a step, and there is no KV cache.
        adapt_experts: whether routed experts get adapters, too.

    Returns:
        a `PlacementPlan`; a `NodesPlan` for several nodes or with `training`.

    Raises:
        ValueError: an argument is wrong, or the model does not fit on these devices; the message has the sizes.
    """
    source, packing = read_source(model), as_quantization(quantization)
    if packing is None and bits in (8, 4):
        packing, bits = as_quantization("int8" if bits == 8 else "int4:64"), None
    config, sizes = source.config, sizes_of(source, bits, packing)
    bandwidths = bandwidths or Bandwidths()
    room = _room(gpus, gpu_memory, ram, bytes_of("headroom", headroom))
    count_of("batch", batch)
    has_nodes, step = count_of("nodes", nodes) > 1 or training, None
    if adapters is not None:
        if has_nodes:
            raise ValueError(
                f"adapters={adapters} can be planned only for one machine: leave nodes and training out."
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
    if has_nodes:
        gpu_sizes = {size for device, size in room.items() if device != "cpu"}
        if len(gpu_sizes) != 1:
            raise ValueError(
                f"gpus={gpus!r}: plans with nodes or training need at least one accelerator, and equal ones."
            )
        cache = (context, batch, prefill)
        return plan_nodes(source.model, sizes, nodes, len(room) - 1, gpu_sizes.pop(), training, cache)
    placement = choose(sizes, room)
    if placement is None or (not disk and "disk" in placement.weights()):
        parts = {"weights": sum(unit.weights for unit in sizes.units), "routed experts": sizes.experts}
        parts[f"a KV cache of {context} tokens in {batch} rows"] = sum(unit.cache for unit in sizes.units)
        takes = ", ".join(f"{part} {size / GB:.1f}" for part, size in parts.items())
        has = ", ".join(f"{device} {size / GB:.1f}" for device, size in room.items())
        without = f"headroom and {step.memory / GB:.1f} GB for a training step" if step else "headroom"
        raise ValueError(
            f"The model ({takes} GB) does not fit into the devices' memory without {without} ({has} GB): take more "
            "memory, fewer bits, or a smaller context."
        )
    seconds = seconds_of_step(placement, sizes.chosen, batch, bandwidths)
    if step is not None and placement.memory is not None:
        offloaded = (unit for unit, _, experts_device in placement.rows() if experts_device is not None)
        read = sum(expert_bytes(unit, sizes.chosen, step.tokens * batch) for unit in offloaded)
        # The backward pass reads experts in reverse order, so the last used ones are still cached.
        step = replace(step, expert_bytes=round(2 * read * (1 - placement.hit_share)))
    # Towers and training steps generate no tokens.
    generates = step is None and context is not None
    return PlacementPlan(
        device_map=placement.device_map(),
        experts_memory=placement.memory,
        room=room,
        weights=placement.weights(),
        cache=placement.cache(),
        experts=placement.experts(),
        remaining=placement.remaining(room),
        parts=sizes.parts,
        form=sizes.form,
        context=context,
        prefill=prefill,
        batch=batch,
        expert_bytes_per_step=round(sum(expert_bytes(unit, sizes.chosen, batch) for unit in sizes.units)),
        hit_share=placement.hit_share,
        seconds=seconds,
        tokens_per_second=batch / sum(seconds.values()) if generates else None,
        bandwidths=bandwidths,
        notes=[] if packing is None else [_how_to_quantize(packing, bool(placement.experts_device))],
        dtype=sizes.form if bits else None,
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
            f"A device has no more memory than headroom={headroom / GB:g} GB, which stays free for activations: give "
            "more memory, or a smaller headroom."
        )
    return room


def _how_to_quantize(quantization: QuantizationConfig, is_offloaded: bool) -> str:
    """Return how to get weights in the planned format; offloaded experts need a folder that is quantized already."""
    form, size = quantization.weights, quantization.group_size
    option, argument = (f" --group-size {size}", f", group_size={size}") if form == "int4" else ("", "")
    text = f"Run `llamoe quantize IN OUT --to {form}{option}`, and load OUT with these arguments"
    if not is_offloaded:
        text += f', or load IN with quantization_config=llamoe.QuantizationConfig("{form}"{argument}) added'
    return f"{text}."
