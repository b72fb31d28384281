"""Which bytes of which file are one expert's matrix, for each way in which checkpoints store experts.

A stack is one tensor, of which an expert is a slice; or each expert's gate, up and down are tensors of their own,
`[out, in]`. A packed stack has several parts, each with an axis for experts in front. Either way, a matrix is one or
more pieces of contiguous bytes, and nothing but a transposition or a cast lies between a file and memory.

Shapes: E experts, H hidden_size, I intermediate_size.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ...configuration.errors import CheckpointError
from ..checkpoints import DTYPES, WEIGHT_DTYPES, expert_of, read_header
from ..moe import Experts

STACKS = ("gate_up_proj", "down_proj")
# Of plain weights, and of the codes of packed ones and what belongs to them.
_READ = sorted({*WEIGHT_DTYPES, "U8", "I8", "I32", "I64"})
# Of a fused matrix `[out, in]` these stand one below the other.
_ORDER = {"gate": 0, "up": 1, "w1": 0, "w3": 1, "down": 0, "w2": 0}
_STACK_OF = {"gate": "gate_up_proj", "up": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}


Identity = tuple[int, int, int, int]
"""Device, inode, size and time of change of a file: another one means other content."""


def identity_of(status: os.stat_result) -> Identity:
    """What tells one version of a file from another."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Piece(NamedTuple):
    """Contiguous bytes of a file, and where they go in the memory of one matrix.

    Attributes:
        path: of the file.
        begin: its first byte.
        shape: as stored.
        dtype: as stored.
        part: which part of the matrix it belongs to.
        rows: of the part as `[out, in]`, the first and the one after the last; None for the part as it lies in memory.
    """

    path: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: int = 0
    rows: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def place(self, parts: list[torch.Tensor], is_transposed: bool) -> torch.Tensor:
        """Where the piece goes in the parts of a matrix, in the shape of the piece."""
        part = parts[self.part]
        if self.rows is None:
            return part
        return (part.T if is_transposed else part)[slice(*self.rows)]


class Stored(NamedTuple):
    """Where the experts of one layer are.

    Attributes:
        pieces: of each stack, for each expert, its pieces.
        whole: each part of the stacks that is one tensor, in the model's dtype, to its file and its name there.
        files: all files of the checkpoint, and what they were before their headers were read.
    """

    pieces: dict[str, list[list[Piece]]]
    whole: dict[str, tuple[str, str]]
    files: dict[str, Identity]


def part_names(experts: Experts, stack: str) -> list[str]:
    """Names of a stack's parts: itself, and what belongs to packed codes."""
    form: Any = getattr(experts, "format", None)
    return [stack + suffix for suffix in form.suffixes] if experts.is_packed else [stack]


def find_pieces(
    layers: Mapping[str, Experts],
    files: Iterable[str],
    names: Callable[[str], Iterable[str]],
    dtype: torch.dtype | None = None,
) -> dict[str, Stored]:
    """Where a checkpoint has the experts of these layers.

    Args:
        layers: names in the model, and empty experts with the shapes of the model.
        files: all safetensors files of the checkpoint.
        names: the names that a file's key may have in the model.
        dtype: of the model's weights, where the experts are not packed.

    Raises:
        CheckpointError: an expert is missing, stored twice, or has another shape or an unknown dtype.
    """
    wanted = {
        f"{layer}.{name}": (layer, stack, index)
        for layer, experts in layers.items()
        for stack in STACKS
        for index, name in enumerate(part_names(experts, stack))
    }
    found: dict[str, dict[str, list[list[Piece]]]] = {
        layer: {stack: [[] for _ in range(experts.num_experts)] for stack in STACKS}
        for layer, experts in layers.items()
    }
    identities: dict[str, Identity] = {}
    stored = {layer: Stored(pieces, {}, identities) for layer, pieces in found.items()}
    for file in files:
        identities[str(file)] = identity_of(os.stat(file))
        for name, header in read_header(file).items():
            if "experts." not in name:
                continue
            for key in names(name):
                expert = expert_of(key)
                if key in wanted:
                    layer, stack, index = wanted[key]
                    _add_stack(stored[layer], layers[layer], file, name, header, (stack, index, key), dtype)
                    break
                if expert is not None and expert.experts in layers:
                    _add_expert(stored[expert.experts], layers[expert.experts], file, name, header, expert)
                    break
    for layer, experts in layers.items():
        _check_complete(layer, experts, stored[layer])
    return stored


