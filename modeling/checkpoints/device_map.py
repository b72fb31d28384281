"""Whether a device map is complete and can be followed, checked before a weight is read.

A device map names the place of each module: an accelerator's index or name, "cpu", or "disk", from where each pass
reads it again. transformers loads by it, and accelerate adds hooks to the modules that it names. Some maps would give
a wrong model in silence: a forgotten module goes to the CPU, an unknown name is ignored, a parameter on disk under
its own name is never read, and transformers and accelerate disagree on a map that names both a module and a part of
it. Such maps are refused here, or rewritten so that every module is named once.
"""

import difflib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...configuration.checks import listed


def devices_here() -> list[str]:
    """Names of the devices that torch can use on this machine, the CPU first."""
    if not torch.accelerator.is_available():
        return ["cpu"]
    kind = torch.accelerator.current_accelerator().type
    return ["cpu", *(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))]


def owner_of(name: str, names: Container[str]) -> str:
    """The innermost of `names` that a module or parameter is or lies in; "" for none, or for the whole model."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """The device of a module or parameter; None without one."""
    return device_map.get(owner_of(name, device_map))


def settle_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> dict[str, Any]:
    """Check a device map against a model and name every module once.

    Args:
        model: the model, on the meta device or any other.
        device_map: names of modules, parameters or buffers to devices; a name applies to everything below it that is
            not named itself, "" to the rest of the model.

    Returns:
        the same places, without a name below another. Some tensors that the map puts on disk stay on the CPU:
        parameters beside submodules (a tower's class token), which no module reads from disk; tied weights, if
        accelerate cannot read these from disk; one small module, if accelerate cannot keep a whole model there.

    Raises:
        ValueError: a name that the model does not have, a module without a device, tensors of one module in different
            places, or tied weights of which only one is on disk.
    """
    named = [*model.named_modules(), *model.named_parameters(), *model.named_buffers()]
    # `named_parameters` lists tied parameters once; the state dict has all their names.
    names = dict.fromkeys([*(name for name, _ in named), *model.state_dict()])
    if unknown := [name for name in device_map if name not in names]:
        # By this name all routed experts are placed together, before this is asked.
        together = ["experts"] if any(name.endswith(".experts") for name in names) else []
        close = difflib.get_close_matches(unknown[0], [*names, *together], n=1)
        parts = [*model.named_parameters(recurse=False), *model.named_children()]
        hint = f"Its parts are {_enumerate(name for name, _ in parts)}."
        hint = f"Did you mean {close[0]!r}?" if close else hint
        raise ValueError(
            f"device_map names {_enumerate(unknown)}, which {type(model).__name__} does not have. {hint}"
        )
    settled: dict[str, Any] = {}
    missing: list[str] = []
    _settle(model, "", None, device_map, settled, missing)
    _follow_ties(model, settled, missing)
    if missing:
        named = "".join(f"{name!r}: 'cpu', " for name in missing[:3] if name)
        named += "..., " if len(missing) > 3 else ""
        raise ValueError(
            f"device_map gives no device for {_enumerate(missing)} of {type(model).__name__}. Add {named}"
            f"{'or ' if named else ''}'': 'cpu' for everything that it does not name."
        )
    return settled


def _enumerate(names: Iterable[str]) -> str:
    return listed((repr(name) if name else "the whole model" for name in names), limit=8)


def _settle(
    module: nn.Module, name: str, device: Any, given: Mapping[str, Any], settled: dict, missing: list[str]
) -> None:
    device = given.get(name, device)
    prefix = f"{name}." if name else ""
    if not any(key != name and key.startswith(prefix) for key in given):
        if device is not None:
            settled[name] = device
        # Rotary embeddings have no tensors in the state dict; they follow the hidden states' device.
        elif module.state_dict() or name == "":
            missing.append(name)
        return
    children = [(own, child) for own, child in module.named_children() if _has_tensors(child)]
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    places = {prefix + own: given.get(prefix + own, device) for own, _ in tensors}
    if not children and places and None not in places.values():
        if len({str(place) for place in places.values()}) > 1:
            raise ValueError(
                f"device_map puts tensors of one module in different places ({places}), but modules move as a whole: "
                f"give {name!r} one device."
            )
        settled[name] = next(iter(places.values()))
        return
    for tensor, place in places.items():
        if place is None:
            missing.append(tensor)
        else:
            settled[tensor] = "cpu" if place == "disk" else place
    for child_name, child in children:
        _settle(child, prefix + child_name, device, given, settled, missing)


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _follow_ties(model: nn.Module, settled: dict[str, Any], missing: list[str]) -> None:
    for tied, source in getattr(model, "all_tied_weights_keys", {}).items():
        module = tied.rpartition(".")[0]
        if module in missing and device_of(source, settled) is not None:
            missing.remove(module)
            settled[module] = device_of(source, settled)
        places = [device_of(name, settled) for name in (tied, source)]
        if places.count("disk") == 1:
            raise ValueError(
                f"device_map puts {tied} on {places[0]!r} and {source} on {places[1]!r}, but they are one tensor "
                "(tie_word_embeddings): put both on 'disk', or neither."
            )


def settle_places(model: nn.Module, load_config: Any, files: Sequence[str], fused: Iterable[str]) -> None:
    """Settle the device map of a load in place, since the caller dispatches by the same dict, and check it.

    Args:
        model: empty.
        load_config: transformers' record of the loading.
        files: of the checkpoint; none for a state dict in memory.
        fused: the model's keys that the files store as several tensors.

    Raises:
        ValueError: as by `settle_device_map`, or weights on disk that are in no safetensors file, without a folder to
            write them to.
    """
    device_map = load_config.device_map
    if device_map is None:
        return
    settled = settle_device_map(model, device_map)
    device_map.clear()
    device_map.update(settled)
    if load_config.disk_offload_folder is not None:
        return
    if on_disk := [name for name in fused if device_of(name, settled) == "disk"]:
        raise ValueError(
            f"device_map puts {_enumerate(on_disk)} on disk, where the checkpoint has one linear layer an expert: give "
            "offload_folder, a folder that takes the fused experts, or fuse them first by `llamoe convert IN OUT`."
        )
    on_disk = [name for name, device in settled.items() if device == "disk"]
    if on_disk and not (files and all(str(file).endswith(".safetensors") for file in files)):
        raise ValueError(
            f"device_map puts {_enumerate(on_disk)} on disk, but only safetensors files can be read where they are: "
            "give offload_folder, a folder that takes the weights."
        )


def check_on_disk(
    device_map: Mapping[str, Any] | None, missing_keys: Iterable[str], offload_index: Mapping[str, Any] | None
) -> None:
    """Check that every weight kept on disk is in a file; that of a new head, for one, is not.

    `missing_keys` are those that the checkpoint does not have, `offload_index` those that will be read from disk.

    Raises:
        ValueError: a weight that would be initialised at random is kept on disk.
    """
    lost = [
        name
        for name in sorted(missing_keys)
        if device_of(name, device_map or {}) == "disk" and name not in (offload_index or {})
    ]
    if lost:
        raise ValueError(
            f"device_map puts {_enumerate(lost)} on disk, but the checkpoint does not have it; it would be new, and "
            "new weights live in memory. Put it on 'cpu'."
        )
