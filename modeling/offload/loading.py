"""Loads models with offloaded experts, by `device_map={"experts": "disk"}`.

transformers and accelerate do not support such maps. So `take_request` removes the names of experts from the map, and
`replace_with_offloaded` replaces these experts of the empty model by modules without weights. When everything else is
loaded, `attach_stores` gives them their store. `current_loading` keeps the request in between.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations import is_fsdp_enabled

from ...configuration.sizes import bytes_of
from ..checkpoints import current_loading, device_of, names_in_model
from ..moe import STACKS, Experts
from ..quantization import of_stack
from .budget import bytes_of_expert, default_size
from .experts import OffloadedExperts, offloaded_in
from .pieces import find_packed_pieces, find_pieces
from .store import Store

ALL = "experts"
"""The name in a device map that means the routed experts of all layers."""


@dataclass
class OffloadRequest:
    """What `from_pretrained` got: devices, by experts' name or `ALL`, and bytes for slots or None (the default)."""

    places: dict[str, Any]
    memory: int | None


def take_request(kwargs: dict[str, Any]) -> OffloadRequest | None:
    """Remove experts' devices and `experts_memory` from the arguments of `from_pretrained`; return them, None if none.

    Raises:
        ValueError: an invalid memory size, or several processes.
    """
    memory, device_map = kwargs.pop("experts_memory", None), kwargs.get("device_map")
    if memory is not None:
        memory = bytes_of("experts_memory", memory, least=1)
        if not isinstance(device_map, Mapping):
            device_map = {ALL: "disk"} if device_map is None else {"": device_map, ALL: "disk"}
    if not isinstance(device_map, Mapping):
        return None
    # accelerate places experts on all devices but "disk" and "cpu".
    places = {
        name: device
        for name, device in device_map.items()
        if name == ALL or (name.endswith(f".{ALL}") and _is_place(device))
    }
    # Copy the caller's map: `replace_with_offloaded` changes it in place.
    kwargs["device_map"] = {name: device for name, device in device_map.items() if name not in places}
    if not places:
        return None
    if kwargs.get("distributed_config") is not None or kwargs.get("tp_plan") is not None or is_fsdp_enabled():
        raise ValueError(
            "Experts on disk or in RAM are for one process: leave out distributed_config, tp_plan and FSDP, or put the "
            "experts elsewhere in device_map."
        )
    here = torch.accelerator.current_device_index() if torch.accelerator.is_available() else "cpu"
    kwargs["device_map"] = kwargs["device_map"] or {"": here}
    return OffloadRequest(places, memory)


def _is_place(device: Any) -> bool:
    """Return whether experts on this device of a map are offloaded."""
    return str(device) in ("disk", "cpu")


def _rows_device(name: str, device_map: Mapping[str, Any]) -> torch.device:
    """Return the device on which the layer of the experts called `name` computes."""
    device = device_of(name.rpartition(".")[0], device_map)
    if device is None or _is_place(device):
        # accelerate moves the layer's weights to the first accelerator of the map.
        device = next((other for other in device_map.values() if not _is_place(other)), "cpu")
    return torch.device(device)


def replace_with_offloaded(model: nn.Module, files: list[str] | None, load_config: Any) -> None:
    """Replace the experts to be offloaded in a model on the meta device, before its weights are read.

    `files` is None if the weights are in a state dict. `load_config` has transformers' options for loading; its device
    map gets back the names of experts that are not offloaded.

    Raises:
        ValueError: files have the scales of all experts in one tensor, the experts would be quantized while they are
            loaded, or the weights are not in safetensors files.
    """
    request = current_loading().offload
    if request is None:
        return
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    places = {name: device for name, device in request.places.items() if name != ALL}
    if ALL in request.places:
        places = {**dict.fromkeys(layers, request.places[ALL]), **places}
    device_map = load_config.device_map
    chosen: dict[str, str] = {}
    for name, device in places.items():
        # Do not offload experts on "cpu" whose layer also computes on the CPU.
        stays = str(device) == "cpu" and _rows_device(name, device_map).type == "cpu"
        if stays or not _is_place(device) or name not in layers:
            device_map[name] = device
        else:
            chosen[name] = str(device)
    if not chosen:
        return
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise ValueError(
            "device_map puts experts on disk or in RAM, which are read from safetensors files, but the weights are in "
            f"{files[0] if files else 'a state dict'}: write a folder by `llamoe convert` or save_pretrained, and "
            "load that."
        )
    offloaded: dict[str, Any] = {name: layers[name] for name in chosen}
    layout, matrices = current_loading().layout, current_loading().matrices or {}
    if any(of_stack(matrices.get(f"{name}.{stack}", {})) for name in offloaded for stack in STACKS):
        raise ValueError(
            f"{next(iter(offloaded))} has scales of all experts in one tensor, so single experts cannot be read from "
            "disk or RAM: write a folder by `llamoe quantize FOLDER TARGET --to int4`, and load that."
        )
    quantizer = load_config.hf_quantizer
    if quantizer and not quantizer.pre_quantized and any(experts.is_packed for experts in offloaded.values()):
        raise ValueError(
            "Experts on disk or in RAM are read as they are stored, but quantization_config asks for quantized ones: "
            "write a quantized folder by `llamoe quantize` or save_pretrained, and load that."
        )
    # Use absolute paths: the files are read later, perhaps after a change of the working directory.
    files = [os.path.abspath(file) for file in files]
    packed = {name: experts for name, experts in offloaded.items() if f"{name}.{STACKS[0]}" in matrices}
    plain = {name: experts for name, experts in offloaded.items() if name not in packed}
    stored = find_packed_pieces(packed, files, matrices, layout)
    if plain:
        stored |= find_pieces(plain, files, names_in_model(model, load_config.weight_mapping))
    ignored = set(model._keys_to_ignore_on_load_unexpected or ())
    for name, place in chosen.items():
        model.set_submodule(name, OffloadedExperts(offloaded[name], name, place, stored[name]))
        ignored.add(re.escape(name[name.find("layers.") :]) + r"\.")
    # transformers must not report the experts' tensors in the files as unexpected.
    model._keys_to_ignore_on_load_unexpected = ignored


