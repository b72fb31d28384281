"""Location of each expert's matrix in the files, as pieces of contiguous bytes, for all layouts of experts.

A file stores experts in one of three ways:

* all experts of a stack in one tensor, or, if packed, in one for each part of the format, such as codes and scales;
* each expert's gate, up and down matrices in three tensors, `[out, in]`;
* these matrices as linear layers that bitsandbytes or another program has packed.

In the first two ways, pieces are at most transposed or cast when they are read. In the third, an expert's tensors are
all read, and then converted to the parts in memory (`Unpack`).
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
)
from ..formats import Parts
from ..moe import PARTS_OF_STACKS, STACKS, Experts
from ..quantization import Matrices, by_expert


class Piece(NamedTuple):
    """A tensor or slice of a tensor in a file, and its place in the memory of one matrix.

    Attributes:
        path: path of the file.
        begin: index of the first byte in the file.
        shape: the piece's shape in the file.
        dtype: its dtype in the file.
        part: index of the part of the matrix (as codes or scales) that the piece belongs to.
        rows: rows of the part, as `[out, in]`, that the piece fills; None: the whole part, in the layout of memory.
        is_kept: bytes are the same in memory and file, where they begin at a multiple of the dtype's size.
    """

    path: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: int = 0
    rows: slice | None = None
    is_kept: bool = False

    @property
    def nbytes(self) -> int:
        """The piece's bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredLayer(NamedTuple):
    """The location of one layer's experts.

    Attributes:
        pieces: for each stack, the pieces of each expert; with `unpack`, a piece for each tensor to convert.
        whole: the file and name of each tensor that is a whole part of a stack in the model's dtype, by the part's name
            below the experts.
        files: stamps (size, time, inode) of the checkpoint's files, taken before their headers were read.
        unpack: for each stack of packed linear layers, the conversion of an expert's tensors to parts.
    """

    pieces: dict[str, list[list[Piece]]]
    whole: dict[str, tuple[str, str]]
    files: dict[str, FileStamp]
    unpack: Mapping[str, "Unpack"] = {}


class Unpack(NamedTuple):
    """Converts tensors of packed linear layers to the parts of one expert's matrix.

    Attributes:
        experts: experts in the target format, on the meta device.
        stack: name of the stack.
        layout: layout of the packed tensors.
        kinds: for each expert and each of its linear layers, gate before up, the kinds of its tensors ("qweight",
            "scales" …) in the order in which they are read.
    """

    experts: Any
    stack: str
    layout: Any
    kinds: list[list[list[str]]]

    def __call__(self, expert: int, tensors: Iterable[torch.Tensor]) -> Parts:
        """Return the parts of an expert's matrix in the layout of memory, from its tensors."""
        tensors, sizes = iter(tensors), shape_of_one(self.experts, self.stack)
        linears = [{kind: next(tensors) for kind in kinds} for kinds in self.kinds[expert]]
        if self.experts.is_packed:
            return self.layout.parts_of(linears, sizes, self.experts.formats[self.stack])
        matrix = torch.cat([self.layout.weight_of(linear, sizes) for linear in linears])
        return [matrix.T if self.experts.is_transposed else matrix]


def find_packed_pieces(
    layers: Mapping[str, Experts], files: Iterable[str], matrices: Matrices, layout: Any
) -> dict[str, StoredLayer]:
    """Find the experts of these layers that another program has packed as linear layers.

    Args:
        layers: by their names in the model, experts on the meta device as they will be in memory.
        files: all safetensors files of the checkpoint.
        matrices: the packed tensors, by stack, linear layer and kind.
        layout: layout of the packed tensors.

    Raises:
        CheckpointError: an expert is missing.
    """
    stamps = {str(file): stamp_of(os.stat(file)) for file in files}
    result = {}
    for layer, experts in layers.items():
        linears = {stack: by_expert(matrices.get(f"{layer}.{stack}", {})) for stack in STACKS}
        for stack in STACKS:
            num_parts = len(PARTS_OF_STACKS[experts.is_transposed][stack])
            if [*map(len, linears[stack])] != [num_parts] * experts.num_experts:
                raise CheckpointError(
                    f"{next(iter(files))}: {sum(map(len, linears[stack]))} matrices of {layer}.{stack} are packed, but "
                    f"config.json says {experts.num_experts} experts. Download or copy the checkpoint again."
                )
        result[layer] = _packed_linears(experts, linears, layout, stamps)
    return result


