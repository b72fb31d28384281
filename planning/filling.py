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
    """An assignment of a model's units to devices: 0, 1, ... for accelerators, "cpu" for RAM, and "disk".

    Attributes:
        units: in the order in which they run.
        devices: the device of each unit.
        main: the first device, which also computes offloaded layers.
        offloaded: names of units whose experts are offloaded.
        experts_device: device of the offloaded experts, "cpu" or "disk"; "" until it is chosen.
        memory: bytes of the cache of recently used experts; None if no expert is offloaded.
    """

    units: Sequence[Unit]
    devices: Sequence[Any]
    main: Any
    offloaded: frozenset[str] = frozenset()
    experts_device: str = ""
    memory: int | None = None

    def rows(self) -> Iterator[tuple[Unit, Any, str | None]]:
        """Yield each unit, its device, and the device of its offloaded experts, or None if they are not offloaded."""
        for unit, device in zip(self.units, self.devices, strict=True):
            yield unit, device, self.experts_device if unit.name in self.offloaded else None

    def experts(self) -> dict[Any, int]:
        """Return the bytes of routed experts on each device that holds any."""
        total: Counter[Any] = Counter()
        for unit, device, experts_device in self.rows():
            total[device if experts_device is None else experts_device] += unit.experts
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
        """Return the bytes of weights and KV cache on a device; offloaded experts count once their device is chosen."""
        return self.weights().get(device, 0) + self.cache().get(device, 0)

    def expert_caches(self) -> set[Any]:
        """Return the devices that cache offloaded experts: RAM for experts on disk, else the accelerators."""
        if self.experts_device == "disk":
            return {"cpu"}
        # Each accelerator caches the experts of its own layers; the first one also those of offloaded layers.
        devices = {device for _, device, experts_device in self.rows() if experts_device is not None}
        return {self.main if device in ("cpu", "disk") else device for device in devices}

    @property
    def hit_share(self) -> float:
        """Return the share of the offloaded experts that fit into their caches; 0 if none are offloaded."""
        if self.memory is None:
            return 0.0
        size = sum(unit.experts for unit, _, experts_device in self.rows() if experts_device is not None)
        return min(1.0, len(self.expert_caches()) * self.memory / size)

    def remaining(self, room: Mapping[Any, int]) -> dict[Any, int]:
        """Return the unused bytes of each device."""
        caches = dict.fromkeys(self.expert_caches(), self.memory or 0)
        return {device: size - self.used(device) - caches.get(device, 0) for device, size in room.items()}

    def device_map(self) -> dict[str, Any]:
        """Return the argument `device_map` of `from_pretrained`."""
        devices = clean_device_map({unit.name: device for unit, device, _ in self.rows()})
        mixtures = [unit for unit in self.units if unit.experts]
        names = [unit.experts_name for unit in mixtures if unit.name in self.offloaded]
        if names and len(names) == len(mixtures):
            names = ["experts"]
        return devices | dict.fromkeys(names, self.experts_device)


def choose(sizes: Sizes, room: dict[Any, int]) -> Placement | None:
    """Return the first placement that fits: nothing offloaded, then experts, then layers; None if none fits.

    Args:
        sizes: bytes of the model's parts.
        room: device to its bytes for weights and KV cache; accelerators (0, 1, ...) before "cpu".
    """
    units, main = sizes.units, next(iter(room))
    devices = {device: size for device, size in room.items() if device == main or device != "cpu"}
    if filled := _fill_whole(units, devices):
        return filled
    mixtures = [unit for unit in units if unit.experts and sizes.may_offload_experts]
    # With accelerators, offload the experts of as few layers as possible. Without, offload the experts of all layers: a
    # cache of recently used experts has at least as many hits as fixed layers of the same size.
    kept_counts = range(len(mixtures))[::-1]
    for kept in kept_counts if main != "cpu" else kept_counts[-1:]:
        last_mixtures = mixtures[kept:]
        offloaded = frozenset(unit.name for unit in last_mixtures)
        filled = _fill_whole(units, devices, offloaded, sizes.smallest_cache)
        if filled is None:
            continue
        size = sum(unit.experts for unit in last_mixtures)
        if main == "cpu":
            return replace(filled, experts_device="disk", memory=min(size, room["cpu"] - filled.used("cpu")))
        if size <= room["cpu"]:
            left = min(room[device] - filled.used(device) for device in filled.expert_caches())
            return replace(filled, experts_device="cpu", memory=min(size, left))
        if room["cpu"] >= sizes.smallest_cache:
            return replace(filled, experts_device="disk", memory=min(size, room["cpu"]))
        break
    return _offload_layers(sizes, room)


