"""Assign the units of a model to devices in order, as accelerate does, and choose what is offloaded."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from accelerate.utils.modeling import clean_device_map

from .units import Sizes, Unit


@dataclass(frozen=True)
class Placement:
    """An assignment of a model's units to devices.

    Attributes:
        units: in the order in which they run.
        devices: the device of each unit.
        main: the first device, which also computes offloaded layers.
        apart: names of units whose experts are offloaded.
        place: device of the offloaded experts, "cpu" or "disk"; "" until it is chosen.
        memory: bytes of the cache of recently used experts; None if no expert is offloaded.
    """

    units: Sequence[Unit]
    devices: Sequence[Any]
    main: Any
    apart: frozenset[str] = frozenset()
    place: str = ""
    memory: int | None = None

    def rows(self) -> Iterator[tuple[Unit, Any, str | None]]:
        """Yield each unit, its device, and the device of its offloaded experts, or None if they are not offloaded."""
        for unit, device in zip(self.units, self.devices, strict=True):
            yield unit, device, self.place if unit.name in self.apart else None

    def experts(self) -> dict[Any, int]:
        """Return the bytes of routed experts on each device that holds any."""
        total: Counter[Any] = Counter()
        for unit, device, place in self.rows():
            total[device if place is None else place] += unit.experts
        return {device: size for device, size in total.items() if size}

    def weights(self) -> dict[Any, int]:
        """Return the bytes of weights on each device, experts among them."""
        total: Counter[Any] = Counter(self.experts())
        for unit, device, _ in self.rows():
            total[device] += unit.weights
        return dict(total)

    def cache(self) -> dict[Any, int]:
        """Return the bytes of the KV cache on each device; the first device also holds that of offloaded layers."""
        total: Counter[Any] = Counter()
        for unit, device, _ in self.rows():
            if unit.cache:
                total[self.main if device in ("cpu", "disk") else device] += unit.cache
        return dict(total)

    def used(self, device: Any) -> int:
        """Return the bytes of weights and KV cache on a device; offloaded experts count once `place` is chosen."""
        return self.weights().get(device, 0) + self.cache().get(device, 0)

    def device_map(self) -> dict[str, Any]:
        """Return the argument `device_map` of `from_pretrained`."""
        devices = clean_device_map({unit.name: device for unit, device, _ in self.rows()})
        mixtures = [unit for unit in self.units if unit.experts]
        apart = [unit.experts_name for unit in mixtures if unit.name in self.apart]
        if apart and len(apart) == len(mixtures):
            apart = ["experts"]
        return devices | dict.fromkeys(apart, self.place)


def choose(sizes: Sizes, room: dict[Any, int], disk: bool) -> Placement | None:
    """Return the first placement that fits: nothing offloaded, then experts, then layers; None if none fits.

    Args:
        sizes: of the model's parts.
        room: device to its bytes; accelerators (0, 1, ...) before "cpu".
        disk: whether weights may stay on disk.
    """
    units, main = sizes.units, next(iter(room))
    devices = {device: size for device, size in room.items() if device == main or device != "cpu"}
    if filled := _fill_whole(units, devices):
        return filled
    mixtures = [unit for unit in units if unit.experts and sizes.may_leave]
    # With accelerators, offload the experts of as few layers as possible. Without, offload the experts of all layers: a
    # cache of recently used experts has at least as many hits as fixed layers of the same size.
    for kept in range(len(mixtures) - 1, -1, -1) if main != "cpu" else [0] if disk and mixtures else []:
        leaving = mixtures[kept:]
        filled = _fill_whole(units, devices, frozenset(unit.name for unit in leaving), sizes.least)
        if filled is None:
            continue
        size = sum(unit.experts for unit in leaving)
        if main == "cpu":
            return replace(filled, place="disk", memory=min(size, room["cpu"] - filled.used("cpu")))
        if size <= room["cpu"]:
            holders = {device for _, device, place in filled.rows() if place is not None}
            left = min(room[device] - filled.used(device) for device in holders)
            return replace(filled, place="cpu", memory=min(size, left))
        if disk and room["cpu"] >= sizes.least:
            return replace(filled, place="disk", memory=min(size, room["cpu"]))
        break
    return _offload_layers(sizes, room, disk)


def _offload_layers(sizes: Sizes, room: dict[Any, int], disk: bool) -> Placement | None:
    """Return a placement with layers in RAM or on disk; None if none fits."""
    units, main = sizes.units, next(iter(room))
    apart = frozenset(unit.name for unit in units if unit.experts and sizes.may_leave)
    for place in [""] if not apart else ["disk"] if main == "cpu" else ["cpu", "disk"]:
        limits = dict(room)
        if main != "cpu":
            limits["cpu"] -= {"": 0, "cpu": sizes.experts, "disk": sizes.least}[place]
        if limits["cpu"] < 0 or (place == "disk" and not disk):
            continue
        filled = _fill(units, limits, apart, sizes.least)
        # Reading chosen experts from disk takes less time than reading whole layers.
        if filled is None or ("disk" in filled.devices and (place == "cpu" or not disk or sizes.is_packed)):
            continue
        if not place:
            return filled
        left = room["cpu"] - filled.used("cpu")
        memory = sizes.least if place == "cpu" else min(sizes.experts, left)
        return replace(filled, place=place, memory=memory)
    return None


def _fill_whole(
    units: Sequence[Unit], room: Mapping[Any, int], apart: frozenset[str] = frozenset(), reserve: int = 0
) -> Placement | None:
    """Assign all units, with `reserve` bytes free on each device; return None if they do not fit."""
    room = {device: size - reserve for device, size in room.items()}
    devices = _devices(units, room, apart, leaves_room=False)
    return None if "disk" in devices else Placement(units, devices, next(iter(room)), apart)


def _fill(
    units: Sequence[Unit], room: Mapping[Any, int], apart: frozenset[str], reserve: int
) -> Placement | None:
    """Assign units to accelerators, then to RAM and disk.

    Args:
        units: in the order in which they run.
        room: device to its bytes.
        apart: names of units whose experts are offloaded.
        reserve: bytes of each accelerator that stay free; without accelerators, of RAM.

    Returns:
        the placement; None if the KV cache of offloaded layers exceeds the first device's room.
    """
    main = next(iter(room))
    room = {
        device: size - (reserve if device != "cpu" or main == "cpu" else 0) for device, size in room.items()
    }
    # Bytes on the first device for the KV caches of offloaded layers. Reserving them may offload more layers.
    borrowed = 0
    while room[main] > borrowed:
        devices = _devices(units, {**room, main: room[main] - borrowed}, apart, leaves_room=True)
        offloaded = {"cpu", "disk"} - {main}
        needed = sum(unit.cache for unit, device in zip(units, devices, strict=True) if device in offloaded)
        if needed <= borrowed:
            return Placement(units, devices, main, apart)
        borrowed = needed
    return None


def _devices(
    units: Sequence[Unit], room: Mapping[Any, int], apart: frozenset[str], leaves_room: bool
) -> list[Any]:
    """Return the device of each unit; units that fit on no device go to the disk.

    With `leaves_room` the first device and RAM keep enough bytes free to copy the largest later unit into.
    """
    sizes = [unit.weights + unit.cache + unit.experts * (unit.name not in apart) for unit in units]
    largest_after = [*accumulate(reversed(sizes[1:]), max, initial=0)][::-1]
    devices = iter([*room, "disk"])
    device, used = next(devices), 0
    copies_to = {device, "cpu"} if leaves_room else set()
    placed: dict[str, Any] = {}
    for unit, size, largest in zip(units, sizes, largest_after, strict=True):
        if unit.tied_to:
            continue
        while device != "disk" and used + size + (largest if device in copies_to else 0) > room[device]:
            device, used = next(devices), 0
        used += size
        placed[unit.name] = device
    return [placed[unit.tied_to or unit.name] for unit in units]
