"""Estimate the seconds of one decoding step from the bytes that it reads and from bandwidths.

Only reads are counted: the weights, keys and values once, and each chosen expert from the device that holds it. A real
step takes longer, because it also computes and launches kernels. All experts are assumed to be equally likely. A router
that prefers some experts has more cache hits; a cache that is smaller than one token's experts of all layers may have
none.
"""

from collections import Counter

from .bandwidths import Bandwidths
from .filling import Placement
from .units import Unit


def expert_bytes(unit: Unit, chosen: int, rows: int) -> float:
    """Return the expected bytes of a unit's routed experts that one step of `rows` tokens reads.

    Each token chooses `chosen` experts, all equally likely; an expert that several tokens choose is read once.
    """
    count = unit.num_experts
    return unit.one_expert * count * (1 - (1 - chosen / count) ** rows) if count else 0.0


def seconds_of_step(placement: Placement, chosen: int, rows: int, bandwidths: Bandwidths) -> dict[str, float]:
    """Estimate the seconds of one decoding step by what is read; entries of zero are left out.

    Args:
        placement: placement of the model.
        chosen: number of experts of a token in each mixture.
        rows: number of sequences that are generated at once.
        bandwidths: bandwidths in bytes per second.
    """
    b, main, hit_share = bandwidths, placement.main, placement.hit_share
    home = b.ram if main == "cpu" else b.gpu
    seconds: Counter[str] = Counter()
    for unit, device, experts_device in placement.rows():
        weights = unit.weights if unit.is_read else 0
        routed = expert_bytes(unit, chosen, rows)
        missed = routed * (1 - hit_share)
        if device in ("cpu", "disk") and device != main:
            # accelerate copies an offloaded layer in each step, with all its experts.
            copied = weights + (0 if experts_device else unit.experts)
            seconds["layers from the drive"] += copied / b.drive if device == "disk" else 0
            seconds["layers over the link"] += copied / b.link if main != "cpu" else 0
        seconds["weights"] += weights / home
        seconds["keys and values"] += unit.cache / home
        if experts_device is None:
            seconds["experts"] += routed / home
        elif experts_device == "cpu":
            seconds["cached experts"] += routed * hit_share / home
            # The CPU computes the experts of the few tokens of a step, and reads them from its own memory.
            seconds["experts from RAM"] += missed / b.ram
        else:
            seconds["experts from the drive"] += missed / b.drive
            seconds["experts from RAM"] += routed / b.ram
    return {name: time for name, time in seconds.items() if time}
