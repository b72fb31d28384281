"""Device maps that name every module once.

A device map names the place of each module: an accelerator's index or name, "cpu", or "disk", from where each pass
reads it again. transformers loads by it, and accelerate, which checks that nothing is forgotten, adds hooks to the
modules that it names. They disagree on a map that names both a module and a part of it, and a parameter on disk under
its own name is never read: such maps are rewritten.
"""

from collections.abc import Container, Mapping
from typing import Any

from torch import nn


def owner_of(name: str, names: Container[str]) -> str:
    """Return the longest of `names` that is a prefix of a module or parameter; "" if there is none."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of a module or parameter; None if the map has none."""
    return device_map.get(owner_of(name, device_map))


def settle_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> dict[str, Any]:
    """Check a device map against a model and name every module once.

    Args:
        model: the model, on the meta device or any other.
        device_map: names of modules, parameters or buffers to devices; a name applies to everything below it that is
            not named itself, "" to the rest of the model.

    Returns:
        the same map, in which no name is part of another. Parameters that are siblings of submodules (the class token
        of a vision tower) stay on the CPU instead of on disk: no module would read them.

    Raises:
        ValueError: a weight without a device, or tied weights of which only one is on disk.
    """
    # Imported when it is needed: accelerate is optional.
    from accelerate.utils import check_device_map

    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    given = dict(device_map)
    for name, source in tied.items():
        if device_of(name, given) is None and (device := device_of(source, given)) is not None:
            given[name.rpartition(".")[0]] = device
    check_device_map(model, given)
    settled: dict[str, Any] = {}
    _settle(model, "", None, given, settled)
    for name, source in tied.items():
        places = [device_of(each, settled) for each in (name, source)]
        if places.count("disk") == 1:
            raise ValueError(
                f"device_map puts {name} on {places[0]!r} and {source} on {places[1]!r}, but they are one tensor "
                "(tie_word_embeddings): put both on 'disk', or neither."
            )
    return settled


def _settle(
    module: nn.Module, name: str, device: Any, given: Mapping[str, Any], settled: dict[str, Any]
) -> None:
    device = given.get(name, device)
    prefix = f"{name}." if name else ""
    children = [(own, child) for own, child in module.named_children() if _has_tensors(child)]
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    places = {prefix + own: given.get(prefix + own, device) for own, _ in tensors}
    if not any(key != name and key.startswith(prefix) for key in given):
        settled |= {} if device is None else {name: device}
    elif not children and len({str(place) for place in places.values()}) == 1:
        settled[name] = next(iter(places.values()))
    else:
        settled |= {tensor: "cpu" if place == "disk" else place for tensor, place in places.items()}
        for own, child in children:
            _settle(child, prefix + own, device, given, settled)


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def settle_places(model: nn.Module, load_config: Any) -> None:
    """Apply `settle_device_map` to a load's device map, in place, since the caller uses the same dict later.

    Args:
        model: the empty model.
        load_config: transformers' record of the loading.
    """
    if (device_map := load_config.device_map) is not None:
        settled = settle_device_map(model, device_map)
        device_map.clear()
        device_map.update(settled)
