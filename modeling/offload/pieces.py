"""Location of each expert's matrix in the files, as pieces of contiguous bytes, for all layouts of experts.

An expert is a slice of a stack that is one tensor; or its gate, up and down are separate tensors, `[out, in]`. A packed
stack has several parts, each with an axis for experts in front; in bitsandbytes' formats, there is another axis for
gate and up, which are separate in files. In all layouts a matrix is one or more pieces, which are at most transposed or
cast when they are read. Tensors packed by other programs are read whole, and converted to int4 (`Unpack`).
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
        rows: the rows of the part `[out, in]`, or the matrix of a packed part; None for the whole part, in the layout
            of memory.
        is_kept: memory holds the same bytes as the file, at an alignment that kernels can read.
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
    """The location of one layer's experts.

    Attributes:
        pieces: for each stack and expert, its pieces; with `unpack`, the pieces of the tensors to convert.
        numbers: for each stack and expert, parts that have a value instead of a piece, by the part's number.
        whole: parts of stacks that a file has as one tensor in the model's dtype, with the file and the tensor's name.
        files: all files of the checkpoint, with their sizes and times before the headers were read.
        unpack: for each stack that another program has packed, the conversion of an expert's tensors to parts.
    """

    pieces: dict[str, list[list[Piece]]]
    numbers: dict[str, list[dict[int, torch.Tensor]]]
    whole: dict[str, tuple[str, str]]
    files: dict[str, FileStamp]
    unpack: Mapping[str, "Unpack"] = {}


class Unpack(NamedTuple):
    """Converts tensors packed by another program to the parts of one expert's matrix.

    Attributes:
        experts: experts with the format of the parts.
        stack: name of the stack.
        layout: layout of the tensors.
        kinds: for each linear layer, gate before up, the kinds of its tensors in order.
    """

    experts: Any
    stack: str
    layout: Any
    kinds: list[list[str]]

    def __call__(self, tensors: Iterable[torch.Tensor]) -> Parts:
        """Return the parts in the layout of memory."""
        tensors, sizes = iter(tensors), shape_of_one(self.experts, self.stack)
        matrices = [{kind: next(tensors) for kind in kinds} for kinds in self.kinds]
        if self.experts.is_packed:
            return self.layout.parts_of(matrices, sizes, self.experts.formats[self.stack])
        matrix = torch.cat([self.layout.weight_of(each, sizes) for each in matrices])
        return [matrix.T if self.experts.is_transposed else matrix]


def find_packed_pieces(
    layers: Mapping[str, Experts], files: Iterable[str], matrices: Matrices, layout: Any
) -> dict[str, StoredLayer]:
    """Find the experts of these layers that another program has packed as linear layers.

    Args:
        layers: names in the model, and empty experts as they are in memory.
        files: all safetensors files of the checkpoint.
        matrices: the packed tensors.
        layout: layout of the packed tensors.

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
            # A file may store the bytes of the codes in any dtype.
            dtype = None if DTYPES[tensor.dtype].is_floating_point and part else memory.dtype
            is_alone = len(memory) == 1
            shape = tuple(memory.shape if is_alone else memory.shape[1:])
            add(expert, tensor, shape, tensor.content.begin, part, None if is_alone else place, dtype)
    return pieces, numbers
