"""Loading of a model with offloaded experts, by `device_map={"experts": "disk"}`.

transformers and accelerate do not support such maps. So `take_request` removes the names of experts from the map, and
keeps the request in `checkpoints.loading` while the model loads. The experts have no weights until everything else is
loaded; then they get their store.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled

from ...configuration.sizes import bytes_of
from ..checkpoints import current_loading, device_of, names_in_model
from ..moe import STACKS, Experts
from ..quantization import of_stack
from .budget import bytes_of_expert, default_size
from .experts import OffloadedExperts, offloaded_in
from .pieces import find_packed_pieces, find_pieces
from .store import Store

ALL = "experts"
"""In a device map: the routed experts of all layers."""


@dataclass
class OffloadRequest:
    """A request to `from_pretrained`: devices by names of experts (or `ALL`), and the bytes of the expert cache."""

    places: dict[str, Any]
    memory: int | None


def take_request(kwargs: dict[str, Any]) -> OffloadRequest | None:
    """Remove the offloading request from the arguments of `from_pretrained`, and return it.

    Raises:
        ValueError: an invalid memory size, or several processes.
    """
    memory, device_map = kwargs.pop("experts_memory", None), kwargs.get("device_map")
    if memory is not None:
        memory = bytes_of("experts_memory", memory, least=1)
    if device_map == "disk":
        # A device map that is a single name applies to the whole model.
        device_map = {"": "disk"}
    elif memory is not None and not isinstance(device_map, Mapping):
        device_map = {ALL: "disk"} if device_map is None else {"": device_map, ALL: "disk"}
    if not isinstance(device_map, Mapping):
        return None
    # Under this name other devices than these two may mean all layers, not only experts.
    places = {
        name: device
        for name, device in device_map.items()
        if name == ALL or (name.endswith(f".{ALL}") and _is_place(device))
    }
    # Copy the map: it is changed in place once the model is known.
    kwargs["device_map"] = {name: device for name, device in device_map.items() if name not in places}
    if not places:
        return None
    if (
        kwargs.get("distributed_config") is not None
        or kwargs.get("tp_plan") is not None
        or is_deepspeed_zero3_enabled()
        or is_fsdp_enabled()
    ):
        raise ValueError(
            "Experts on disk or in RAM are for one process: leave distributed_config, tp_plan, ZeRO-3 and FSDP out, "
            "or the experts out of device_map."
        )
    here = torch.accelerator.current_device_index() if torch.accelerator.is_available() else "cpu"
    kwargs["device_map"] = kwargs["device_map"] or {"": here}
    return OffloadRequest(places, memory)


def _is_place(device: Any) -> bool:
    return str(device) in ("disk", "cpu")


def _rows_device(name: str, device_map: Mapping[str, Any]) -> torch.device:
    """Return the device on which the layer of these experts computes."""
    device = device_of(name.rpartition(".")[0], device_map)
    if device is None or _is_place(device):
        # accelerate moves offloaded weights to the main device.
        device = next((other for other in device_map.values() if not _is_place(other)), "cpu")
    return torch.device(device)


def replace_with_offloaded(model: nn.Module, files: list[str] | None, load_config: Any) -> None:
    """Replace the requested experts of an empty model, before its weights are read.

    Raises:
        ValueError: the files' format of experts differs from that in memory, experts are to be quantized, or the
            weights are not in safetensors files.
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
        # "cpu" for a layer that computes on the CPU is no offloading.
        stays = str(device) == "cpu" and _rows_device(name, device_map).type == "cpu"
        if stays or not _is_place(device) or name not in layers:
            device_map[name] = device
        else:
            chosen[name] = str(device)
    if not chosen:
        return
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise ValueError(
            "device_map puts experts on disk or in RAM, from where they are read out of safetensors files, but the "
            f"weights are in {files[0] if files else 'a state dict'}: write a folder by `llamoe convert` or "
            "save_pretrained, and load that."
        )
    taken: dict[str, Any] = {name: layers[name] for name in chosen}
    layout, matrices = current_loading().layout, current_loading().matrices or {}
    if any(of_stack(matrices.get(f"{name}.{stack}", {})) for name in taken for stack in STACKS):
        raise ValueError(
            f"{next(iter(taken))} has another program's stacks of scales, and is not read from disk or RAM: write "
            "a folder by `llamoe quantize FOLDER TARGET --to int4`, and load that."
        )
    quantizer = load_config.hf_quantizer
    if quantizer and not quantizer.pre_quantized and any(experts.is_packed for experts in taken.values()):
        raise ValueError(
            "Experts on disk or in RAM are read as they are stored, but quantization_config asks for quantized ones: "
            "write a quantized folder by `llamoe quantize` or save_pretrained, and load that."
        )
    # Use absolute paths: the files are read later, perhaps after a change of the working directory.
    files = [os.path.abspath(file) for file in files]
    packed = {name: experts for name, experts in taken.items() if f"{name}.{STACKS[0]}" in matrices}
    plain = {name: experts for name, experts in taken.items() if name not in packed}
    stored = find_packed_pieces(packed, files, matrices, layout)
    if plain:
        stored |= find_pieces(plain, files, names_in_model(model, load_config.weight_mapping))
    ignored = set(model._keys_to_ignore_on_load_unexpected or ())
    for name, place in chosen.items():
        model.set_submodule(name, OffloadedExperts(taken[name], name, place, stored[name]))
        ignored.add(re.escape(name[name.find("layers.") :]) + r"\.")
    model._keys_to_ignore_on_load_unexpected = ignored


