"""A plan as text: its sizes by part and by device, and what a token waits for."""

import re
from typing import Any

from ..configuration.sizes import GB

_NOTE = (
    "{0}: linear layers and routed experts, as bitsandbytes stores them. Embeddings, routers, norms, the head and the "
    "tower's patch embedding stay in bfloat16."
)
_IN_FEW_BITS = ("int8", "int4")


def note_of_bits(*forms: str) -> str:
    """Describe which weights are quantized in the forms "int8" or "int4"."""
    return _NOTE.format(" and ".join(forms))


def lines_of(plan: Any) -> list[str]:
    """Format a `PlacementPlan` as lines of text."""
    total, count = sum(plan.weights.values()), sum(count for count, _ in plan.parts.values())
    lines = [f"the model: {count:,} parameters, {total / GB:.2f} GB in {plan.form}"]
    for part, (numbers, size) in plan.parts.items():
        bytes_per_number = size / numbers if numbers else 0
        lines.append(f"  {part:<20}{numbers:>16,} x {bytes_per_number:<5.4g} bytes = {size / GB:>8.3f} GB")
    if plan.form in _IN_FEW_BITS:
        lines.append(note_of_bits(plan.form))
    if plan.cached:
        heads, head_dim, size = plan.cached_token
        held = ", ".join(
            f"{plan.cached.count(n)} layers x {n:,} tokens" for n in sorted(set(plan.cached), reverse=True)
        )
        lines.append(
            f"cache: ({held}) x 2 x {heads} heads x {head_dim} x {size} bytes x {plan.batch} rows = "
            f"{sum(plan.cache.values()) / GB:.3f} GB"
        )
    lines += ["room: a device's memory less the headroom, for what a pass computes with", ""]
    lines += lines_of_devices(plan)
    experts, speed = lines_of_experts(plan), rows_of_speed(plan)
    lines += ["", *experts] if experts else []
    speed += rows_of_training(plan)
    width = max((len(label) for label, _ in speed), default=0)
    return lines + (["", *(f"{label:<{width}}  {text}" for label, text in speed)] if speed else [])


def lines_of_devices(plan: Any, holds: str = "holds") -> list[str]:
    """Format a table of the devices in GB; `holds` is the title of the column of their units."""
    lines = [f"{'device':<8}{'weights':>10}{'cache':>10}{'together':>10}{'room':>10}   {holds}"]
    for device in [*(device for device in plan.room if device != "cpu"), "cpu", "disk"]:
        weights, cache = plan.weights.get(device, 0), plan.cache.get(device, 0)
        if device == "disk" and not weights:
            continue
        limit = f"{plan.room[device] / GB:.2f}" if device in plan.room else "-"
        numbers = "".join(f"{size / GB:>10.2f}" for size in (weights, cache, weights + cache))
        lines.append(f"{device!s:<8}{numbers}{limit:>10}   {_holds(plan.device_map, device)}")
    return lines


def rows_of_speed(plan: Any) -> list[tuple[str, str]]:
    """Format the time of a decoding step by cause, in milliseconds, and the tokens per second."""
    if plan.tokens_per_second is None:
        return []
    rows = [(what, f"{1000 * seconds:.2f} ms") for what, seconds in plan.seconds.items()]
    rates = ", ".join(f"{name} {rate / GB:.4g}" for name, rate in vars(plan.bandwidths).items())
    speed = plan.tokens_per_second
    speed = f"{speed:,.0f}" if speed >= 1000 else f"{speed:.3g}"
    return [
        *rows,
        (
            "tokens a second",
            f"{speed} by reading alone, if all experts are chosen equally often (GB/s: {rates})",
        ),
    ]


