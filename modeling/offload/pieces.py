"""Which bytes of which file are one expert's matrix, for each way in which checkpoints store experts.

A stack is one tensor, of which an expert is a slice; or each expert's gate, up and down are tensors of their own,
`[out, in]`. A packed stack has several parts, each with an axis for experts in front; bitsandbytes' have another axis
for gate and up, which files have by themselves. Either way, a matrix is one or more pieces of contiguous bytes, and
nothing but a transposition or a cast lies between a file and memory; what other programs have packed is read whole,
and packed as int4 is (`Unpack`).
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ...configuration.errors import CheckpointError
from ...configuration.json_files import FileStamp, stamp_of
from ..checkpoints import (
    DTYPES,
    WEIGHT,
    Stored,
    StoredStack,
    check_experts,
    headers_of,
    index_experts,
    shape_of_one,
    suffixes_in_files,
)
from ..formats import Parts
from ..moe import PARTS_OF_STACKS, STACKS, Experts
from ..quantization import Matrices, by_expert, parts_in_files


class Piece(NamedTuple):
    """Contiguous bytes of a file, and where they go in the memory of one matrix.

    Attributes:
        path: of the file.
        begin: its first byte.
        shape: as stored.
        dtype: as stored.
        part: which part of the matrix it belongs to.
        rows: of the part as `[out, in]`, which ones; or of a packed part, which matrix; None for the part as it lies
            in memory.
        is_kept: whether memory has the bytes of the file, and a kernel can read them where they lie in it.
    """

    path: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: int
    rows: slice | int | None
    is_kept: bool

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredLayer(NamedTuple):
    """Where the experts of one layer are.

    Attributes:
        pieces: of each stack, for each expert, its pieces; where `unpack` is given, the tensors that it takes.
        numbers: of each stack, for each expert, by the number of a part what no piece has of it.
        whole: each part of the stacks that is one tensor, in the model's dtype, to its file and its name there.
        files: all files of the checkpoint, and what they were before their headers were read.
        unpack: by stack, what makes the parts of a matrix of an expert's tensors that another program has packed.
    """

    pieces: dict[str, list[list[Piece]]]
    numbers: dict[str, list[dict[int, torch.Tensor]]]
    whole: dict[str, tuple[str, str]]
    files: dict[str, FileStamp]
    unpack: Mapping[str, "Unpack"] = {}


class Unpack(NamedTuple):
    """Makes the parts of one expert's matrix of the tensors that another program has packed.

    Attributes:
        experts: with the format of the parts.
        stack: name.
        layout: of the tensors.
        kinds: of each linear layer, gate before up, the kinds of its tensors, in their order.
    """

    experts: Any
    stack: str
    layout: Any
    kinds: list[list[str]]

    def __call__(self, tensors: Iterable[torch.Tensor]) -> Parts:
        """Make the parts as they lie in memory."""
        tensors, sizes = iter(tensors), shape_of_one(self.experts, self.stack)
        matrices = [{kind: next(tensors) for kind in kinds} for kinds in self.kinds]
        if self.experts.is_packed:
            return self.layout.parts_of(matrices, sizes, self.experts.formats[self.stack])
        matrix = torch.cat([self.layout.weight_of(each, sizes) for each in matrices])
        return [matrix.T if self.experts.is_transposed else matrix]


def find_packed_pieces(
    layers: Mapping[str, Experts], files: Iterable[str], matrices: Matrices, layout: Any
) -> dict[str, StoredLayer]:
    """Find the experts of these layers where another program has packed their matrices as linear layers.

    Args:
        layers: names in the model, and empty experts as they are in memory.
        files: all safetensors files of the checkpoint.
        matrices: the tensors that are packed.
        layout: of them.

    Raises:
        CheckpointError: an expert is missing.
    """
    stamps = {str(file): stamp_of(os.stat(file)) for file in files}
    result = {}
    for layer, experts in layers.items():
        pieces, unpack = {}, {}
        for stack in STACKS:
            linears = matrices.get(f"{layer}.{stack}", {})
            found = by_expert(linears)
            wanted = len(PARTS_OF_STACKS[experts.is_transposed][stack])
            if [*map(len, found)] != [wanted] * experts.num_experts:
                raise CheckpointError(
                    f"{next(iter(files))}: {len(linears)} matrices of {layer}.{stack} are packed, where config.json "
                    f"means {experts.num_experts} experts. Download or copy the checkpoint again."
                )
            pieces[stack] = [
                [
                    Piece(
                        os.path.abspath(tensor.origin),
                        tensor.content.begin,
                        tensor.shape,
                        DTYPES[tensor.dtype],
                        0,
                        None,
                        False,
                    )
                    for kinds in linears_of_one
                    for tensor in kinds.values()
                ]
                for linears_of_one in found
            ]
            unpack[stack] = Unpack(experts, stack, layout, [[*kinds] for kinds in found[0]])
        numbers = {stack: [{} for _ in range(experts.num_experts)] for stack in STACKS}
        result[layer] = StoredLayer(pieces, numbers, {}, stamps, unpack)
    return result


def find_pieces(
    layers: Mapping[str, Experts], files: Iterable[str], names: Callable[[str], Iterable[str]]
) -> dict[str, StoredLayer]:
    """Find the experts of these layers in a checkpoint.

    Args:
        layers: names in the model, and empty experts with the shapes and dtypes of the model.
        files: all safetensors files of the checkpoint.
        names: the names that a file's key may have in the model.

    Raises:
        CheckpointError: an expert is missing, stored twice, or has another shape or an unknown dtype.
    """
    stamps = {str(file): stamp_of(os.stat(file)) for file in files}
    index = index_experts(layers, headers_of(stamps), names)
    result = {}
    for layer, experts in layers.items():
        check_experts(layer, experts, index[layer])
        whole = {
            stack + suffix: (tensor.origin, tensor.name)
            for stack, stored in index[layer].items()
            for suffix, tensor in stored.whole.items()
            if experts.is_packed or experts.dtype == DTYPES[tensor.dtype]
        }
        pieces, numbers = {}, {}
        for stack, stored in index[layer].items():
            pieces[stack], numbers[stack] = _pieces(experts, stack, stored)
        result[layer] = StoredLayer(pieces, numbers, whole, stamps)
    return result


def _pieces(
    experts: Any, stack: str, stored: StoredStack
) -> tuple[list[list[Piece]], list[dict[int, torch.Tensor]]]:
    """Return the pieces of each expert's matrix, and the tensors without pieces."""
    pieces: list[list[Piece]] = [[] for _ in range(experts.num_experts)]
    numbers: list[dict[int, torch.Tensor]] = [{} for _ in range(experts.num_experts)]
    memories, alignment = experts.parts(stack), experts.format.alignment

    def add(
        expert: int,
        tensor: Stored,
        shape: tuple[int, ...],
        begin: int,
        part: int,
        rows: slice | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        dtype = dtype or DTYPES[tensor.dtype]
        is_aligned = begin % max(alignment, dtype.itemsize) == 0
        is_kept = rows is None and dtype == memories[part].dtype and is_aligned
        pieces[expert].append(Piece(tensor.origin, begin, shape, dtype, part, rows, is_kept))

    for part, suffix in enumerate(suffixes_in_files(experts)):
        if (tensor := stored.whole.get(suffix)) is not None:
            size = tensor.content.nbytes // experts.num_experts
            for expert in range(experts.num_experts):
                add(expert, tensor, tensor.shape[1:], tensor.content.begin + expert * size, part)
    rows, _ = shape_of_one(experts, stack)
    for (expert, place), kinds in sorted(stored.single.items(), key=lambda item: item[0]):
        if not experts.is_packed:
            tensor = kinds[WEIGHT]
            add(
                expert, tensor, tensor.shape, tensor.content.begin, 0, slice(place * rows, (place + 1) * rows)
            )
            continue
        for part, tensor in enumerate(parts_in_files(experts.formats[stack], experts.sizes_of(stack), kinds)):
            memory = memories[part][0]
            if isinstance(tensor, torch.Tensor):
                numbers[expert].setdefault(part, torch.empty(memory.shape))[place] = tensor
                continue
            # Codes are stored in bytes of any dtype.
            dtype = None if DTYPES[tensor.dtype].is_floating_point and part else memory.dtype
            is_alone = len(memory) == 1
            shape = tuple(memory.shape if is_alone else memory.shape[1:])
            add(expert, tensor, shape, tensor.content.begin, part, None if is_alone else place, dtype)
    return pieces, numbers