# Leave inference mode: other threads, which are not in that mode, write to this memory.
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
            # Layers that compute on several devices share the memory in RAM.
            size = size * sum(map(_nbytes, group)) // on_disk
        layers = {experts.name: experts.shapes for experts in group}
        store = Store(layers, {experts.name: experts.stored for experts in group}, place, device, size)
        for experts in group:
            experts.connect(store)
    model.hf_device_map = _devices_of_rows(device_map, waiting)


def _devices_of_rows(device_map: Mapping[str, Any], offloaded: list[OffloadedExperts]) -> dict[str, Any]:
    """Return a device map with the devices on which offloaded experts compute, instead of "disk" or "cpu".

    accelerate, peft and Trainer assume that such modules are loaded by accelerate's hooks: they add hooks again,
    estimate what fits, or refuse to train the model. Offloaded experts need no hooks.
    """
    experts = {layer.name: layer.device for layer in offloaded}
    others = {name: device for name, device in device_map.items() if name not in experts}
    if "disk" not in others.values() and len({torch.device(device) for device in others.values()}) <= 1:
        # Use a torch.device: libraries take the string "cpu" for a module with hooks.
        others = {name: torch.device(device) for name, device in others.items()}
    return {**others, **experts}


def _nbytes(experts: OffloadedExperts) -> int:
    return bytes_of_expert(experts.shapes) * experts.num_experts


class OffloadMixin(nn.Module):
    """A mixin for models that may have experts on disk or in RAM: statistics, closing, and refusals."""

    def _stores(self) -> list[Store]:
        return list(dict.fromkeys(experts.store for experts in offloaded_in(self) if experts.store))

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as `PreTrainedModel.load_adapter`."""
        # `from_pretrained` of an adapter's folder calls this before it returns.
        attach_stores(self)
        return super().load_adapter(*args, **kwargs)  # type: ignore[misc]

    def experts_statistics(self, reset: bool = False) -> dict[str, dict[str, int]]:
        """Count hits, misses and bytes read of each layer whose experts are on disk or in RAM.

        An expert counts once for each forward or backward pass that needs it. A hit was in the expert cache;
        "bytes_read" counts bytes from files, or from RAM to the accelerator.

        Args:
            reset: restart all counts from 0.

        Returns:
            the name of the layer's experts to its "hits", "misses" and "bytes_read"; empty where all experts are on
            the device.
        """
        return {
            layer: counts for store in self._stores() for layer, counts in store.statistics(reset).items()
        }

    def check_saving(self) -> None:
        """Raise a `ValueError` if offloaded experts cannot be saved, since no file has their stacks as a whole."""
        for experts in offloaded_in(self):
            if any(tensor.is_meta for tensor in [*experts.parameters(), *experts.buffers()]):
                raise ValueError(
                    f"{experts.name} is {experts.storage}, and its experts are stored one by one or in another dtype, "
                    "so that no file holds its stacks. Copy the folder that it was loaded from, or load the model "
                    "into memory to save it. Adapters are saved by themselves."
                )
        for store in self._stores():
            # The saved tensors are memory maps of these files, so check that the files have not changed.
            store.reader.check()

    def dequantize(self, *args: Any, **kwargs: Any) -> Any:
        """Dequantize as `PreTrainedModel.dequantize`; raise a `ValueError` for offloaded packed experts."""
        for experts in offloaded_in(self):
            if experts.is_packed:
                raise ValueError(
                    f"dequantize: {experts.name} is {experts.storage}: load the model into memory."
                )
        return super().dequantize(*args, **kwargs)  # type: ignore[misc]

    def close(self) -> None:
        """Close the files and end the threads of offloaded experts; a closed model refuses to compute.

        A model that is garbage-collected is closed, too. Without offloaded experts, does nothing.
        """
        for store in self._stores():
            store.close()