def _offload_layers(sizes: Sizes, room: dict[Any, int]) -> Placement | None:
    """Return a placement with layers in RAM or on disk; None if none fits."""
    units, main = sizes.units, next(iter(room))
    offloaded = frozenset(unit.name for unit in units if unit.experts and sizes.may_offload_experts)
    for experts_device in [""] if not offloaded else ["disk"] if main == "cpu" else ["cpu", "disk"]:
        limits = dict(room)
        if main != "cpu":
            limits["cpu"] -= {"": 0, "cpu": sizes.experts, "disk": sizes.smallest_cache}[experts_device]
        if limits["cpu"] < 0:
            continue
        filled = _fill(units, limits, offloaded, sizes.smallest_cache)
        # Experts leave RAM before layers do: a step reads only chosen experts, but all layers that are on disk.
        if filled is None or ("disk" in filled.devices and (experts_device == "cpu" or sizes.is_packed)):
            continue
        if not experts_device:
            return filled
        left = room["cpu"] - filled.used("cpu")
        memory = sizes.smallest_cache if experts_device == "cpu" else min(sizes.experts, left)
        return replace(filled, experts_device=experts_device, memory=memory)
    return None


def _fill_whole(
    units: Sequence[Unit], room: Mapping[Any, int], offloaded: frozenset[str] = frozenset(), reserve: int = 0
) -> Placement | None:
    """Assign all units, with `reserve` bytes free on each device; return None if they do not fit."""
    room = {device: size - reserve for device, size in room.items()}
    devices = _devices(units, room, offloaded, has_copies=False)
    return None if "disk" in devices else Placement(units, devices, next(iter(room)), offloaded)


def _fill(
    units: Sequence[Unit], room: Mapping[Any, int], offloaded: frozenset[str], reserve: int
) -> Placement | None:
    """Assign units to accelerators, then to RAM and disk.

    Args:
        units: in the order in which they run.
        room: device to its bytes.
        offloaded: names of units whose experts are offloaded.
        reserve: bytes of each accelerator that stay free; without accelerators, of RAM.

    Returns:
        the placement; None if the KV cache of offloaded layers exceeds the first device's room.
    """
    main = next(iter(room))
    room = {
        device: size - (reserve if device != "cpu" or main == "cpu" else 0) for device, size in room.items()
    }
    # The first device keeps the KV caches of offloaded layers. A larger reserve may offload more layers,
    # whose caches need more bytes: repeat until the reserve suffices.
    reserved = 0
    while room[main] > reserved:
        devices = _devices(units, {**room, main: room[main] - reserved}, offloaded, has_copies=True)
        is_copied = [device in ("cpu", "disk") and device != main for device in devices]
        needed = sum(unit.cache for unit, copied in zip(units, is_copied, strict=True) if copied)
        if needed <= reserved:
            return Placement(units, devices, main, offloaded)
        reserved = needed
    return None


def _devices(
    units: Sequence[Unit], room: Mapping[Any, int], offloaded: frozenset[str], has_copies: bool
) -> list[Any]:
    """Return the device of each unit; units that fit on no device go to the disk.

    With `has_copies` offloaded layers are copied to the first device through RAM. So both keep enough bytes free for
    the largest later unit.
    """
    sizes = [unit.weights + unit.cache + unit.experts * (unit.name not in offloaded) for unit in units]
    largest_after = [*accumulate(reversed(sizes[1:]), max, initial=0)][::-1]
    devices = iter([*room, "disk"])
    device, used = next(devices), 0
    copies_to = {device, "cpu"} if has_copies else set()
    placed: dict[str, Any] = {}
    for unit, size, largest in zip(units, sizes, largest_after, strict=True):
        if unit.tied_to:
            continue
        while device != "disk" and used + size + (largest if device in copies_to else 0) > room[device]:
            device, used = next(devices), 0
        used += size
        placed[unit.name] = device
    return [placed[unit.tied_to or unit.name] for unit in units]
