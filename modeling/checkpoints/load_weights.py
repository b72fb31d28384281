"""Weights that a checkpoint stores otherwise than the model holds them, as transformers' loader takes them.

The loader reads a tensor's slices when it sets the parameter. Here it is given the parts of weights that no file has,
which are made at that moment. Of a stack each expert is read, moved to the device, written to its place and forgotten.
Where processes share a model, the loader asks each for its shard. A weight that is to be quantized is given whole: the
quantizer's own operation follows.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import load_state_dict

from ..moe import PARTS_OF_STACKS, ExpertMatrix, Experts, fuse, put_matrix
from .expert_index import (
    WEIGHT,
    Index,
    StoredStack,
    check_experts,
    index_experts,
    names_in_model,
)
from .mapped_memory import forget_pages, return_freed_memory
from .safetensors_files import DTYPE_NAMES
from .stored import Stored, headers_of, tensors_of

# The tensors of a packed router's weight: its name, and what follows it or stands in its place.
_ROUTER = re.compile(r"(.*\.(?:feed_forward\.router|mlp\.gate)\.)(?:weight(?:\.(.+))?|(SCB|weight_format))")


def make_weights(
    model: PreTrainedModel,
    state_dict: Mapping[str, Any] | None,
    files: Sequence[str],
    load_config: Any,
) -> tuple[Mapping[str, Any] | None, list[str]]:
    """A state dict that has an empty model's weights as the model holds them.

    Args:
        model: empty; in the places of modules that will be packed stand packed ones.
        state_dict: the checkpoint, if it is in memory.
        files: of the checkpoint, otherwise.
        load_config: transformers' record of the loading.

    Returns:
        the checkpoint's other tensors, mapped from the files, and under the model's names the `Part`s that are made; or
        the given `state_dict` if all weights are stored as the model holds them. And the names of the plain stacks that
        are made.

    Raises:
        CheckpointError: an expert is missing, there twice, or has another shape or dtype than the model's.
        ValueError: single experts that ZeRO-3 does not load.
    """
    quantizer = load_config.hf_quantizer
    is_packed = quantizer is not None and quantizer.pre_quantized
    names = names_in_model(model, load_config.weight_mapping)
    experts, as_linears = {}, None
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            # Offloaded experts have others that know their shapes.
            shapes = getattr(module, "shapes", module)
            if is_packed and shapes.is_packed_one_by_one:
                as_linears = shapes
            # What other programs have packed, the quantizer's rules read.
            layout = getattr(quantizer, "layout", None)
            if not (module.is_offloaded or layout and (module.is_packed or not layout.is_int4)):
                experts[name] = module
    if not (experts or as_linears):
        return state_dict, []
    stored = headers_of(files) if state_dict is None else tensors_of(state_dict)
    index = index_experts(experts, stored, names, is_packed) if experts else {}
    made: dict[str, _Made] = dict(_stacks(experts, index, is_packed, load_config))
    if as_linears is not None:
        made |= _routers(as_linears, stored, names)
    if not made:
        return state_dict, []
    content = dict(state_dict or {})
    for file in files if state_dict is None else ():
        content |= load_state_dict(file, disable_mmap=load_config.disable_mmap)
    parts = {}
    for path, weight in made.items():
        weight.take_from(content)
        parts |= {f"{path.rpartition('.')[0]}.{name}": Part(weight, name) for name in weight.parts}
    return content | parts, [path for path, weight in made.items() if isinstance(weight, _PlainStack)]


def _routers(
    experts: Experts, stored: Iterable[Stored], names: Callable[[str], list[str]]
) -> dict[str, "_Made"]:
    """The packed weights of routers, by their names in the files: transformers 4 took routers for linear layers."""
    found: dict[str, dict[str, Stored]] = {}
    for tensor in stored:
        if match := _ROUTER.fullmatch(names(tensor.name)[0]):
            found.setdefault(match[1], {})[match[2] or match[3] or WEIGHT] = tensor
    return {
        kinds[WEIGHT].name: _Router(experts, kinds)
        for kinds in found.values()
        if WEIGHT in kinds and (len(kinds) > 1 or kinds[WEIGHT].dtype in ("U8", "I8"))
    }


def _stacks(
    layers: Mapping[str, Experts],
    index: Index,
    is_packed: bool,
    load_config: Any,
) -> Iterator[tuple[str, "_Made"]]:
    """The stacks that are not stored as the model holds them, by name."""
    for layer, found in index.items():
        experts = layers[layer]
        is_single = any(stack.single for stack in found.values())
        if not (is_single or experts.is_packed):
            continue
        check_experts(layer, experts, found, is_packed, load_config.ignore_mismatched_sizes)
        if not experts.is_packed and is_deepspeed_zero3_enabled():
            # Those of Mixtral transformers fuses.
            if experts.is_transposed:
                first = next(stack.first for stack in found.values() if stack.single)
                raise ValueError(
                    f"{first} is one linear layer of one expert, which ZeRO-3 does not load: fuse the experts first, "
                    "by `llamoe convert IN OUT`."
                )
            continue
        for stack, each in found.items():
            if each.single and is_packed and experts.is_packed:
                yield f"{layer}.{stack}", _PackedStack(experts, stack, each)
            elif each.single:
                yield f"{layer}.{stack}", _PlainStack(experts, stack, each)


class _Made:
    """A weight that is made of tensors of a checkpoint.

    Attributes:
        parts: shape and dtype of each of its parts, by name.
        stored: the tensors, in dictionaries by their kind.
    """

    parts: dict[str, tuple[tuple[int, ...], torch.dtype]]
    stored: list[dict[str, Stored]]

    def __init__(self):
        self._lock = threading.Lock()
        self._made: dict[str, torch.Tensor] = {}

    def take_from(self, content: dict[str, Any]) -> None:
        """Take its tensors out of a state dict."""
        for kinds in self.stored:
            for kind, stored in kinds.items():
                kinds[kind] = stored._replace(content=content.pop(stored.name))

    @torch.no_grad()
    def take(self, part: str, device: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """One of its parts on a device; all are made when the first is asked for."""
        # transformers asks from several threads.
        with self._lock:
            if part not in self._made:
                self._made |= self.make(torch.device("cpu" if device is None else device), dtype)
                return_freed_memory()
            return self._made.pop(part)

    def make(self, device: torch.device, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """The parts; plain numbers in this dtype."""
        raise NotImplementedError

    def shard(self, index: Sequence[slice]) -> torch.Tensor:
        """The rows, columns … that a process holds of a weight without parts."""
        raise NotImplementedError


class _Router(_Made):
    """The weight of a router that is packed as an expert's matrix would be."""

    def __init__(self, experts: Any, kinds: dict[str, Stored]):
        super().__init__()
        self._experts, self.stored = experts, [kinds]
        shape = experts.num_experts, experts.sizes_of("down_proj")[0]
        self.parts = {"weight": (shape, experts.weight_dtype)}

    def make(self, device: torch.device, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        return {"weight": self._experts.unpacked_router(self.stored[0]).to(device, dtype)}


class _Stack(_Made):
    """A stack of a layer's experts."""

    def __init__(self, experts: Experts, name: str, stored: StoredStack):
        super().__init__()
        self._experts: Any = experts
        self._name, self._stack = name, stored
        self.stored = [*stored.single.values()]

    def _one_by_one(self) -> Iterator[Sequence[Mapping[str, Stored]]]:
        """Of each expert its matrices `[out, in]`, gate before up or both in one, as tensors by kind."""
        count, places = (1 + max(each) for each in zip(*self._stack.single, strict=True))
        for number in range(count):
            matrices = [self._stack.single[number, place] for place in range(places)]
            yield matrices
            for each in (each for kinds in matrices for each in kinds.values()):
                forget_pages(each.content)


class _PackedStack(_Stack):
    """A stack whose experts are packed one by one."""

    def __init__(self, experts: Any, name: str, stored: StoredStack):
        super().__init__(experts, name, stored)
        self.parts = {own: part for own, part in experts.part_shapes().items() if own.startswith(name)}

    def make(self, device: torch.device, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        return self._experts.parts_of_checkpoint(self._name, self._one_by_one(), device)


class _PlainStack(_Stack):
    """A stack of numbers whose experts are stored one by one."""

    def __init__(self, experts: Experts, name: str, stored: StoredStack):
        super().__init__(experts, name, stored)
        # The checkpoint's sizes: where they may differ from the model's, transformers draws the stack anew.
        first: Any = stored.first
        count, places = (1 + max(each) for each in zip(*stored.single, strict=True))
        sizes = first.shape[0] * places, first.shape[1]
        shape = (count, *(sizes[::-1] if experts.is_transposed else sizes))
        self.parts = {name: (shape, experts.dtype)}
        self._matrices = PARTS_OF_STACKS[experts.is_transposed][name]

    def make(self, device: torch.device, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        shape, own_dtype = self.parts[self._name]
        whole = torch.empty(shape, dtype=dtype or own_dtype, device=device)
        for number, found in enumerate(() if whole.is_meta else self._one_by_one()):
            for part, kinds in zip(self._matrices, found, strict=True):
                matrix = ExpertMatrix(number, part)
                put_matrix(kinds[WEIGHT].content, whole, matrix, self._experts.is_transposed)
        return {self._name: whole}

    @torch.no_grad()
    def shard(self, index: Sequence[slice]) -> torch.Tensor:
        shape, dtype = self.parts[self._name]
        whole = torch.empty(
            [len(range(size)[each]) for size, each in zip(shape, index, strict=True)], dtype=dtype
        )
        for row, number in enumerate(range(shape[0])[index[0]]):
            found = {
                ExpertMatrix(0, part): self._stack.single[number, place][WEIGHT].content
                for place, part in enumerate(self._matrices)
            }
            whole[row] = fuse(found, self._experts.is_transposed)[0][tuple(index[1:])]
        return whole


class Part:
    """A tensor that is made when transformers' loader asks for it, as it asks a safetensors file for a slice."""

    def __init__(self, weight: _Made, name: str):
        self._weight, self._name = weight, name

    def get_shape(self) -> list[int]:
        """The sizes of the whole tensor."""
        return list(self._weight.parts[self._name][0])

    def get_dtype(self) -> str:
        """Its dtype in safetensors' spelling."""
        return DTYPE_NAMES[self._weight.parts[self._name][1]]

    def __getitem__(self, index: Any) -> Any:
        """Itself for an ellipsis, on its way to a device; or a shard."""
        return self if index is Ellipsis else self._weight.shard(index)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor; the dtype is that of plain numbers."""
        return self._weight.take(self._name, device, dtype)
