"""From a device map that names experts to a model whose experts are offloaded.

transformers and accelerate know modules and devices. So the names of experts are taken out of the map first; while the
model loads, these experts have no weights at all, and no one reads them; then each gets its store.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ...configuration.checks import listed
from ..checkpoints import device_of, forget_pages, is_mapped, names_in_model
from ..moe import Experts
from ..quantization import LlamoeQuantizer
from .budget import ExpertsMemory, default_size
from .experts import OffloadedExperts
from .memory import ALIGNMENT
from .pieces import StoredLayer, find_pieces
from .statistics import ExpertsStatistics
from .store import Store, bytes_of_expert, check_budget, with_stacks

ALL = "experts"
"""In a device map: the routed experts of all layers."""


@dataclass
class _Request:
    """What `from_pretrained` was asked for, and what came of it.

    Attributes:
        places: names of experts, or `ALL`, to devices.
        memory: for recently used experts.
        is_explicit: whether the caller named a memory.
        claimed: layers to their place and what the files have.
        shapes: layers to the empty experts.
    """

    places: dict[str, Any]
    memory: ExpertsMemory
    is_explicit: bool
    claimed: dict[str, tuple[str, StoredLayer]] = field(default_factory=dict)
    shapes: dict[str, Experts] = field(default_factory=dict)


_current: ContextVar[_Request | None] = ContextVar("llamoe_offload_request", default=None)


@contextmanager
def parse_experts_map(kwargs: dict[str, Any]) -> Iterator[None]:
    """Context of a load, in which experts are offloaded as the arguments of `from_pretrained` ask.

    `experts_memory` leaves the arguments, and experts leave their `device_map`.

    Raises:
        ValueError: a memory that is none, or that no experts need.
    """
    memory = kwargs.pop("experts_memory", None)
    device_map = kwargs.get("device_map")
    is_explicit = memory is not None
    if not isinstance(memory, ExpertsMemory):
        memory = ExpertsMemory(memory)
    if is_explicit and not isinstance(device_map, Mapping):
        if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
            raise ValueError(
                f"experts_memory={memory.size} beside device_map={device_map!r}, which places whole layers: "
                'give device_map={"experts": "disk"} or {"": 0, "experts": "cpu"}, or what llamoe.plan_placement plans.'
            )
        device_map = {ALL: "disk"} if device_map is None else {"": device_map, ALL: "disk"}
    places = {}
    if isinstance(device_map, Mapping):
        # Other devices than these two may stand for all layers, too.
        places = {
            name: device
            for name, device in device_map.items()
            if name == ALL or (isinstance(name, str) and name.endswith(f".{ALL}") and _name(device))
        }
    if is_explicit and not any(_name(device) for device in places.values()):
        raise ValueError(
            f"experts_memory={memory.size} is for experts on disk or in RAM, but device_map names none: give "
            '{"": "cpu", "experts": "disk"}, or other devices in place of these.'
        )
    if places:
        rest = {name: device for name, device in device_map.items() if name not in places}
        kwargs["device_map"] = rest or {"": _default_device()}
        if kwargs.get("distributed_config") is not None or kwargs.get("tp_plan") is not None:
            raise ValueError(
                "Experts on disk or in RAM are for one process: leave distributed_config and tp_plan out, or the "
                "experts out of device_map."
            )
    token = _current.set(_Request(places, memory, is_explicit) if places else None)
    try:
        yield
    finally:
        _current.reset(token)


def _name(device: Any) -> str | None:
    """The device "disk" or "cpu"; None for others."""
    text = str(device)
    return text if text in ("disk", "cpu") else None


def _default_device() -> Any:
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else "cpu"


def _main_device(device_map: Mapping[str, Any]) -> torch.device:
    """The device to which accelerate brings what is offloaded."""
    found = (device for device in device_map.values() if _name(device) is None)
    return torch.device(next(found, "cpu"))


def replace_with_offloaded(model: nn.Module, files: list[str] | None, load_config: Any) -> None:
    """Take the experts that were asked for out of an empty model, before its weights are read.

    Raises:
        CheckpointError: the checkpoint lacks an expert, or has it in another shape.
        ValueError: a model without experts, weights that are in no safetensors file, or experts that are to be
            quantized while they are loaded.
    """
    request = _current.get()
    if request is None:
        return
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    if ALL in request.places and not layers:
        raise ValueError(
            f"device_map[{ALL!r}] = {request.places[ALL]!r}, but {type(model).__name__} has no routed experts."
        )
    device_map = load_config.device_map
    places = {name: device for name, device in request.places.items() if name != ALL}
    if ALL in request.places:
        places = {**dict.fromkeys(layers, request.places[ALL]), **places}
    chosen: dict[str, Any] = {}
    for name, device in places.items():
        stays = _name(device) is None or name not in layers
        # Experts in RAM are where the rest of their layer computes.
        if stays or (_name(device) == "cpu" and _rows_device(name, device_map).type == "cpu"):
            device_map[name] = device
        else:
            chosen[name] = device
    if not chosen:
        # Names that the model does not have are told with the rest of the map.
        if request.is_explicit and places.keys() <= layers.keys():
            raise ValueError(
                "experts_memory is for experts on disk, or in RAM beside an accelerator; here they are where they are "
                'computed. Leave it out, or give device_map={"experts": "disk"}.'
            )
        return
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        if load_config.disk_offload_folder is not None and files and not request.is_explicit:
            device_map.update(chosen)
            return
        found = (
            f"{files[0]}: convert first, by `llamoe convert IN OUT`."
            if files
            else "a state dict in memory: save them first, by save_pretrained, and load that folder."
        )
        raise ValueError(
            f"device_map puts experts on {listed(sorted({str(d) for d in chosen.values()}))}, from where they are read "
            f"out of safetensors files, but the weights are {found}"
        )
    quantizer = load_config.hf_quantizer
    for name in chosen:
        is_read_so = isinstance(quantizer, LlamoeQuantizer) and quantizer.pre_quantized
        if layers[name].is_packed and not is_read_so:
            form: Any = layers[name]
            raise ValueError(
                f"device_map puts {name} on {chosen[name]!r}, where experts are read as they are stored, but they are "
                f"to be {form.format.key}: quantize the checkpoint first, by `llamoe quantize IN OUT --to "
                "int4`, and load OUT."
            )
    dtype = load_config.dtype if isinstance(load_config.dtype, torch.dtype) else None
    taken = {name: layers[name] for name in chosen}
    # The files are needed as long as the model is, wherever the process may go.
    files = [os.path.abspath(file) for file in files]
    stored = find_pieces(taken, files, names_in_model(model, load_config), dtype)
    ignored = set(model._keys_to_ignore_on_load_unexpected or ())
    for name, experts in taken.items():
        own_dtype = dtype or _stored_dtype(stored[name])
        empty = with_stacks(
            experts,
            experts.num_experts,
            lambda shape, packed, own=own_dtype, experts=experts: torch.empty(
                shape, dtype=packed if experts.is_packed else own, device="meta"
            ),
        )
        request.shapes[name] = empty
        request.claimed[name] = chosen[name], stored[name]
        model.set_submodule(name, OffloadedExperts(empty, name))
        ignored.add(re.escape(name[name.find("layers.") :]) + r"\.")
    model._keys_to_ignore_on_load_unexpected = ignored
    for place in ("disk", "cpu"):
        own = {name: shape for name, shape in request.shapes.items() if str(chosen[name]) == place}
        if request.memory.size is not None and own:
            check_budget(own, request.memory.size)


def _stored_dtype(stored: StoredLayer) -> torch.dtype:
    return stored.pieces["down_proj"][0][0].dtype


def _rows_device(name: str, device_map: Mapping[str, Any]) -> torch.device:
    """Where the layer of these experts computes."""
    device = device_of(name.rpartition(".")[0], device_map)
    return _main_device(device_map) if device is None or _name(device) else torch.device(device)


def attach_stores(model: nn.Module) -> None:
    """Give the experts that were taken out their stores, once everything else is loaded."""
    # Threads write to this memory, outside of a mode that the caller may be in.
    with torch.inference_mode(False):
        _attach_stores(model)


def _attach_stores(model: nn.Module) -> None:
    request = _current.get()
    if request is None or not request.claimed:
        return
    device_map = getattr(model, "hf_device_map", None) or {"": "cpu"}
    stores: list[Store] = []
    on_disk = default_size(torch.device("cpu")) if request.memory.size is None else request.memory.size
    places = {(str(place), _rows_device(name, device_map)) for name, (place, _) in request.claimed.items()}
    try:
        for place, device in sorted(places, key=str):
            names = [
                name
                for name, (own, _) in request.claimed.items()
                if (str(own), _rows_device(name, device_map)) == (place, device)
            ]
            memory = _share(request, names, on_disk) if place == "disk" else request.memory
            layers = {name: request.shapes[name] for name in names}
            stored = {name: request.claimed[name][1] for name in names}
            store = Store(layers, stored, place, device, memory)
            stores.append(store)
            for name in names:
                _connect(model.get_submodule(name), store, stored[name])
    except BaseException:
        for store in stores:
            store.close()
        raise
    _own_other_weights(model)
    model.hf_device_map = {**device_map, **{name: place for name, (place, _) in request.claimed.items()}}
    request.claimed.clear()


def _own_other_weights(model: nn.Module) -> None:
    """Copy the other weights on the CPU out of the files that they are maps of.

    A file that is cut would end the process, and one that is rewritten would change the model, before an expert that is
    needed can say so. This memory counts as the rest of the model's anyway.
    """
    for module in model.modules():
        if isinstance(module, OffloadedExperts):
            continue
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and is_mapped(tensor.data):
                mapped = tensor.data
                # Of the same alignment: products may differ with it in their last bits.
                memory = torch.empty(mapped.nbytes + ALIGNMENT, dtype=torch.uint8)
                first = (mapped.data_ptr() - memory.data_ptr()) % ALIGNMENT
                if first % mapped.itemsize:
                    tensor.data = mapped.clone()
                else:
                    own = memory[first : first + mapped.nbytes].view(mapped.dtype)
                    tensor.data = own.view(mapped.shape).copy_(mapped)
                forget_pages(mapped)


def _share(request: _Request, names: list[str], total: int) -> ExpertsMemory:
    """The part of the memory in RAM for experts of these layers, which compute on one device of several."""
    sizes = {
        name: bytes_of_expert(request.shapes[name]) * request.shapes[name].num_experts
        for name, (place, _) in request.claimed.items()
        if str(place) == "disk"
    }
    size = total * sum(sizes[name] for name in names) // sum(sizes.values())
    return replace(request.memory, size=size)


def _connect(experts: OffloadedExperts, store: Store, stored: StoredLayer) -> None:
    experts.store = store
    shapes: Any = experts._shapes
    for own_name in [*shapes._parameters, *shapes._buffers]:
        tensor = getattr(shapes, own_name).data
        if own_name in stored.whole:
            path, name = stored.whole[own_name]
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(name)
        if own_name in shapes._parameters:
            is_float = tensor.is_floating_point() and not experts.is_packed
            experts.register_parameter(own_name, nn.Parameter(tensor, requires_grad=is_float))
        else:
            experts.register_buffer(own_name, tensor)


class OffloadMixin(nn.Module):
    """Methods of every model for experts on disk or in RAM: statistics, closing, and what is refused."""

    def _stores(self) -> list[Store]:
        found = (module.store for module in self.modules() if isinstance(module, OffloadedExperts))
        return list(dict.fromkeys(store for store in found if store is not None))

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """As `PreTrainedModel.load_adapter`."""
        # `from_pretrained` of an adapter's folder calls this before it returns.
        attach_stores(self)
        own = [module for module in self.modules() if isinstance(module, OffloadedExperts)]
        places = getattr(self, "hf_device_map", None)
        if own:
            # Adapters lie where products are computed.
            self.hf_device_map = {**places, **{experts.name: experts.device for experts in own}}
        try:
            return super().load_adapter(*args, **kwargs)  # type: ignore[misc]
        finally:
            if own:
                self.hf_device_map = places

    def experts_statistics(self, reset: bool = False) -> dict[str, ExpertsStatistics]:
        """Hits, misses, bytes and time of each layer whose experts are on disk or in RAM.

        Args:
            reset: whether to count from 0 again.

        Returns:
            the name of the layer's experts to a copy of its counts; empty where all experts are on the device.
        """
        return {
            layer: counter.read(reset)
            for store in self._stores()
            for layer, counter in store.statistics.items()
        }

    def check_saving(self) -> None:
        """Check that all weights can be written to a folder.

        Raises:
            ValueError: offloaded experts that no file has as whole stacks.
        """
        for name, module in self.named_modules():
            if isinstance(module, OffloadedExperts) and any(
                tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]
            ):
                raise ValueError(
                    f"{name} is on {module.store.place!r}, and its experts are stored one by one or in another dtype, "
                    "so that its stacks are nowhere whole. Copy the folder that it was loaded from, or load the model "
                    "into memory to save it. Adapters are saved by themselves."
                )
        for store in self._stores():
            # What is saved are maps of these files.
            store.check_files()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        # A cast is refused before the first layer has changed.
        for module in self.modules():
            if isinstance(module, OffloadedExperts):
                module.check_cast(fn)
        return super()._apply(fn, recurse)

    def dequantize(self, *args: Any, **kwargs: Any) -> Any:
        """As `PreTrainedModel.dequantize`.

        Raises:
            ValueError: packed experts that are offloaded.
        """
        for name, module in self.named_modules():
            if isinstance(module, OffloadedExperts) and module.is_packed:
                raise ValueError(
                    f"dequantize: {name} is on {module.store.place!r}, where nothing can be changed. Load the model "
                    "into memory."
                )
        return super().dequantize(*args, **kwargs)  # type: ignore[misc]

    def close(self) -> None:
        """Close the files and end the threads of offloaded experts; a closed model refuses to compute.

        What nobody refers to any more is closed, too. Does nothing for other models.
        """
        for store in self._stores():
            store.close()
