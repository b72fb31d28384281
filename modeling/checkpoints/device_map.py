"""Rewrites device maps, so that they name every module once.

A device map says where each module's weights are: on an accelerator, by its index or name; on the "cpu"; or on "disk",
from where every forward reads them again. transformers loads weights by the map; accelerate adds hooks to the modules
that it names. The two libraries disagree on a map that names both a module and a part of it. And a parameter that the
map puts on disk by its own name is never read, since hooks are on modules.
"""

from collections.abc import Container, Mapping
from typing import Any

from accelerate.utils import check_device_map
from torch import nn


def owner_of(name: str, names: Container[str]) -> str:
    """Return the longest of `names` that is `name` or a module around it; "" if there is none."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device that the map gives to a module or parameter; None if it gives none."""
    return device_map.get(owner_of(name, device_map))


def settle_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> dict[str, Any]:
    """Return an equivalent device map in which no named module contains another; check that it covers the model.

    Parameters of modules that also have submodules, as a tower's class token, move from disk to the CPU: accelerate's
    hooks would not read them.

    Args:
        model: the model, on the meta device or any other.
        device_map: devices by the names of modules, parameters or buffers. A name stands for everything below it that
            the map does not name itself; "" stands for the rest of the model.

    Raises:
        ValueError: a weight has no device, or only one of two tied weights is on disk.
    """
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    device_map = dict(device_map)
    # A tied weight without a device gets the device of the weight to which it is tied.
    for name, source in tied.items():
        if device_of(name, device_map) is None and (device := device_of(source, device_map)) is not None:
            device_map[name.rpartition(".")[0]] = device
    check_device_map(model, device_map)
    settled: dict[str, Any] = {}
    _settle(model, "", None, device_map, settled)
    for name, source in tied.items():
        devices = [device_of(name, settled), device_of(source, settled)]
        if devices.count("disk") == 1:
            raise ValueError(
                f"device_map puts {name} on {devices[0]!r} and {source} on {devices[1]!r}, but they are one tensor "
                "(tie_word_embeddings): put both on 'disk', or neither."
            )
    return settled


def _settle(
    module: nn.Module, name: str, device: Any, device_map: Mapping[str, Any], settled: dict[str, Any]
) -> None:
    """Add a module to `settled`: by its own name if it is on one device, else by the names of its parts.

    `device` is that of the module around it.
    """
    device = device_map.get(name, device)
    prefix = f"{name}." if name else ""
    children = [(prefix + key, child) for key, child in module.named_children() if _has_tensors(child)]
    tensors = [*module.named_parameters(name, recurse=False), *module.named_buffers(name, recurse=False)]
    devices = {key: device_map.get(key, device) for key, _ in tensors}
    if not any(key != name and key.startswith(prefix) for key in device_map):
        settled |= {} if device is None else {name: device}
    elif not children and len({str(device) for device in devices.values()}) == 1:
        settled[name] = next(iter(devices.values()))
    else:
        settled |= {key: "cpu" if device == "disk" else device for key, device in devices.items()}
        for key, child in children:
            _settle(child, key, device, device_map, settled)


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def settle_places(model: nn.Module, load_config: Any) -> None:
    """Apply `settle_device_map` to the device map in transformers' `LoadStateDictConfig`, if it has one.

    The dict is changed in place, since transformers uses it after loading, too.
    """
    if (device_map := load_config.device_map) is not None:
        settled = settle_device_map(model, device_map)
        device_map.clear()
        device_map.update(settled)
