"""Loading experts into bitsandbytes' formats: one expert after the other, whatever way a checkpoint stores them.

transformers would hand over whole stacks, on the device already: bitsandbytes' kernels count in 32 bits, and a stack in
16 bits takes four times the memory of what is made of it. So the experts are taken out of what transformers loads, and
each is read, moved, quantized and forgotten by itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.integrations.accelerate import get_device
from transformers.modeling_utils import load_state_dict

from ...configuration.errors import CheckpointError
from ..checkpoints import DTYPE_NAMES, WEIGHT_DTYPES, forget_pages, return_freed_memory
from .bnb_experts import BitsAndBytesExperts
from .bnb_files import PLACES, Stored, check_scales, parse, parse_router, read_matrix
from .experts import STACKS

_Matrices = dict[tuple[int, int], dict[str, Stored]]
"""Of a stack: number of the expert and place of the matrix, to the kinds of tensors that it has."""


def packed_experts(model: nn.Module) -> dict[str, BitsAndBytesExperts]:
    """A model's experts in bitsandbytes' formats, by their paths."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BitsAndBytesExperts)}


class ExpertsOfCheckpoint:
    """The experts that a checkpoint has for a model's packed ones.

    Attributes:
        others: all other tensors of the checkpoint.
        names: of the experts' tensors in the checkpoint.
        keys: of the model's packed stacks and what belongs to them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        state_dict: Mapping[str, Any] | None,
        files: Iterable[str] | None,
        load_config: Any,
    ):
        """Find the experts.

        Args:
            model: empty, with packed experts.
            state_dict: the checkpoint, if it is in memory.
            files: of the checkpoint, otherwise.
            load_config: transformers' record of the loading.

        Raises:
            ValueError: a model that several processes share.
        """
        if load_config.device_mesh is not None:
            raise ValueError(
                "Experts that bitsandbytes quantizes cannot be shared by several processes (tp_plan, tp_size, "
                "ep_size): leave these out, or name the experts in llm_int8_skip_modules."
            )
        self._experts = packed_experts(model)
        self._is_packed_there = load_config.hf_quantizer.pre_quantized
        self._whole: dict[str, Stored] = {}
        self._single: dict[str, _Matrices] = {}
        self.others: dict[str, Any] = {}
        self.names: set[str] = set()
        self.keys = {
            f"{path}.{name}" for path, experts in self._experts.items() for name in experts.state_dict()
        }
        routers: dict[str, dict[str, Stored]] = {}
        stacks = {f"{path}.{stack}" for path in self._experts for stack in STACKS}
        rules = [rule for rule in load_config.weight_mapping or () if isinstance(rule, WeightRenaming)]

        def key_of(name: str) -> str:
            return rename_source_key(name, [], [], model.base_model_prefix, dict.fromkeys(stacks, True))[0]

        for origin, name, tensor in _tensors(state_dict, files, load_config.disable_mmap):
            renamed = rename_source_key(name, rules, [])[0]
            stored = Stored(tensor, name, origin)
            if parsed := parse(renamed):
                path, number, word, kind = parsed
                stack, place = PLACES[word]
                key = key_of(f"{path}.{stack}")
                if key in stacks:
                    matrices = self._single.setdefault(key, {})
                    matrices.setdefault((number, place), {})[kind] = stored
                    self.names.add(name)
                    continue
            elif self._is_packed_there and (parsed := parse_router(renamed)):
                routers.setdefault(parsed[0], {})[parsed[1]] = stored
                continue
            elif (key := key_of(renamed)) in stacks:
                self._whole[key] = stored
                self.names.add(name)
                continue
            self.others[name] = tensor
        for found in routers.values():
            self._unpack_router(found)

    def _unpack_router(self, found: Mapping[str, Stored]) -> None:
        """Give a router's weight to the others: transformers 4 took routers for linear layers, and quantized them."""
        experts = next(iter(self._experts.values()))
        form, stored = experts.formats["down_proj"], found.get("weight")
        if stored is not None and (len(found) > 1 or not stored.tensor.is_floating_point()):
            sizes = experts.num_experts, experts.sizes["down_proj"][0]
            weight = form.one_matrix(read_matrix(form, found, sizes), sizes, experts.weight_dtype)
            self.others[stored.name] = weight
        else:
            self.others.update({each.name: each.tensor for each in found.values()})

    def check(self) -> None:
        """Check that all experts are there; what single ones in 16 bit are is checked for every model.

        Raises:
            CheckpointError: they are not, or have another shape than the model's.
        """
        for path, experts in self._experts.items():
            for stack in STACKS:
                if self._is_packed_there:
                    self._check_packed(path, stack, experts)
                elif f"{path}.{stack}" not in self._single:
                    self._check_whole(f"{path}.{stack}", experts.stack_shape(stack))

    @torch.no_grad()
    def load(self, device_map: Mapping[str, Any] | None) -> None:
        """Fill the model's packed experts.

        Args:
            device_map: where they go; None for the CPU.

        Raises:
            CheckpointError: an expert is not stored as config.json says, or its scales are no numbers.
        """
        for path, experts in self._experts.items():
            for stack in STACKS:
                key = f"{path}.{stack}"
                place = get_device(dict(device_map or {"": "cpu"}), key, valid_torch_device=True)
                device = torch.device(place)
                read = self._read_packed if self._is_packed_there else self._quantize
                _fill(experts, stack, read(experts, stack, key, device), device)

    def _read_packed(
        self, experts: BitsAndBytesExperts, stack: str, key: str, device: torch.device
    ) -> Iterator[tuple[int, int, Sequence[torch.Tensor]]]:
        """Number of the expert, place and parts of each matrix."""
        form = experts.formats[stack]
        for (number, place), found in self._single[key].items():
            yield number, place, read_matrix(form, found, form.of_one(experts.sizes[stack]))
            for stored in found.values():
                forget_pages(stored.tensor)

    def _quantize(
        self, experts: BitsAndBytesExperts, stack: str, key: str, device: torch.device
    ) -> Iterator[tuple[int, int, Sequence[torch.Tensor]]]:
        """The same, of matrices in 16 or 32 bits; on the device, whose kernels may round otherwise."""
        form = experts.formats[stack]

        def quantized(weight: torch.Tensor, name: str) -> list[torch.Tensor]:
            # In the dtype of the model first, as transformers does with linear layers.
            parts = form.quantize_one(weight.to(device).to(experts.weight_dtype))
            for part in parts[1:]:
                if part.is_floating_point():
                    check_scales(part, name)
            return parts

        if key not in self._whole:
            for (number, place), found in self._single[key].items():
                stored = found["weight"]
                yield number, place, quantized(stored.tensor, str(stored))
                forget_pages(stored.tensor)
            return
        stored = self._whole[key]
        for number, one in enumerate(stored.tensor.unbind(0)):
            matrix = one.T if experts.is_transposed else one
            for place, weight in enumerate(matrix.chunk(form.matrices)):
                yield number, place, quantized(weight, f"{stored}[{number}]")
            forget_pages(one)

    def _check_whole(self, key: str, wanted: tuple[int, ...]) -> None:
        if key not in self._whole:
            raise CheckpointError(f"{key} is missing: the checkpoint has no such experts, fused or not.")
        stored = self._whole[key]
        if DTYPE_NAMES.get(stored.tensor.dtype) not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{stored} has dtype {str(stored.tensor.dtype).removeprefix('torch.')}, which is no dtype of plain "
                "weights. Quantize the original checkpoint."
            )
        if tuple(stored.tensor.shape) != wanted:
            raise CheckpointError(
                f"{stored} has shape {list(stored.tensor.shape)}, but the model that config.json describes has "
                f"{list(wanted)}. Weights and config.json do not belong together."
            )

    def _check_packed(self, path: str, stack: str, experts: BitsAndBytesExperts) -> None:
        """Check that each expert has its weights in a stack."""
        key, num_experts = f"{path}.{stack}", experts.num_experts
        matrices = self._single.get(key, {})
        first = next((found["weight"] for found in matrices.values() if "weight" in found), None)
        if first is None:
            raise CheckpointError(
                f"{key} is missing: the checkpoint has no quantized experts for it, though it has others. Download or "
                "copy it again."
            )
        if other := self._whole.get(key):
            raise CheckpointError(f"{first} is there a second time: {other} has it, too.")
        count = experts.formats[stack].matrices
        wanted = [(number, place) for number in range(num_experts) for place in range(count)]
        if over := matrices.keys() - set(wanted):
            raise CheckpointError(
                f"{next(iter(matrices[min(over)].values()))} is of expert {min(over)[0]}, but num_local_experts in "
                f"config.json is {num_experts}."
            )
        lost = [place for place in wanted if "weight" not in matrices.get(place, {})]
        if lost:
            name = experts.name_of_layer(f"{first.name.partition('.experts.')[0]}.experts", stack, *lost[0])
            raise CheckpointError(
                f"{first.origin}: {name}.weight is missing ({len(lost)} such), though the checkpoint has {first.name}, "
                f"and num_local_experts in config.json is {num_experts}. Download or copy the checkpoint again."
            )


