"""Fills devices one after the other with the units of a model, as accelerate does."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from accelerate.utils.modeling import clean_device_map

from ..modeling.checkpoints import owner_of
from .units import Unit


class Filled:
    """A placement of the units on devices.

    Attributes:
        device_map: names of units, or of what holds several, to devices.
        places: device of each unit.
        weights: device to bytes of weights, without experts that are offloaded.
        cache: device to bytes of keys and values.
    """

    def __init__(self, units: Sequence[Unit], places: list[Any], main: Any, apart: frozenset[str]):
        self.places = places
        grouped = clean_device_map({unit.name: at for unit, at in zip(units, places, strict=True)})
        self.device_map = {name: grouped[name] for name in (owner_of(unit.name, grouped) for unit in units)}
        weights, cache = Counter(), Counter()
        for unit, place in zip(units, places, strict=True):
            weights[place] += _bytes(unit, apart)
            # An offloaded layer runs on the first device, where its cache stays.
            if unit.cache:
                cache[main if place in ("cpu", "disk") else place] += unit.cache
        self.weights, self.cache = dict(weights), dict(cache)

    def used(self, device: Any) -> int:
        """Return the bytes of weights and cache on a device."""
        return self.weights.get(device, 0) + self.cache.get(device, 0)


def fill(
    units: Sequence[Unit],
    room: Mapping[Any, int],
    apart: frozenset[str] = frozenset(),
    reserve: int = 0,
    is_whole: bool = False,
) -> Filled | None:
    """Fill devices in order; what no device holds goes to the disk.

    Args:
        units: in the order in which they run.
        room: device to bytes; accelerators (0, 1, ...) before "cpu".
        apart: names of units whose experts are offloaded.
        reserve: bytes of each accelerator that stay free; without accelerators, of RAM.
        is_whole: whether every unit must stay on these devices. Then no bytes are kept free to copy others.

    Returns:
        None where the cache alone is more than the first device's room, or `is_whole` cannot be.
    """
    main = next(iter(room))
    room = {
        device: size - (reserve if device != "cpu" or main == "cpu" else 0) for device, size in room.items()
    }
    if is_whole:
        for leaves_room in (True, False):
            places = _places(units, room, apart, leaves_room)
            if "disk" not in places:
                return Filled(units, places, main, apart)
        return None
    # Bytes on the first device for the caches of offloaded layers.
    borrowed = 0
    while room[main] > borrowed:
        places = _places(units, {**room, main: room[main] - borrowed}, apart, leaves_room=True)
        offloaded = {"cpu", "disk"} - {main}
        needed = sum(unit.cache for unit, place in zip(units, places, strict=True) if place in offloaded)
        if needed <= borrowed:
            return Filled(units, places, main, apart)
        borrowed = needed
    return None


def _places(
    units: Sequence[Unit], room: Mapping[Any, int], apart: frozenset[str], leaves_room: bool
) -> list[Any]:
    """Return the device of each unit.

    With `leaves_room` the first device and RAM keep bytes free to copy the largest offloaded unit.
    """
    sizes = [_bytes(unit, apart) + unit.cache for unit in units]
    largest_after = [*accumulate(reversed(sizes[1:]), max, initial=0)][::-1]
    devices = iter([*room, "disk"])
    device, used = next(devices), 0
    copies_to = {device, "cpu"} if leaves_room else set()
    places: dict[str, Any] = {}
    for unit, size, largest in zip(units, sizes, largest_after, strict=True):
        if unit.tied_to:
            continue
        while device != "disk" and used + size + (largest if device in copies_to else 0) > room[device]:
            device, used = next(devices), 0
        used += size
        places[unit.name] = device
    return [places[unit.tied_to or unit.name] for unit in units]


def _bytes(unit: Unit, apart: frozenset[str]) -> int:
    return unit.weights + (0 if unit.name in apart else unit.experts)