# Leave inference mode: the reading threads, which are not in it, write to the slots.
@torch.inference_mode(False)
def attach_stores(model: nn.Module) -> None:
    """Connect offloaded experts to their stores, once everything else is loaded."""
    waiting = [experts for experts in offloaded_in(model) if experts.store is None]
    if not waiting:
        return
    device_map = getattr(model, "hf_device_map", None) or {"": "cpu"}
    memory = current_loading().offload.memory
    on_disk = sum(_nbytes(experts) for experts in waiting if experts.place == "disk")
    groups: dict[tuple[str, torch.device], list[OffloadedExperts]] = {}
    for experts in waiting:
        groups.setdefault((experts.place, _rows_device(experts.name, device_map)), []).append(experts)
    for (place, device), group in groups.items():
        size = default_size(torch.device("cpu") if place == "disk" else device) if memory is None else memory
        if place == "disk":
            # The RAM for slots is divided among the layers' devices, in proportion to their experts' bytes.
            size = size * sum(map(_nbytes, group)) // on_disk
        layers = {experts.name: experts.shapes for experts in group}
        store = Store(layers, {experts.name: experts.stored for experts in group}, place, device, size)
        for experts in group:
            experts.connect(store)
    model.hf_device_map = _devices_of_rows(device_map, waiting)


def _devices_of_rows(device_map: Mapping[str, Any], offloaded: list[OffloadedExperts]) -> dict[str, Any]:
    """Return the device map in which offloaded experts have the device of their tokens.

    If the map said "disk" or "cpu" for them, accelerate, peft and Trainer would assume accelerate's hooks: they would
    add hooks again, estimate what fits, or refuse to train the model. Offloaded experts have no hooks.
    """
    experts = {layer.name: layer.device for layer in offloaded}
    others = {name: device for name, device in device_map.items() if name not in experts}
    if "disk" not in others.values() and len({torch.device(device) for device in others.values()}) <= 1:
        # Use a torch.device: for the string "cpu" those libraries would assume hooks, too.
        others = {name: torch.device(device) for name, device in others.items()}
    return {**others, **experts}


def _nbytes(experts: OffloadedExperts) -> int:
    return bytes_of_expert(experts.shapes) * experts.num_experts


class OffloadMixin(nn.Module):
    """A mixin for models that may have offloaded experts: statistics, closing, and checks before saving."""

    def _stores(self) -> list[Store]:
        return list(dict.fromkeys(experts.store for experts in offloaded_in(self) if experts.store))

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as `PreTrainedModel.load_adapter`."""
        # Given an adapter's folder, `from_pretrained` loads the adapter before it would attach the stores.
        attach_stores(self)
        return super().load_adapter(*args, **kwargs)  # type: ignore[misc]

    def experts_statistics(self, reset: bool = False) -> dict[str, dict[str, int]]:
        """Return the hits, misses and bytes read of each layer whose experts are on disk or in RAM.

        An expert counts once for each forward or backward pass that needs it: as a hit if it was in the cache that
        `experts_memory` sets, else as a miss. "bytes_read" counts bytes from files, or from RAM to the accelerator.

        Args:
            reset: restart all counts from 0.

        Returns:
            for each such layer, by the name of its experts in the model, a dict of "hits", "misses" and "bytes_read".
        """
        return {name: counts for store in self._stores() for name, counts in store.statistics(reset).items()}

    def check_saving(self) -> None:
        """Raise an error if no file has the whole stacks of offloaded experts, or one of their files has changed."""
        for experts in offloaded_in(self):
            if any(tensor.is_meta for tensor in [*experts.parameters(), *experts.buffers()]):
                raise ValueError(
                    f"{experts.name} is {experts.storage}, and its experts are stored one by one or in another dtype, "
                    "so that no file holds its stacks. Copy the folder that it was loaded from, or load the model "
                    "into memory to save it. Adapters are saved by themselves."
                )
        for store in self._stores():
            store.reader.check()

    def close(self) -> None:
        """Close the files and end the threads of offloaded experts; the model cannot be used any more.

        Garbage collection of a model closes it, too. Without offloaded experts this does nothing.
        """
        for store in self._stores():
            store.close()