def _fill(
    experts: BitsAndBytesExperts,
    stack: str,
    matrices: Iterable[tuple[int, int, Sequence[torch.Tensor]]],
    device: torch.device,
) -> None:
    """Fill the parts of a stack with those of its matrices."""
    form = experts.formats[stack]
    wholes = [
        torch.empty(experts.num_experts, *shape, dtype=dtype, device=device)
        for shape, dtype in form.parts(experts.sizes[stack])
    ]
    if device.type != "meta":
        for number, place, parts in matrices:
            for whole, part in zip(wholes, parts, strict=True):
                whole[number, place] = part
            # What quantizing one needed would lie between the parts otherwise.
            return_freed_memory()
    for suffix, whole in zip(form.suffixes, wholes, strict=True):
        tensor = whole if suffix else nn.Parameter(whole, requires_grad=False)
        # Otherwise transformers begins with fresh numbers.
        vars(tensor)["_is_hf_initialized"] = True
        setattr(experts, stack + suffix, tensor)


def _tensors(
    state_dict: Mapping[str, Any] | None, files: Iterable[str] | None, disable_mmap: bool | None
) -> Iterator[tuple[str, str, Any]]:
    """Origin, name and content of each tensor; those of files are mapped."""
    if state_dict is not None:
        for name, tensor in state_dict.items():
            yield "state_dict", name, tensor
        return
    for file in files or ():
        for name, tensor in load_state_dict(file, disable_mmap=disable_mmap).items():
            yield str(file), name, tensor