def _packed_linears(
    experts: Experts,
    stacks: Mapping[str, list[list[dict[str, Stored]]]],
    layout: Any,
    stamps: dict[str, FileStamp],
) -> StoredLayer:
    """Return the location of experts whose matrices are packed linear layers.

    Args:
        experts: experts on the meta device, as they will be in memory.
        stacks: for each stack and expert, the linear layers, gate before up, with their tensors by kind.
        layout: layout of these tensors.
        stamps: stamps of the files, by path.
    """
    pieces, unpack = {}, {}
    for stack, of_experts in stacks.items():
        pieces[stack] = [
            [
                # An absolute path: files are read later, perhaps after a change of the working directory.
                Piece(os.path.abspath(it.origin), it.content.begin, it.shape, DTYPES[it.dtype])
                for linear in linears
                for it in linear.values()
            ]
            for linears in of_experts
        ]
        kinds = [[[*linear] for linear in linears] for linears in of_experts]
        unpack[stack] = Unpack(experts, stack, layout, kinds)
    return StoredLayer(pieces, {}, stamps, unpack)


def find_pieces(
    layers: Mapping[str, Experts], files: Iterable[str], names: Callable[[str], Iterable[str]]
) -> dict[str, StoredLayer]:
    """Find the experts of these layers in a checkpoint.

    Args:
        layers: by their names in the model, experts on the meta device with the shapes and dtypes of the model.
        files: all safetensors files of the checkpoint.
        names: maps a file's key to the names that it may have in the model.

    Raises:
        CheckpointError: an expert is missing, stored twice, or has another shape or an unknown dtype.
    """
    stamps = {str(file): stamp_of(os.stat(file)) for file in files}
    index = index_experts(layers, headers_of(stamps), names)
    result = {}
    for layer, experts in layers.items():
        check_experts(layer, experts, index[layer])
        if experts.is_packed and experts.format.is_unfused_in_files:
            linears = {
                stack: [
                    [stored.single[number, place] for place, _ in enumerate(PARTS_OF_STACKS[True][stack])]
                    for number in range(experts.num_experts)
                ]
                for stack, stored in index[layer].items()
            }
            result[layer] = _packed_linears(experts, linears, experts.format, stamps)
            continue
        whole = {
            stack + suffix: (tensor.origin, tensor.name)
            for stack, stored in index[layer].items()
            for suffix, tensor in stored.whole.items()
            if experts.is_packed or experts.dtype == DTYPES[tensor.dtype]
        }
        pieces = {stack: _pieces(experts, stack, stored) for stack, stored in index[layer].items()}
        result[layer] = StoredLayer(pieces, whole, stamps)
    return result


def _pieces(experts: Any, stack: str, stored: StoredStack) -> list[list[Piece]]:
    """Return the pieces of each expert's matrix."""
    pieces: list[list[Piece]] = [[] for _ in range(experts.num_experts)]
    memories = experts.parts(stack)

    def add(
        expert: int,
        tensor: Stored,
        shape: tuple[int, ...],
        begin: int,
        part: int,
        rows: slice | None = None,
    ):
        dtype = DTYPES[tensor.dtype]
        is_kept = rows is None and dtype == memories[part].dtype and begin % dtype.itemsize == 0
        pieces[expert].append(Piece(tensor.origin, begin, shape, dtype, part, rows, is_kept))

    for part, suffix in enumerate(experts.format.suffixes):
        if (tensor := stored.whole.get(suffix)) is not None:
            size = tensor.content.nbytes // experts.num_experts
            for expert in range(experts.num_experts):
                add(expert, tensor, tensor.shape[1:], tensor.content.begin + expert * size, part)
    num_rows, _ = shape_of_one(experts, stack)
    for (expert, place), kinds in sorted(stored.single.items(), key=lambda item: item[0]):
        tensor, rows = kinds[WEIGHT], slice(place * num_rows, (place + 1) * num_rows)
        add(expert, tensor, tensor.shape, tensor.content.begin, 0, rows)
    return pieces
