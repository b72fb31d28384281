"""Experts whose matrices a checkpoint stores one by one: the matrices' names, and how they are stacked.

Mixtral's files are such, and folders of Llama 4 that some quantizers and trainers write. Each matrix is `[out, in]`.

Shapes: E experts, H hidden_size, I intermediate_size.
"""

import re
from collections.abc import Mapping
from functools import lru_cache, reduce
from typing import NamedTuple

import torch

from ...configuration.errors import CheckpointError

_NUMBER = r"(?:0|[1-9]\d*)"
_MATRIX = re.compile(
    rf"(?:({_NUMBER})\.(gate_proj|up_proj|down_proj|w[123])|(gate|up|down)_projs\.({_NUMBER}))\.weight"
)

PARTS_OF_STACKS: Mapping[bool, Mapping[str, tuple[str, ...]]] = {
    True: {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    False: {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
}
"""The names in files of an expert's matrices in each stack: for input-first experts (True), and output-first ones."""


PLACES = {
    part: (stack, place)
    for stacks in PARTS_OF_STACKS.values()
    for stack, parts in stacks.items()
    for place, part in enumerate(parts)
}
"""By a matrix's name in files, its stack, and its number among the expert's matrices in this stack."""


class ExpertMatrix(NamedTuple):
    """A matrix of one expert: the expert's number, and the matrix's name in files, such as "gate_proj" or "w1"."""

    number: int
    part: str

    @property
    def stack(self) -> str:
        """The name of the stack that holds the matrix."""
        return PLACES[self.part][0]

    def __str__(self) -> str:
        """Return the name below the experts, with the expert's number first."""
        return f"{self.number}.{self.part}.weight"


@lru_cache(maxsize=4096)
def matrix_named(name: str) -> ExpertMatrix | None:
    """Parse a tensor's name, relative to the experts; return None if it is no expert's matrix."""
    match = _MATRIX.fullmatch(name)
    return match and ExpertMatrix(int(match[1] or match[4]), match[2] or f"{match[3]}_proj")


@torch.no_grad()
def fuse(matrices: Mapping[ExpertMatrix, torch.Tensor], is_transposed: bool) -> torch.Tensor:
    """Put all experts' matrices `[out, in]` into a stack: `[E, in, out]` if `is_transposed`, else `[E, out, in]`.

    Raises:
        CheckpointError: a matrix has another shape, or integers.
    """
    matrix, first = next(iter(matrices.items()))
    _check_matrix(first, matrix, first.shape)
    parts = len(PARTS_OF_STACKS[is_transposed][matrix.stack])
    size_out, size_in = first.shape[0] * parts, first.shape[1]
    whole = first.new_empty(
        len(matrices) // parts,
        *((size_in, size_out) if is_transposed else (size_out, size_in)),
        dtype=reduce(torch.promote_types, (tensor.dtype for tensor in matrices.values())),
    )
    for matrix, tensor in matrices.items():
        put_matrix(tensor, whole, matrix, is_transposed)
    return whole


def put_matrix(tensor: torch.Tensor, stack: torch.Tensor, matrix: ExpertMatrix, is_transposed: bool) -> None:
    """Copy a matrix `[out, in]` to its place in a stack, transposed if `is_transposed`; raise as `fuse`."""
    name, number = PLACES[matrix.part]
    places = stack[matrix.number].chunk(len(PARTS_OF_STACKS[is_transposed][name]), dim=int(is_transposed))
    place = places[number]
    _check_matrix(tensor, matrix, tuple(reversed(place.shape)) if is_transposed else place.shape)
    # Copying a transposed view into a strided target is four times as slow as transposing first.
    place.copy_(tensor.T.contiguous() if is_transposed else tensor)


def _check_matrix(tensor: torch.Tensor, matrix: ExpertMatrix, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(wanted) or tensor.dim() != 2 or not tensor.is_floating_point():
        raise CheckpointError(
            f"{matrix} has shape {list(tensor.shape)} and dtype {tensor.dtype}; expected in this layer: "
            f"{list(wanted)} and floats. Download or copy the checkpoint again."
        )