def _dtype(file: str, name: str, header: Any) -> torch.dtype:
    if header.dtype not in _READ:
        raise CheckpointError(
            f"{file}: {name} has dtype {header.dtype}; experts are read from {', '.join(_READ)}."
        )
    return DTYPES[header.dtype]


def _add_stack(
    stored: Stored,
    experts: Experts,
    file: str,
    name: str,
    header: Any,
    place: tuple[str, int, str],
    model_dtype: torch.dtype | None,
) -> None:
    stack, index, key = place
    own_name = key.rpartition(".")[2]
    shape = tuple((getattr(experts, own_name)).shape)
    if header.shape != shape:
        raise CheckpointError(
            f"{file}: {name} has shape {list(header.shape)}, but the model that config.json describes has "
            f"{list(shape)}. Weights and config.json do not belong together."
        )
    dtype = _dtype(file, name, header)
    memory_dtype = getattr(experts, own_name).dtype if experts.is_packed else model_dtype or dtype
    if experts.is_packed and dtype != memory_dtype:
        raise CheckpointError(
            f"{file}: {name} has dtype {header.dtype}, but the quantization_config in config.json means {memory_dtype}."
        )
    size = math.prod(shape[1:]) * dtype.itemsize
    for expert, pieces in enumerate(stored.pieces[stack]):
        if any(piece.part == index for piece in pieces):
            raise CheckpointError(f"{file}: {name} is there a second time: {pieces[0].path} has it, too.")
        pieces.append(Piece(str(file), header.begin + expert * size, shape[1:], dtype, index))
    if dtype == memory_dtype:
        stored.whole[own_name] = str(file), name


def _add_expert(stored: Stored, experts: Experts, file: str, name: str, header: Any, expert: Any) -> None:
    hidden_size, intermediate_size = experts.hidden_and_intermediate_size
    stack = _STACK_OF.get(expert.part, "down_proj")
    shape = (intermediate_size, hidden_size) if stack == "gate_up_proj" else (hidden_size, intermediate_size)
    if experts.is_packed:
        raise CheckpointError(
            f"{file}: {name} is one expert by itself, where config.json says that experts are packed in stacks."
        )
    if expert.number >= experts.num_experts:
        raise CheckpointError(
            f"{file}: {name} is of expert {expert.number}, but config.json has {experts.num_experts} experts."
        )
    if header.shape != shape:
        raise CheckpointError(
            f"{file}: {name} has shape {list(header.shape)}, but the model that config.json describes has "
            f"{list(shape)}. Weights and config.json do not belong together."
        )
    first = _ORDER[expert.part] * shape[0]
    piece = Piece(str(file), header.begin, shape, _dtype(file, name, header), 0, (first, first + shape[0]))
    pieces = stored.pieces[stack][expert.number]
    if any(other.rows is None or other.rows == piece.rows for other in pieces):
        raise CheckpointError(f"{file}: {name} is there a second time: {pieces[0].path} has it, too.")
    pieces.append(piece)


def _check_complete(layer: str, experts: Experts, stored: Stored) -> None:
    for stack in STACKS:
        parts = len(part_names(experts, stack))
        every = stored.pieces[stack]
        for expert, pieces in enumerate(every):
            is_split = any(piece.rows is not None for piece in pieces)
            needed = (2 if stack == "gate_up_proj" else 1) if is_split else parts
            if len(pieces) != needed:
                folder = os.path.dirname(next(iter(stored.files)))
                found = f"{len(pieces)} of {needed} tensors of expert {expert}" if any(every) else "nothing"
                raise CheckpointError(
                    f"{folder}: {layer}.{stack} has {found}. Download or copy the checkpoint again."
                )
