"""Devices are filled one after the other with the units of a model, as accelerate does."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import infer_auto_device_map
from torch import nn

from ..modeling.checkpoints import device_of, owner_of
from .units import Unit


class Filled:
    """Which unit is on which device.

    Attributes:
        device_map: names of units, or of what holds several, to devices.
        places: device of each unit.
        weights: device to bytes of weights, without experts that are offloaded.
        cache: device to bytes of keys and values.
    """

    def __init__(self, units: Sequence[Unit], device_map: dict[str, Any], main: Any, apart: frozenset[str]):
        self.device_map = device_map
        self.places = [device_of(unit.tied_to or unit.name, device_map) for unit in units]
        self.weights: dict[Any, int] = {}
        self.cache: dict[Any, int] = {}
        for unit, place in zip(units, self.places, strict=True):
            self.weights[place] = self.weights.get(place, 0) + _bytes(unit, apart)
            # A layer that is brought to the first device for each pass has its cache there.
            at = main if place in ("cpu", "disk") else place
            if unit.cache:
                self.cache[at] = self.cache.get(at, 0) + unit.cache

    def used(self, device: Any) -> int:
        """Bytes on a device."""
        return self.weights.get(device, 0) + self.cache.get(device, 0)

    def is_within(self, room: Mapping[Any, int]) -> bool:
        """Whether no device has more than its room, and none without room has anything."""
        return all(self.used(device) <= room.get(device, 0) for device in {*self.weights, *self.cache})


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
        is_whole: whether every unit must stay on these devices. Then no room is left to bring others.

    Returns:
        None where the cache alone is more than the first device's room, or `is_whole` cannot be.
    """
    main = next(iter(room))
    room = {
        device: size - (reserve if device != "cpu" or main == "cpu" else 0) for device, size in room.items()
    }
    total = sum(_bytes(unit, apart) + unit.cache for unit in units)
    if is_whole and total > sum(max(0, size) for size in room.values()):
        # No order of filling helps, and trying takes tenths of a second.
        return None
    skeleton = _skeleton(units, apart)
    largest = max(_bytes(unit, apart) + unit.cache for unit in units)
    # accelerate leaves room on the first device for the largest unit, which is for nothing where none is brought.
    for spare in (0, largest) if is_whole else (0,):
        # Bytes of cache for layers that are brought to the first device only when they run.
        borrowed = 0
        while True:
            limits = {**room, main: room[main] - borrowed + spare}
            if limits[main] <= 0:
                break
            with _silence():
                device_map = dict(infer_auto_device_map(skeleton, limits, no_split_module_classes=["_Leaf"]))
            for unit in units:
                if unit.tied_to:
                    _set_apart(device_map, units, unit.name, device_of(unit.tied_to, device_map))
            filled = Filled(units, device_map, main, apart)
            offloaded = {"cpu", "disk"} - {main}
            needed = sum(
                unit.cache for unit, place in zip(units, filled.places, strict=True) if place in offloaded
            )
            if needed > borrowed:
                borrowed = needed
                continue
            if is_whole and not filled.is_within(room):
                break
            return filled
    return None


@contextmanager
def _silence() -> Iterator[None]:
    """Without accelerate's warnings that planned devices are missing on this machine."""
    logger = logging.getLogger("accelerate")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _bytes(unit: Unit, apart: frozenset[str]) -> int:
    return unit.weights + (0 if unit.name in apart else unit.experts)


class _Leaf(nn.Module):
    """Stands for a unit: as many bytes, without data."""

    def __init__(self, size: int):
        super().__init__()
        self.bytes = nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)


def _skeleton(units: Sequence[Unit], apart: frozenset[str]) -> nn.Module:
    root = nn.Module()
    for unit in units:
        *path, own = unit.name.split(".")
        at = root
        for name in path:
            if not hasattr(at, name):
                at.add_module(name, nn.Module())
            at = getattr(at, name)
        at.add_module(own, _Leaf(_bytes(unit, apart) + unit.cache))
    return root


def _set_apart(device_map: dict[str, Any], units: Sequence[Unit], name: str, device: Any) -> None:
    """Place one unit in a map, which may have named only what holds it."""
    if device_of(name, device_map) == device:
        return
    if name not in device_map:
        holder = owner_of(name, device_map)
        place = device_map.pop(holder)
        inside = [unit.name for unit in units if not holder or unit.name.startswith(f"{holder}.")]
        device_map.update((own, place) for own in inside if own not in device_map)
    device_map[name] = device
