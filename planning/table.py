"""Format a plan as text: sizes by part and device, and the time that a token takes to read each part."""

import re
from itertools import groupby
from typing import Any

from ..configuration.sizes import GB

Rows = list[tuple[str, str]]


def lines_of(plan: Any) -> list[str]:
    """Format a `PlacementPlan` as lines of text."""
    total, count = sum(plan.weights.values()), sum(count for count, _ in plan.parts.values())
    lines = [f"the model: {count:,} parameters, {total / GB:.2f} GB in {plan.form}"]
    for part, (numbers, size) in plan.parts.items():
        bytes_per_number = size / numbers if numbers else 0
        lines.append(f"  {part:<20}{numbers:>16,} x {bytes_per_number:<5.4g} bytes = {size / GB:>8.3f} GB")
    if plan.cache:
        size = sum(plan.cache.values()) / GB
        lines.append(f"KV cache: {plan.context:,} tokens in each of {plan.batch:,} rows = {size:.3f} GB")
    lines += ["room: memory of a device without the headroom, which stays free for activations", ""]
    rows = rows_of(plan)
    width = max(len(label) for label, _ in rows)
    return lines + [f"{label:<{width}}  {text}" if label else text for label, text in rows]


def rows_of(plan: Any) -> Rows:
    """Format devices, offloading, speed and training as pairs of label and text.

    Lines of the table of devices, and sentences, have empty labels.
    """
    rows = [("", line) for line in [*_devices(plan), *_offloaded(plan)]]
    if plan.tokens_per_second is not None:
        rows += [(f"reading {name}", f"{1000 * seconds:.2f} ms") for name, seconds in plan.seconds.items()]
        rates = ", ".join(f"{name} {rate / GB:.4g}" for name, rate in vars(plan.bandwidths).items())
        speed = plan.tokens_per_second
        text = f"{speed:,.0f}" if speed >= 1000 else f"{speed:.3g}"
        text += f", if reading took all the time and all experts were equally likely (GB/s: {rates})"
        rows.append(("tokens a second", text))
    return rows + (_training(plan.training) if plan.training else [])


def _devices(plan: Any) -> list[str]:
    """Format a table of the devices in GB."""
    lines = [f"{'device':<8}{'weights':>10}{'cache':>10}{'together':>10}{'room':>10}   modules (sizes in GB)"]
    for device in [*plan.room, *(["disk"] if plan.weights.get("disk") else [])]:
        weights, cache = plan.weights.get(device, 0), plan.cache.get(device, 0)
        limit = f"{plan.room[device] / GB:.2f}" if device in plan.room else "-"
        numbers = "".join(f"{size / GB:>10.2f}" for size in (weights, cache, weights + cache))
        rest = "everything else" if len(plan.device_map) > 1 else "the whole model"
        names = [name or rest for name, at in plan.device_map.items() if at == device]
        lines.append(f"{device!s:<8}{numbers}{limit:>10}   {summarize(names) or 'nothing'}")
    return lines


def _offloaded(plan: Any) -> list[str]:
    """Describe offloaded experts and layers in sentences, then list the plan's notes."""
    lines, main, offloaded = [], next(iter(plan.room)), 0
    if plan.experts_memory is not None:
        place = "disk" if plan.experts.get("disk") else "cpu"
        where, memory = {
            "disk": ("on disk", "of RAM"),
            "cpu": ("in RAM", "of each accelerator that has their layers"),
        }[place]
        offloaded = plan.experts[place]
        lines.append(
            f"{offloaded / GB:.2f} GB of routed experts are {where}. experts_memory={plan.experts_memory} bytes "
            f"{memory} cache {plan.hit_share:.1%} of them. A decoding step reads "
            f"{plan.expert_bytes_per_step / GB:.2f} GB of experts, from all devices together."
        )
    outside = sum(plan.weights.get(place, 0) for place in ("cpu", "disk") if place != main) - offloaded
    if outside > 0:
        refused = ", and bitsandbytes refuses that" if plan.form.startswith("bitsandbytes") else ""
        where = "on no accelerator" if main != "cpu" else "on disk"
        lines.append(
            f"{outside / GB:.2f} GB are {where}: every forward pass copies them to device {main}{refused}."
        )
    return lines + plan.notes


def _training(step: Any) -> Rows:
    """Format the memory of a training step as pairs of label and text."""

    def gb(size: int) -> str:
        return f"{size / GB:.2f} GB"

    what = "attention, feed-forwards and routed experts" if step.experts else "attention and feed-forwards"
    adapters = f"rank {step.rank} on {what}: {step.trained:,} numbers, {gb(step.adapters)}"
    activations = (
        f"{gb(step.activations)} for {step.batch:,} rows of {step.tokens:,} tokens with gradient checkpointing, "
        f"{gb(step.activations_without_checkpointing)} without"
    )
    rows = [
        ("adapters", adapters),
        ("their gradients", gb(step.gradients)),
        ("AdamW", f'{gb(step.optimizer)}, or a quarter of it with optim="adamw_bnb_8bit"'),
        ("activations", activations),
        ("loss", f"{gb(step.loss)} with skip_logits, including the activations that are kept meanwhile"),
    ]
    if step.unpacked:
        rows.append(("unpacked matrix", f"{gb(step.unpacked)} while a quantized matrix is multiplied"))
    rows.append(
        ("training takes", f"{gb(step.memory)} beside weights and cached experts; the plan keeps it free")
    )
    if step.expert_bytes:
        read = f"{gb(step.expert_bytes)} are read from disk or RAM in the forward and backward passes"
        rows.append(("offloaded experts", read))
    return rows


def summarize(names: list[str]) -> str:
    """Join names that differ only in a number: `l.0`, `l.1`, `l.2` and `l.4` become `l.0-2,4`."""
    pieces = []
    # If a name has several numbers, only the last one may differ.
    parts = [re.fullmatch(r"(.+\.)(\d+)(\..*|)", name) or re.fullmatch(r"(.*)()()", name) for name in names]
    for (stem, end), group in groupby(parts, lambda match: (match[1], match[3])):
        numbers = [int(match[2]) for match in group if match[2]]
        # In a run of consecutive numbers, each number minus its index in the list is the same.
        runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
        ends = [[number for _, number in run] for _, run in runs]
        pieces.append(
            stem + ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in ends) + end
        )
    return ", ".join(pieces)
