"""Estimate the seconds of one decoding step from the bytes that it reads and from bandwidths.

Only reads are counted: weights, keys and values once, chosen experts from the device that holds them. A real step takes
longer, for computing and launching kernels. The hit rate assumes that all experts are equally likely: routers that
prefer some have more hits, and a cache too small for one token's experts of all layers may have none.
"""

from collections import Counter

from .bandwidths import Bandwidths
from .filling import Placement
from .units import Unit


def distinct_experts(num_experts: int, chosen: int, rows: int) -> float:
    """Return the expected number of distinct experts that `rows` tokens choose, if all are equally likely."""
    return num_experts * (1 - (1 - chosen / num_experts) ** rows) if num_experts else 0.0


def bytes_of_step(unit: Unit, chosen: int, rows: int) -> float:
    """Return the bytes of a unit's routed experts that one decoding step of `rows` tokens reads."""
    return unit.one_expert * distinct_experts(unit.num_experts, chosen, rows)


def seconds_of_step(
    placement: Placement, chosen: int, rows: int, hit_share: float, bandwidths: Bandwidths
) -> dict[str, float]:
    """Estimate the seconds of one decoding step, by cause; causes that read nothing are left out.

    Args:
        placement: placement of the model.
        chosen: number of experts of a token in each mixture.
        rows: number of sequences that are generated at once.
        hit_share: hit rate of the cache of offloaded experts.
        bandwidths: bandwidths in bytes per second.
    """
    b, main = bandwidths, placement.main
    home = b.ram if main == "cpu" else b.gpu
    seconds: Counter[str] = Counter()
    for unit, device, place in placement.rows():
        weights = unit.weights if unit.is_read else 0
        routed = bytes_of_step(unit, chosen, rows)
        missed = routed * (1 - hit_share)
        if device in ("cpu", "disk") and device != main:
            # accelerate copies a whole offloaded layer, with all its experts, in each step.
            copied = weights + (0 if place else unit.experts)
            seconds["layers from the drive"] += copied / b.drive if device == "disk" else 0
            seconds["layers over the link"] += copied / b.link if main != "cpu" else 0
        seconds["weights where they are computed"] += weights / home
        seconds["keys and values"] += unit.cache / home
        if place is None:
            seconds["experts where they are computed"] += routed / home
        elif place == "cpu":
            seconds["experts held by the accelerator"] += routed * hit_share / home
            # The CPU computes the few tokens of a step, so experts are read from its memory.
            seconds["experts from RAM"] += missed / b.ram
        else:
            seconds["experts from the drive"] += missed / b.drive
            seconds["experts from RAM"] += routed / b.ram
    return {cause: time for cause, time in seconds.items() if time}
