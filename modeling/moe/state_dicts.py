"""Experts that a state dict has one by one: their names, and how a module takes them into its stacks.

Files of Mixtral have them so, and so have folders of Llama 4 from quantizers and trainers. Each matrix is `[out, in]`.

Shapes: E experts, H hidden_size, I intermediate_size.
"""

import re
from collections.abc import Iterator, Mapping, MutableMapping
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError

_NUMBER = r"(?:0|[1-9]\d*)"
_MATRIX = re.compile(
    rf"(?:({_NUMBER})\.(gate_proj|up_proj|down_proj|w[123])|(gate|up|down)_projs\.({_NUMBER}))\.weight"
)

PARTS_OF_STACKS: Mapping[bool, Mapping[str, tuple[str, ...]]] = {
    True: {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    False: {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
}
"""Of a stack, as files name its matrices: for input-first experts, and for output-first ones."""


PLACES = {
    part: (stack, place)
    for stacks in PARTS_OF_STACKS.values()
    for stack, parts in stacks.items()
    for place, part in enumerate(parts)
}
"""The stack that holds a matrix, and its place in an expert's part of the stack, by the matrix's name."""


class ExpertMatrix(NamedTuple):
    """A matrix of one expert: the expert's number, and "gate_proj", "up_proj", "down_proj" (or "w1" …)."""

    number: int
    part: str

    @property
    def stack(self) -> str:
        """The stack that holds it."""
        return PLACES[self.part][0]

    def __str__(self) -> str:
        """The name below the experts, with the expert's number first."""
        return f"{self.number}.{self.part}.weight"


@lru_cache(maxsize=4096)
def matrix_named(name: str) -> ExpertMatrix | None:
    """The matrix that a name below the experts means; None for other names."""
    match = _MATRIX.fullmatch(name)
    return match and ExpertMatrix(int(match[1] or match[4]), match[2] or f"{match[3]}_proj")


def missing_matrices(
    found: set[ExpertMatrix], stack: str, count: int, is_transposed: bool
) -> Iterator[ExpertMatrix]:
    """The matrices that a stack of `count` experts lacks, beside those that were found."""
    wanted = (
        ExpertMatrix(number, part)
        for number in range(count)
        for part in PARTS_OF_STACKS[is_transposed][stack]
    )
    return (matrix for matrix in wanted if matrix not in found)


class TakesSingleExperts(nn.Module):
    """A base class of experts in stacks, which `load_state_dict` may also give one by one, a layer at a time."""

    num_experts: int
    is_transposed: bool

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for stack, found in take_matrices(state_dict, prefix, self.is_transposed).items():
            if lost := self.lacks(stack, set(found)):
                raise CheckpointError(
                    f"The state dict has half a mixture: {listed(f'{prefix}{matrix}' for matrix in lost)} missing. "
                    "Give all experts of a layer in one state dict."
                )
            state_dict[prefix + stack] = like(
                self._parameters[stack], fuse(found, self.is_transposed, prefix)
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def lacks(self, stack: str, found: set[ExpertMatrix]) -> list[ExpertMatrix]:
        """Return the matrices of a stack beside those that were found."""
        return [*missing_matrices(found, stack, self.num_experts, self.is_transposed)]


def take_matrices(
    state_dict: MutableMapping[str, Any], prefix: str, is_transposed: bool
) -> dict[str, dict[ExpertMatrix, torch.Tensor]]:
    """Take single experts' matrices out of a state dict, by stack; `prefix` is that of the experts' names."""
    found: dict[str, dict[ExpertMatrix, torch.Tensor]] = {}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        matrix = matrix_named(key[len(prefix) :])
        if matrix is not None and matrix.part in PARTS_OF_STACKS[is_transposed][matrix.stack]:
            found.setdefault(matrix.stack, {})[matrix] = state_dict.pop(key)
    return found


@torch.no_grad()
def fuse(found: Mapping[ExpertMatrix, torch.Tensor], is_transposed: bool, prefix: str = "") -> torch.Tensor:
    """The stack of all experts' matrices `[out, in]`: `[E, in, out]` if `is_transposed`, else `[E, out, in]`.

    Raises:
        CheckpointError: a matrix of another shape, or of integers.
    """
    matrix, first = next(iter(found.items()))
    _check_matrix(first, matrix, first.shape, prefix)
    parts = len(PARTS_OF_STACKS[is_transposed][matrix.stack])
    size_out, size_in = first.shape[0] * parts, first.shape[1]
    whole = first.new_empty(
        len(found) // parts,
        *((size_in, size_out) if is_transposed else (size_out, size_in)),
        dtype=reduce(torch.promote_types, (tensor.dtype for tensor in found.values())),
    )
    for matrix, tensor in found.items():
        put_matrix(tensor, whole, matrix, is_transposed, prefix)
    return whole


def put_matrix(
    tensor: torch.Tensor, stack: torch.Tensor, matrix: ExpertMatrix, is_transposed: bool, prefix: str = ""
) -> None:
    """Copy a matrix `[out, in]` to its place in a stack."""
    name, number = PLACES[matrix.part]
    places = stack[matrix.number].chunk(len(PARTS_OF_STACKS[is_transposed][name]), dim=int(is_transposed))
    place = places[number]
    _check_matrix(tensor, matrix, tuple(reversed(place.shape)) if is_transposed else place.shape, prefix)
    # Copying a transposed view into a strided target is four times as slow as transposing first.
    place.copy_(tensor.T.contiguous() if is_transposed else tensor)


def _check_matrix(tensor: torch.Tensor, matrix: ExpertMatrix, wanted: tuple[int, ...], prefix: str) -> None:
    if tuple(tensor.shape) != tuple(wanted) or tensor.dim() != 2 or not tensor.is_floating_point():
        raise CheckpointError(
            f"{prefix}{matrix} has shape {list(tensor.shape)} and dtype {tensor.dtype}, where its layer's experts have "
            f"{list(wanted)} and floats."
        )


def like(own: torch.Tensor | None, given: torch.Tensor) -> torch.Tensor:
    """A whole tensor that every process has, in shards if the parameter is; else itself."""
    if not isinstance(own, DTensor) or isinstance(given, DTensor):
        return given
    mesh = own.device_mesh
    return distribute_tensor(given.to(mesh.device_type), mesh, own.placements, src_data_rank=None)
