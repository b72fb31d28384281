"""Estimated seconds of one decoding step, from the bytes that it reads and from bandwidths.

What is counted is reading: each weight that a token needs once, keys and values once, chosen experts from where they
are. Products, launches and the system take more time than that. Hits follow from experts that are all equally likely;
routers that favour some have more, and a memory smaller than what one token needs of all layers may have none.
"""

from collections import Counter

from .bandwidths import Bandwidths
from .filling import Placement
from .units import Unit


def distinct_experts(num_experts: int, chosen: int, rows: int) -> float:
    """Return the expected number of distinct experts that these rows choose, if all are equally likely."""
    return num_experts * (1 - (1 - chosen / num_experts) ** rows) if num_experts else 0.0


def bytes_of_step(unit: Unit, chosen: int, rows: int) -> float:
    """Return the bytes of routed experts that one step reads in a unit."""
    return unit.one_expert * distinct_experts(unit.num_experts, chosen, rows)


def seconds_of_step(
    placement: Placement, chosen: int, rows: int, hit_share: float, bandwidths: Bandwidths
) -> dict[str, float]:
    """Estimate the seconds of one decoding step, by cause; causes of no bytes are left out.

    Args:
        placement: of the model.
        chosen: experts of a token in each mixture.
        rows: sequences that are generated at once.
        hit_share: share of offloaded experts that are held by their `experts_memory`.
        bandwidths: bytes a second.
    """
    b, main = bandwidths, placement.main
    home = b.ram if main == "cpu" else b.gpu
    seconds: Counter[str] = Counter()
    for unit, device, place in placement.rows():
        weights = unit.weights if unit.is_read else 0
        routed = bytes_of_step(unit, chosen, rows)
        missed = routed * (1 - hit_share)
        if device in ("cpu", "disk") and device != main:
            # accelerate copies a whole layer, with all experts that it has.
            copied = weights + (0 if place else unit.experts)
            seconds["layers from the drive"] += copied / b.drive if device == "disk" else 0
            seconds["layers over the link"] += copied / b.link if main != "cpu" else 0
        seconds["weights where they are computed"] += weights / home
        seconds["keys and values"] += unit.cache / home
        if place is None:
            seconds["experts where they are computed"] += routed / home
        elif place == "cpu":
            seconds["experts held by the accelerator"] += routed * hit_share / home
            # The few rows of a step are computed there.
            seconds["experts from RAM"] += missed / b.ram
        else:
            seconds["experts from the drive"] += missed / b.drive
            seconds["experts from RAM"] += routed / b.ram
    return {cause: time for cause, time in seconds.items() if time}
