"""Placement of a model on one machine: accelerators first, then routed experts and layers in RAM or on disk."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..configuration import LlamoeVisionConfig, QuantizationConfig, cache_bytes, cache_tokens
from ..configuration.base import LlamoeBaseConfig
from ..configuration.memory import default_context
from ..configuration.quantization import as_quantization
from ..configuration.sizes import GB, bytes_of, count_of
from ..modeling.checkpoints import device_of
from .bandwidths import Bandwidths
from .filling import Filled, fill
from .nodes import NodesPlan, plan_nodes
from .source import Source, read_source
from .speed import bytes_of_step, seconds_of_step
from .table import lines_of
from .training import DEFAULT_TOKENS, TrainingPlan, expert_bytes_of_step, training_sizes
from .units import Sizes, sizes_of


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
        cached: tokens that each layer's cache holds.
        cached_token: key/value heads, their size, and bytes of a number; a layer's cache has two such for each token.
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
    cached: list[int] = field(repr=False)
    cached_token: tuple[int, int, int] | None = field(repr=False)
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

    def place_of(self, name: str) -> Any:
        """Return the device of a parameter.

        Raises:
            ValueError: the model has no such part.
        """
        if ".experts." in name and "experts" in self.device_map:
            return self.device_map["experts"]
        if (device := device_of(name, self.device_map)) is None:
            raise ValueError(f"{name}: the plan has no such parameter.")
        return device

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
    bandwidths: Bandwidths | Mapping[str, float | str] | None = None,
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
        prefill: tokens of the prompt in one pass; by default all.
        headroom: of each device, kept free for what a pass computes with.
        bandwidths: of `measure_bandwidths()`, or some of its fields; by default assumptions.
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
    source = read_source(model)
    config, sizes = source.config, sizes_of(source, bits, as_quantization(quantization))
    room = _room(gpus, gpu_memory, ram, bytes_of("headroom", headroom))
    count_of("batch", batch)
    count_of("nodes", nodes)
    if not isinstance(bandwidths, Bandwidths):
        bandwidths = Bandwidths(**(bandwidths or {}))
    step = None
    if adapters is not None:
        if nodes > 1 or training:
            raise ValueError(f"adapters={adapters}: is planned on one machine; leave nodes and training out.")
        context = DEFAULT_TOKENS if context is None else count_of("context", context)
        rank, on_cpu = count_of("adapters", adapters), set(room) <= {"cpu"}
        step = training_sizes(source.model, sizes, rank, adapt_experts, context, batch, on_cpu)
        room = _memory_beside_training(room, step.memory)
    cached, token = [], None
    if step is not None:
        prefill = None
    elif isinstance(config, LlamoeVisionConfig):
        context = prefill = None
    else:
        if context is None:
            context = default_context(config)
        prefill = count_of("context", context) if prefill is None else count_of("prefill", prefill)
        if prefill > count_of("context", context):
            raise ValueError(f"prefill={prefill}: give at most the tokens of context={context}.")
        cached, text = cache_tokens(config, context, prefill), config.get_text_config()
        token = text.num_key_value_heads, text.head_dim, sizes.element_size
        per_layer = cache_bytes(config, context, batch, sizes.element_size, prefill)
        sizes = sizes.with_cache(per_layer)
    if nodes > 1 or training:
        gpu_sizes = {size for device, size in room.items() if device != "cpu"}
        if len(gpu_sizes) != 1:
            raise ValueError(
                f"gpus={gpus!r}: nodes and training are planned for equal accelerators, at least one."
            )
        cache = (context, batch, prefill)
        return plan_nodes(config, sizes, nodes, len(room) - 1, gpu_sizes.pop(), training, cache)
    choice = _choose(sizes, room, disk)
    if choice is None:
        raise ValueError(_no_place(sizes, room, disk, context, batch))
    cache = dict(context=context, prefill=prefill, batch=batch, cached=cached, cached_token=token)
    plan = _finish(sizes, room, choice, bandwidths, cache, bits, as_quantization(quantization))
    if step is None:
        return plan
    if plan.experts_memory is not None:
        offloaded = plan.experts["disk" if plan.experts.get("disk") else "cpu"]
        read = expert_bytes_of_step(config, context, batch, offloaded, plan.hit_share)
        step = replace(step, expert_bytes=read)
    # No token is generated.
    return replace(plan, training=step, context=context, tokens_per_second=None)


def _memory_beside_training(room: dict[Any, int], training: int) -> dict[Any, int]:
    """Return the bytes of each device for weights, less what a training step takes on those that compute."""
    gpus = [device for device in room if device != "cpu"] or ["cpu"]
    left = {device: size - training if device in gpus else size for device, size in room.items()}
    if min(left[device] for device in gpus) <= 0:
        raise ValueError(
            f"a step of training takes {training / GB:.2f} GB beside the weights, and device {gpus[0]} has "
            f"{room[gpus[0]] / GB:.2f} GB: take a lower rank, fewer tokens (context) or rows (batch), or more memory."
        )
    return left


def _room(gpus: Any, gpu_memory: Any, ram: Any, headroom: int) -> dict[Any, int]:
    """Return the bytes of each device for weights and cache, the computing device first."""
    if gpus is None or ram is None:
        from accelerate.utils import get_max_memory

        here = get_max_memory()
    if gpus is None:
        sizes = [size for device, size in here.items() if device != "cpu"]
    elif isinstance(gpus, (int, float)):
        sizes = [bytes_of("gpu_memory", gpu_memory)] * count_of("gpus", gpus, least=0)
    else:
        sizes = [bytes_of("gpus", size) for size in gpus]
    memory = here["cpu"] if ram is None else bytes_of("ram", ram)
    for device, size in enumerate(sizes) if sizes else [("cpu", memory)]:
        if size <= headroom:
            raise ValueError(
                f"device {device} of {size / GB:g} GB has no room beside headroom={headroom / GB:g} GB, which is kept "
                "free for what a pass computes with: give more memory, or a smaller headroom."
            )
    room: dict[Any, int] = {device: size - headroom for device, size in enumerate(sizes)}
    return {**room, "cpu": max(0, memory - headroom)}


@dataclass(frozen=True)
class _Choice:
    """A placement of all units and of the offloaded experts.

    Attributes:
        filled: placement of the units.
        apart: names of units whose experts are offloaded.
        place: location of the offloaded experts: "cpu" or "disk"; None if no expert is offloaded.
        memory: bytes of the cache of recently used experts; None if no expert is offloaded.
    """

    filled: Filled
    apart: frozenset[str] = frozenset()
    place: str | None = None
    memory: int | None = None


def _choose(sizes: Sizes, room: dict[Any, int], disk: bool) -> _Choice | None:
    """Choose the first placement that fits: all on the devices, experts offloaded, layers offloaded; else None."""
    units, main = sizes.units, next(iter(room))
    devices = {device: size for device, size in room.items() if device == main or device != "cpu"}
    if filled := fill(units, devices, is_whole=True):
        return _Choice(filled)
    mixtures = [unit for unit in units if unit.experts and sizes.may_leave]
    # With accelerators, offload the experts of as few layers as possible. Without, offload the experts of all layers: a
    # cache of recently used experts has at least as many hits as fixed layers of the same size.
    for kept in range(len(mixtures) - 1, -1, -1) if main != "cpu" else [0] if disk and mixtures else []:
        leaving = mixtures[kept:]
        apart = frozenset(unit.name for unit in leaving)
        filled = fill(units, devices, apart, reserve=sizes.least, is_whole=True)
        if filled is None:
            continue
        size = sum(unit.experts for unit in leaving)
        if main == "cpu":
            return _Choice(filled, apart, "disk", min(size, room["cpu"] - filled.used("cpu")))
        if size <= room["cpu"]:
            rows = {place for unit, place in zip(units, filled.places, strict=True) if unit.name in apart}
            left = min(room[device] - filled.used(device) for device in rows)
            return _Choice(filled, apart, "cpu", min(size, left))
        if disk and room["cpu"] >= sizes.least:
            return _Choice(filled, apart, "disk", min(size, room["cpu"]))
        break
    return _offload_layers(sizes, room, disk)


def _offload_layers(sizes: Sizes, room: dict[Any, int], disk: bool) -> _Choice | None:
    """Choose a placement with layers in RAM or on disk; None if none fits."""
    units, main = sizes.units, next(iter(room))
    apart = frozenset(unit.name for unit in units if unit.experts and sizes.may_leave)
    places: list[str | None] = [None] if not apart else ["disk"] if main == "cpu" else ["cpu", "disk"]
    for place in places:
        limits = dict(room)
        if main != "cpu":
            limits["cpu"] -= {None: 0, "cpu": sizes.experts, "disk": sizes.least}[place]
        if limits["cpu"] < 0 or (place == "disk" and not disk):
            continue
        filled = fill(units, limits, apart, reserve=sizes.least)
        # Experts on disk cost less than layers there.
        if filled is None or ("disk" in filled.weights and (place == "cpu" or not disk or sizes.is_packed)):
            continue
        if place is None:
            return _Choice(filled)
        left = room["cpu"] - filled.used("cpu")
        return _Choice(filled, apart, place, sizes.least if place == "cpu" else min(sizes.experts, left))
    return None


def _no_place(sizes: Sizes, room: dict[Any, int], disk: bool, context: int | None, batch: int) -> str:
    main = next(iter(room))
    if sizes.cache + sizes.least >= room[main]:
        more = f", one expert {sizes.least / GB:.3g} GB" if sizes.least else ""
        return (
            f"the cache of {context} tokens in {batch} rows takes {sizes.cache / GB:.1f} GB{more}, and "
            f"device {main} has {room[main] / GB:.1f}: take more or larger devices, or a smaller context"
        )
    rooms = ", ".join(f"{device} {size / GB:.1f}" for device, size in room.items())
    hint = "more memory, fewer bits" + ("" if disk else ", or disk=True")
    experts = f" and routed experts {sizes.experts / GB:.1f} GB" if sizes.experts else ""
    return (
        f"the weights take {sizes.weights / GB:.1f} GB{experts} beside "
        f"{sizes.cache / GB:.1f} GB of cache, and the devices have room for {rooms} GB: take {hint}"
    )


def _finish(
    sizes: Sizes,
    room: dict[Any, int],
    choice: _Choice,
    bandwidths: Bandwidths,
    cache: dict[str, Any],
    bits: int | None,
    quantization: QuantizationConfig | None,
) -> PlacementPlan:
    main, filled, place, memory = next(iter(room)), choice.filled, choice.place, choice.memory
    device_map, weights = dict(filled.device_map), dict(filled.weights)
    # Units, their devices, and where their experts are if these are offloaded.
    placed = [
        (unit, own, place if unit.name in choice.apart else None)
        for unit, own in zip(sizes.units, filled.places, strict=True)
    ]
    leaving = [(unit, own) for unit, own, offloaded in placed if offloaded is not None]
    experts: Counter[Any] = Counter()
    for unit, own, offloaded in placed:
        if unit.experts:
            experts[own if offloaded is None else offloaded] += unit.experts
    away = sum(unit.experts for unit, _ in leaving)
    if leaving:
        weights[place] = weights.get(place, 0) + away
        is_all = away == sizes.experts
        device_map |= {"experts": place} if is_all else {unit.experts_name: place for unit, _ in leaving}
    remaining = {d: size - weights.get(d, 0) - filled.cache.get(d, 0) for d, size in room.items()}
    hit_share = 0.0
    if memory is not None:
        # Each accelerator that has layers of such experts holds some of its own.
        holders = (
            {"cpu"} if place == "disk" else {main if own in ("cpu", "disk") else own for _, own in leaving}
        )
        for holder in holders:
            remaining[holder] -= memory
        hit_share = min(1.0, len(holders) * memory / away)
    batch = cache["batch"]
    seconds = seconds_of_step(placed, main, sizes.chosen, batch, hit_share, bandwidths)
    notes = []
    if quantization is not None:
        size, default = quantization.group_size, QuantizationConfig(quantization.weights).group_size
        group, argument = (f" --group-size {size}", f", group_size={size}") if size != default else ("", "")
        notes.append(
            f"Run `llamoe quantize IN OUT --to {quantization.weights}{group}`, and load OUT with these arguments"
            + (
                "."
                if place is not None
                else ", or load IN with these and "
                f'quantization_config=llamoe.QuantizationConfig("{quantization.weights}"{argument}).'
            )
        )
    if bits in (4, 8):
        notes.append(
            f"Offloaded experts are read as files have them: run `llamoe quantize IN OUT --to int{bits}`, "
            "and plan OUT, whose files say the sizes."
            if place is not None
            else f"bitsandbytes stores weights so: add quantization_config=BitsAndBytesConfig(load_in_{bits}bit=True) "
            "to the arguments of from_pretrained."
        )
    return PlacementPlan(
        device_map=device_map,
        experts_memory=memory,
        room=room,
        weights=weights,
        cache=filled.cache,
        experts=dict(experts),
        remaining=remaining,
        parts=sizes.parts,
        form=sizes.form,
        **cache,
        expert_bytes_per_step=round(bytes_of_step(sizes.units, sizes.chosen, batch)),
        hit_share=hit_share,
        seconds=seconds,
        tokens_per_second=None if cache["context"] is None else batch / sum(seconds.values()),
        bandwidths=bandwidths,
        notes=notes,
        dtype=sizes.form if bits in (16, 32) else None,
    )
