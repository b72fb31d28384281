"""Loading experts that a checkpoint stores otherwise than the model holds them, one expert after the other.

They are taken out of what transformers loads. Each expert is read, moved to its device, written to its place (or
quantized, or unpacked, as its module does it) and forgotten: transformers would hold a whole layer several times, and
hand over whole stacks to quantizers.

Where processes share a model, transformers' own rules load experts (`split_experts`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.accelerate import get_device, offload_weight

from ...configuration.errors import CheckpointError
from ..moe import PARTS_OF_STACKS, Experts
from .expert_index import (
    WEIGHT,
    Index,
    Stored,
    StoredStack,
    check_experts,
    check_numbers,
    headers_of,
    index_experts,
    names_in_model,
    tensors_of,
)
from .mapped_memory import forget_pages, return_freed_memory
from .safetensors_files import WEIGHT_DTYPES

# Quantizers that leave experts to llamoe, or there is none.
_METHODS = (None, "llamoe", "bitsandbytes")


def take_experts(
    model: PreTrainedModel,
    state_dict: Mapping[str, Any] | None,
    files: Iterable[str] | None,
    load_config: Any,
    dtype: torch.dtype | None = None,
) -> tuple["ExpertsOfCheckpoint | None", Index]:
    """Find the experts of an empty model that are stored otherwise than it holds them.

    Args:
        model: empty; in the places of experts that will be packed stand packed ones.
        state_dict: the checkpoint, if it is in memory.
        files: of the checkpoint, otherwise.
        load_config: transformers' record of the loading.
        dtype: in which weights are quantized; default: that in which they are stored.

    Returns:
        those that this process makes, or None; and those that `split_experts` fuses in processes that share the model.

    Raises:
        CheckpointError: an expert is missing, there twice, or has another shape or dtype than the model's.
        ValueError: experts that processes cannot share, or that ZeRO-3 does not load.
    """
    quantizer = load_config.hf_quantizer
    method = None if quantizer is None else quantizer.quantization_config.quant_method
    is_packed = quantizer is not None and quantizer.pre_quantized
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Experts) and not module.is_offloaded
    }
    tensors = headers_of(files or ()) if state_dict is None else tensors_of(state_dict, None)
    names = names_in_model(model, load_config)
    index = index_experts(layers, tensors, names, is_packed) if layers else {}
    by_transformers = (
        load_config.device_mesh is not None
        or is_deepspeed_zero3_enabled()
        or load_config.ignore_mismatched_sizes
        or getattr(method, "value", method) not in _METHODS
    )
    own: dict[str, Experts] = {}
    shared: Index = {}
    for layer, found in index.items():
        experts, is_single = layers[layer], any(stored.single for stored in found.values())
        if experts.is_packed and not experts.is_packed_one_by_one and is_packed and not is_single:
            continue
        if not experts.is_packed and not is_single:
            continue
        if is_packed and experts.is_packed_one_by_one:
            _check_packed_one_by_one(layer, experts, found)
        else:
            check_experts(layer, experts, found, is_packed, load_config.ignore_mismatched_sizes)
        if experts.is_packed or not by_transformers:
            own[layer] = experts
        elif experts.is_transposed:
            shared[layer] = found
    if shared and is_deepspeed_zero3_enabled():
        first = next(stored.first for found in shared.values() for stored in found.values() if stored.single)
        raise ValueError(
            f"{first} is one linear layer of one expert, which ZeRO-3 does not load: fuse the experts first, by "
            "`llamoe convert IN OUT`."
        )
    if own and load_config.device_mesh is not None:
        raise ValueError(
            f"{next(iter(own))} is to be quantized, and such experts cannot be shared by several processes (tp_plan, "
            "tp_size, ep_size): leave these out, or name the experts in llm_int8_skip_modules."
        )
    if not own:
        return None, shared
    tensors = list(tensors_of(state_dict, files, load_config.disable_mmap))
    index = index_experts(own, tensors, names, is_packed)
    for layer, experts in own.items():
        # Plain stacks are what transformers loads.
        if not experts.is_packed:
            index[layer] = {stack: stored for stack, stored in index[layer].items() if stored.single}
    taken = set().union(*(stored.names() for found in index.values() for stored in found.values()))
    others = {tensor.name: tensor for tensor in tensors if tensor.name not in taken}
    return ExpertsOfCheckpoint(own, index, others, names, dtype), shared


class ExpertsOfCheckpoint:
    """Experts that are made of what a checkpoint has.

    Attributes:
        others: all other tensors of the checkpoint, by their names there.
        names: the names that a key of the checkpoint may have in the model.
        keys: of the model's stacks and what belongs to them.
        fused: those of plain stacks, which no file has.
    """

    def __init__(
        self,
        layers: Mapping[str, Experts],
        index: Index,
        others: dict[str, Stored],
        names: Callable[[str], list[str]],
        dtype: torch.dtype | None,
    ):
        self._layers, self._index, self._dtype = layers, index, dtype
        self.others, self.names = others, names
        self.keys = {f"{layer}.{name}" for layer, experts in layers.items() for name in experts.state_dict()}
        self.fused = [
            f"{layer}.{stack}"
            for layer, found in index.items()
            for stack in found
            if not layers[layer].is_packed
        ]
        packed = (
            f"{layer}.{name}" for layer, own in layers.items() if own.is_packed for name in own.state_dict()
        )
        self.keys = {*self.fused, *packed}

    @torch.no_grad()
    def load(self, load_config: Any, offload_index: dict[str, Any] | None) -> None:
        """Fill the experts.

        Args:
            load_config: transformers' record of the loading, with the devices.
            offload_index: transformers' record of weights that stay on disk, to which stacks are added.

        Raises:
            CheckpointError: an expert is not stored as config.json says, or its scales are not numbers.
        """
        places = dict(load_config.device_map or {"": "cpu"})
        for layer, experts in self._layers.items():
            for stack, found in self._index[layer].items():
                place = get_device(places, f"{layer}.{stack}")
                device = torch.device("cpu" if place == "disk" else place)
                parts = experts.parts_of_checkpoint(
                    stack, _one_by_one(found, experts, stack), device, self._dtype
                )
                for name, tensor in parts.items():
                    if place == "disk":
                        offload_weight(
                            tensor, f"{layer}.{name}", load_config.disk_offload_folder, offload_index
                        )
                        continue
                    if name in experts._parameters:
                        trains = experts._parameters[name].requires_grad
                        tensor = nn.Parameter(tensor, requires_grad=trains)
                    # Otherwise transformers begins with fresh numbers.
                    vars(tensor)["_is_hf_initialized"] = True
                    setattr(experts, name, tensor)
                return_freed_memory()


def _one_by_one(
    stored: StoredStack, experts: Experts, stack: str
) -> Iterator[Sequence[Mapping[str, Stored]]]:
    """Of each expert its matrices `[out, in]`, gate before up or both in one, as tensors by kind."""
    if stored.single:
        for number in range(experts.num_experts):
            matrices = [
                stored.single[number, place]
                for place in range(len(PARTS_OF_STACKS[experts.is_transposed][stack]))
            ]
            yield matrices
            for kinds in matrices:
                for each in kinds.values():
                    forget_pages(each.content)
        return
    whole = stored.whole[""]
    for number, one in enumerate(whole.content.unbind(0)):
        matrix = one.T if experts.is_transposed else one
        yield [{WEIGHT: whole._replace(name=f"{whole.name}[{number}]", content=matrix)}]
        forget_pages(one)


def _check_packed_one_by_one(layer: str, experts: Experts, found: Mapping[str, StoredStack]) -> None:
    """Check that each expert has its packed matrices; what belongs to each is checked when it is unpacked."""
    for stack, stored in found.items():
        if not stored.single:
            raise CheckpointError(
                f"{layer}.{stack} is missing: the checkpoint has no quantized experts for it, though it has others. "
                "Download or copy it again."
            )
        if stored.whole:
            raise CheckpointError(f"{stored.first} is there a second time: {stored.whole['']} has it, too.")
        check_numbers(stack, experts, stored, experts.num_experts)
        for kinds in stored.single.values():
            if len(kinds) == 1 and kinds[WEIGHT].dtype in WEIGHT_DTYPES:
                raise CheckpointError(
                    f"{kinds[WEIGHT]} has dtype {kinds[WEIGHT].dtype}, though other experts of its layer are packed. "
                    "Quantize the original checkpoint again."
                )
