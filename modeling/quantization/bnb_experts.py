"""Routed experts in bitsandbytes' formats, and the linear layers that they are in files.

An expert N is stored un-fused: `experts.N.gate_proj`, `up_proj` and `down_proj`, or Mixtral's `w1`, `w3` and `w2`.
What is checked of their tensors would otherwise give other weights without a word: codes of another table, scales of
other blocks, another layout.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...configuration.errors import CheckpointError
from ..checkpoints import DTYPES, WEIGHT, Stored, expert_of, headers_of
from ..formats import NESTED_BLOCKSIZE, BitsAndBytesFormat, Bnb4Bit, Parts, Sizes, code_of
from ..moe import PARTS_OF_STACKS, STACKS, Experts
from .packed import QuantizedExperts

STATE = "quant_state.bitsandbytes__"
_REMEDY = "The checkpoint is damaged, or is not that of this config.json: quantize the original one again."
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.\w+\.experts\b")
# The kinds of tensors that are parts of a matrix, in their order.
_PARTS = {True: (WEIGHT, "absmax", "nested_absmax"), False: (WEIGHT, "SCB")}


class BitsAndBytesExperts(QuantizedExperts):
    """Routed experts of which each matrix is what a linear layer of bitsandbytes would hold.

    Attributes:
        weight_dtype: of the weights that were quantized, which files record.
    """

    is_packed_one_by_one = True
    # Of one kind, which the base class does not know.
    formats: dict[str, Any]

    def __init__(self, experts: Experts, form: BitsAndBytesFormat, weight_dtype: torch.dtype):
        # Of two matrices, each by itself.
        super().__init__(experts, form, replace(form, matrices=2))
        self.weight_dtype = weight_dtype

    @torch.no_grad()
    def parts_of_checkpoint(
        self, stack: str, experts: Iterable[Sequence[Mapping[str, Stored]]], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """The parts of a stack by their names, on a device.

        Args:
            stack: its name.
            experts: of each expert its matrices in the checkpoint, as tensors by kind.
            device: of the parts.
        """
        form, sizes = self.formats[stack], self.formats[stack].of_one(self.sizes[stack])
        wholes = {
            part: torch.empty(shape, dtype=dtype, device=device)
            for part, (shape, dtype) in self.parts_of(stack).items()
        }
        for number, matrices in enumerate(experts if device.type != "meta" else ()):
            for place, kinds in enumerate(matrices):
                for whole, part in zip(wholes.values(), read_matrix(form, kinds, sizes), strict=True):
                    whole[number, place] = part
        return wholes

    def unpacked_router(self, kinds: Mapping[str, Stored]) -> torch.Tensor:
        """The weight `[experts, hidden]` of a router of which a checkpoint has these tensors, by kind."""
        form, sizes = self.formats["down_proj"], (self.num_experts, self.sizes["down_proj"][0])
        return form.one_matrix(read_matrix(form, kinds, sizes), sizes, self.weight_dtype)

    def matrix_in_files(self, stack: str, kinds: Mapping[str, Stored]) -> list[Stored | torch.Tensor]:
        """For each part of one of an expert's matrices where files have it, or its number, as `find_matrix`."""
        form = self.formats[stack]
        return find_matrix(form, kinds, form.of_one(self.sizes[stack]))

    def name_of_layer(self, path: str, stack: str, number: int, place: int) -> str:
        """Name of the linear layer that a matrix is un-fused.

        Args:
            path: of these experts.
            stack: that has the matrix.
            number: of the expert.
            place: of the matrix in the expert's part of the stack.
        """
        return f"{path}.{number}.{PARTS_OF_STACKS[self.is_transposed][stack][place]}"

    def unfused(self, path: str, storage: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of all linear layers that these experts are un-fused, with their names; in the same memory.

        Beside a weight of 4 bits stand `weight.absmax`, `weight.quant_map`, with double quantization
        `weight.nested_absmax` and `weight.nested_quant_map`, and the rest as JSON in bytes, in
        `weight.quant_state.bitsandbytes__nf4`; beside one of 8 bits `SCB` and `weight_format`.

        Args:
            path: of these experts.
            storage: dtype in which files hold the bytes of 4-bit codes.
        """
        for number, stack in itertools.product(range(self.num_experts), STACKS):
            form = self.formats[stack]
            for place in range(form.matrices):
                name = self.name_of_layer(path, stack, number, place)
                # In storages of their own: tensors that share one are saved into one file.
                parts = [torch.from_dlpack(part[number, place]) for part in self.parts(stack)]
                if isinstance(form, Bnb4Bit):
                    yield f"{name}.weight", parts[0].view(storage).view(-1, 1)
                    state = form.state(parts, form.of_one(self.sizes[stack]), self.weight_dtype)
                    # Files hold no tensor twice.
                    state.code = state.code.clone()
                    for kind, tensor in state.as_dict(packed=True).items():
                        yield f"{name}.weight.{kind}", tensor
                else:
                    yield f"{name}.weight", parts[0]
                    yield f"{name}.SCB", parts[1]
                    # Row by row, the only one that is left of several formats.
                    yield f"{name}.weight_format", torch.tensor(0, dtype=torch.uint8)


def packed_experts(model: nn.Module) -> dict[str, BitsAndBytesExperts]:
    """A model's experts in bitsandbytes' formats, by their paths."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BitsAndBytesExperts)}


def layer_of(path: str) -> str | None:
    """The layer's number in the name of experts, or of a tensor of theirs."""
    match = _LAYER.match(path)
    return match and match[1]


def packed_layers(files: Iterable[str]) -> dict[str, dict[str, Stored]]:
    """The layers whose experts are packed in these files: kinds of tensors there, and a tensor of each kind.

    Keys are those of `layer_of`, kinds those of `ExpertName`.
    """
    found: dict[str, dict[str, Stored]] = {}
    for stored in headers_of(files):
        expert = expert_of(stored.name.replace(".block_sparse_moe.", ".mlp."))
        if expert and (expert.kind != WEIGHT or stored.dtype in ("U8", "I8")):
            found.setdefault(layer_of(stored.name) or "", {}).setdefault(expert.kind, stored)
    return found


def first_state(kinds: Mapping[str, Stored]) -> dict[str, Any] | None:
    """Content of a `quant_state` of packed experts; None if they have none."""
    for kind, stored in kinds.items():
        if kind.startswith(STATE):
            return _facts_of(_opened(stored))
    return None


def _facts_of(stored: Stored) -> dict[str, Any]:
    """The content of a `quant_state`."""
    content = json.loads(bytes(stored.content.flatten().tolist()))
    return content | {"dtype": getattr(torch, content["dtype"]), "shape": tuple(content["shape"])}


def read_matrix(form: BitsAndBytesFormat, found: Mapping[str, Stored], sizes: Sizes) -> Parts:
    """The checked parts of one matrix.

    Args:
        form: that the model asks for.
        found: the matrix's tensors in the checkpoint, by kind; there is a weight.
        sizes: of the matrix.

    Raises:
        CheckpointError: a tensor is missing, has another shape or dtype, or means other weights than the format says.
    """
    kinds = _PARTS[isinstance(form, Bnb4Bit)]
    wanted = form.parts_of_one(*sizes)
    parts = [_need(found, kind).content for kind, _ in zip(kinds, wanted, strict=False)]
    if isinstance(form, Bnb4Bit):
        # Codes lie in bytes of any dtype.
        parts[0] = parts[0].contiguous().view(torch.uint8).flatten()
    elif (layout := found.get("weight_format")) is not None and layout.content.any():
        raise CheckpointError(f"{layout} is not 0, but a layout of old GPUs. {_REMEDY}")
    for kind, part, (shape, dtype) in zip(kinds, parts, wanted, strict=False):
        is_right = part.is_floating_point() if dtype.is_floating_point else part.dtype == dtype
        if tuple(part.shape) != shape or not is_right:
            raise CheckpointError(
                f"{found[kind]} has shape {list(part.shape)} and dtype {part.dtype}, where {list(shape)} and {dtype} "
                f"were expected. {_REMEDY}"
            )
    parts = [part.float() if part.is_floating_point() else part for part in parts]
    return [*parts, *_check_state(form, found, sizes)] if isinstance(form, Bnb4Bit) else parts


def _check_state(form: Bnb4Bit, found: Mapping[str, Stored], sizes: Sizes) -> list[torch.Tensor]:
    """Compare what a weight's state says with the format; the mean of its scales if these are nested."""
    state = _need(found, STATE + form.quant_type)
    said = _facts_of(state)
    wanted: dict[str, Any] = dict(blocksize=form.blocksize, shape=tuple(sizes), quant_type=form.quant_type)
    codes = {"quant_map": form.quant_type}
    if form.is_nested:
        wanted["nested_blocksize"] = NESTED_BLOCKSIZE
        codes["nested_quant_map"] = "dynamic"
    for field, value in wanted.items():
        if said.get(field) != value:
            raise CheckpointError(f"{state} says {field} {said.get(field)}, not {value}. {_REMEDY}")
    for kind, name in codes.items():
        stored, known = _need(found, kind), code_of(name, torch.device("cpu"))
        # bitsandbytes' own tolerance; NaN is not within it.
        if stored.content.shape != known.shape or not ((stored.content - known).abs() <= 1e-6).all():
            raise CheckpointError(f"{stored} has other numbers than bitsandbytes' codes have. {_REMEDY}")
    return [torch.tensor(said["nested_offset"], dtype=torch.float32)] if form.is_nested else []


def find_matrix(
    form: BitsAndBytesFormat, found: Mapping[str, Stored], sizes: Sizes
) -> list[Stored | torch.Tensor]:
    """For each part of one matrix the tensor that files have of it, or its number, which stands in a text.

    All but the numbers of codes and scales is checked. Arguments and errors as in `read_matrix`, but that headers are
    the tensors' content.
    """
    kinds = _PARTS[isinstance(form, Bnb4Bit)]
    opened = {kind: _opened(stored, is_empty=kind in kinds) for kind, stored in found.items()}
    parts = read_matrix(form, opened, sizes)
    return [found[kinds[place]] if part.is_meta else part for place, part in enumerate(parts)]


def _opened(stored: Stored, is_empty: bool = False) -> Stored:
    """A small tensor of a file, of which the header is known; or an empty one of its shape and dtype."""
    if is_empty:
        return stored._replace(content=torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta"))
    with open(stored.origin, "rb") as file:
        file.seek(stored.content.begin)
        content = file.read(stored.content.nbytes)
    found = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)
    return stored._replace(content=found.view(DTYPES[stored.dtype]).view(stored.shape))


def _need(found: Mapping[str, Stored], kind: str) -> Stored:
    if kind not in found:
        raise CheckpointError(
            f"{found[WEIGHT]}: its {kind} is missing, without which the codes mean nothing. {_REMEDY}"
        )
    return found[kind]