def rows_of_training(plan: Any) -> list[tuple[str, str]]:
    """Format the bytes of a training step; empty if the plan has none."""
    step = plan.training
    if step is None:
        return []

    def size(number: float) -> str:
        return f"{number / GB:.2f} GB"

    what = "attention, feed-forwards and routed experts" if step.experts else "attention and feed-forwards"
    rows = [
        ("adapters", f"rank {step.rank} on {what}: {step.trained:,} numbers, {size(step.adapters)}"),
        ("their gradients", size(step.gradients)),
        ("AdamW", f'{size(step.optimizer)}, or {size(step.optimizer_in_8_bits)} with optim="adamw_bnb_8bit"'),
        (
            "activations",
            f"{size(step.activations)} of {step.batch:,} rows of {step.tokens:,} tokens with gradient checkpointing, "
            f"{size(step.activations_without_checkpointing)} without",
        ),
        (
            "loss",
            f"{size(step.loss)} with skip_logits, {size(step.loss_with_logits)} without, activations among it",
        ),
    ]
    if step.unpacked:
        rows.append(("a packed matrix", f"{size(step.unpacked)} while it is multiplied"))
    rows.append(
        (
            "training takes",
            f"{size(step.memory)} beside weights and experts_memory, which the plan keeps free",
        )
    )
    if step.expert_bytes:
        rows.append(("experts of a step", f"{size(step.expert_bytes)} are read, forwards and backwards"))
    return rows


def lines_of_experts(plan: Any) -> list[str]:
    """Describe the weights that are not on the device that computes with them."""
    rows = []
    main = next(iter(plan.room))
    if plan.experts_memory is not None:
        place = "disk" if plan.experts.get("disk") else "cpu"
        where = "RAM" if place == "disk" else "each accelerator that has their layers"
        said = "on disk" if place == "disk" else "in RAM"
        rows.append(
            f"{plan.experts[place] / GB:.2f} GB of routed experts are {said}, and "
            f"experts_memory={plan.experts_memory} bytes of {where} hold {plan.hit_share:.1%} of them; a decoding "
            f"step reads {plan.expert_bytes_per_step / GB:.2f} GB of experts in all."
        )
    offloaded = 0 if plan.experts_memory is None else plan.experts.get("disk", plan.experts.get("cpu", 0))
    outside = sum(plan.weights.get(place, 0) for place in ("cpu", "disk") if place != main) - offloaded
    if outside > 0:
        refused = ", and bitsandbytes refuses that" if plan.form in _IN_FEW_BITS and main != "cpu" else ""
        where = "on no accelerator" if main != "cpu" else "on disk"
        rows.append(f"{outside / GB:.2f} GB are {where}: every pass moves them to device {main}{refused}.")
    return rows + list(plan.notes)


def _holds(device_map: dict[str, Any], device: Any) -> str:
    held = [name for name, place in device_map.items() if place == device and name]
    if device_map.get("") == device:
        return "the whole model" if len(device_map) == 1 else "everything else"
    return summarize(held) or "nothing"


def summarize(names: list[str]) -> str:
    """Shorten runs of names: `layers.0`, `layers.1`, `layers.2` become `layers.0-2`."""
    runs: list[tuple[str, str, list[int]]] = []
    for name in names:
        # Of several numbers the last one counts.
        match = re.fullmatch(r"(.+)\.(\d+)(\..*|)", name)
        stem, number, end = match.groups() if match else (name, None, "")
        if number is None:
            runs.append((stem, "", []))
        elif runs and runs[-1][:2] == (stem, end) and runs[-1][2] and runs[-1][2][-1] < int(number):
            runs[-1][2].append(int(number))
        else:
            runs.append((stem, end, [int(number)]))
    return ", ".join(_run(*run) for run in runs)


def _run(stem: str, end: str, numbers: list[int]) -> str:
    if not numbers:
        return stem
    first, last, step = numbers[0], numbers[-1], (numbers[1] - numbers[0] if len(numbers) > 1 else 1)
    if numbers != list(range(first, last + 1, step)):
        return f"{stem}.{','.join(map(str, numbers))}{end}"
    run = f"{first}-{last}" if first < last else str(first)
    return f"{stem}.{run}{end}" + (f" (every {step}.)" if step > 1 else "")
