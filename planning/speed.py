"""Estimated seconds of one decoding step, from the bytes that it reads and from bandwidths.

What is counted is reading: each weight that a token needs once, keys and values once, chosen experts from where they
are. Products, launches and the system take more time than that. Hits follow from experts that are all equally likely;
routers that favour some have more, and a memory smaller than what one token needs of all layers may have none.
"""

from collections.abc import Iterable

from .bandwidths import Bandwidths
from .units import Unit


def distinct_experts(num_experts: int, chosen: int, rows: int) -> float:
    """Return the expected number of distinct experts that these rows choose, if all are equally likely."""
    return num_experts * (1 - (1 - chosen / num_experts) ** rows) if num_experts else 0.0


def bytes_of_step(units: Iterable[Unit], chosen: int, rows: int) -> float:
    """Return the bytes of routed experts that one step reads in these units."""
    return sum(
        unit.one_expert * distinct_experts(unit.num_experts, chosen, rows)
        for unit in units
        if unit.num_experts
    )


def seconds_of_step(
    placed: Iterable[tuple[Unit, object, str | None]],
    main: object,
    chosen: int,
    rows: int,
    hit_share: float,
    bandwidths: Bandwidths,
) -> dict[str, float]:
    """Estimate the seconds of one decoding step, by cause; causes of no bytes are left out.

    Args:
        placed: units, the device of each, and where its experts are: "cpu", "disk", or None for the unit's device.
        main: the first device, to which offloaded units are copied.
        chosen: experts of a token in each mixture.
        rows: sequences that are generated at once.
        hit_share: share of offloaded experts that are held by their `experts_memory`.
        bandwidths: bytes a second.
    """
    b = bandwidths
    seconds: dict[str, float] = {}

    def add(what: str, size: float, rate: float) -> None:
        if size:
            seconds[what] = seconds.get(what, 0.0) + size / rate

    home = b.ram if main == "cpu" else b.gpu
    for unit, place, offloaded in placed:
        weights = unit.weights if unit.is_read else 0
        routed = bytes_of_step([unit], chosen, rows)
        if place in ("cpu", "disk") and place != main:
            # accelerate copies a whole layer, with all experts that it has.
            copied = weights + (0 if offloaded else unit.experts)
            if place == "disk":
                add("layers from the drive", copied, b.drive)
            if main != "cpu":
                add("layers over the link", copied, b.link)
        add("weights where they are computed", weights, home)
        add("keys and values", unit.cache, home)
        if offloaded is None:
            add("experts where they are computed", routed, home)
        elif offloaded == "cpu":
            add("experts held by the accelerator", routed * hit_share, home)
            # The few rows of a step are computed there.
            add("experts from RAM", routed * (1 - hit_share), b.ram)
        else:
            add("experts from the drive", routed * (1 - hit_share), b.drive)
            add("experts from RAM", routed, b.ram)
    return seconds
