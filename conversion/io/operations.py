"""Operations in the rows of a name table: rename, transpose, join the files' slices, split fused projections."""

import math
from collections.abc import Callable
from typing import Any

import torch

from ...configuration.errors import CheckpointError
from .lazy_tensor import Computed, LazyTensor, blocks, join


class Operation:
    """The operation that only renames tensors, and the base class of all others.

    A subclass overrides `convert` and `revert` if whole tensors are enough for it. If the files' slices have to be
    changed before they are joined, it overrides `forward` and `inverse`.
    """

    def forward(self, parts: list[list[LazyTensor]], axis: int | None, sizes: Any) -> list[LazyTensor]:
        """Make the target tensors.

        Args:
            parts: for each source name, the tensor of that name in each file.
            axis: axis along which each file holds a slice; None if each file holds a copy.
            sizes: the model's configuration.
        """
        why = "every file should hold the same. The files do not belong together, or one is damaged."
        whole = [one_of(files, why) if axis is None else join(files, axis) for files in parts]
        return self.convert(whole, sizes)

    def inverse(
        self, targets: list[LazyTensor], axis: int | None, files: int, sizes: Any
    ) -> list[list[LazyTensor]]:
        """Undo `forward`: return, for each source name, the tensor of each of `files` files."""
        return [
            [tensor] * files if axis is None else split(tensor, axis, files)
            for tensor in self.revert(targets, sizes)
        ]

    def convert(self, tensors: list[LazyTensor], sizes: Any) -> list[LazyTensor]:
        """Make the target tensors from the whole source tensors."""
        return tensors

    def revert(self, tensors: list[LazyTensor], sizes: Any) -> list[LazyTensor]:
        """Undo `convert`."""
        return tensors


KEEP = Operation()


class _Transposed(Operation):
    def convert(self, tensors, sizes):
        return self.revert(tensors, sizes)

    def revert(self, tensors, sizes):
        return [tensor.transpose() for tensor in tensors]


TRANSPOSED = _Transposed()
"""The operation for a matrix that the other format stores transposed."""


class FusedRows(Operation):
    """Splits projections that are stored in one tensor, row below row; each file holds a slice of every projection.

    Attributes:
        shares: function that returns the projections' relative numbers of rows for a model's configuration.
    """

    def __init__(self, shares: Callable[[Any], list[int]]):
        self.shares = shares

    def forward(self, parts, axis, sizes):
        """Split each file's tensor into slices of the projections, then join the slices of each projection."""
        assert axis is not None
        pieces = [self._cut(part, sizes) for part in parts[0]]
        return [join(part, axis) for part in zip(*pieces, strict=True)]

    def inverse(self, targets, axis, files, sizes):
        """Split each projection over the files and fuse each file's slices."""
        assert axis is not None
        pieces = [split(target, axis, files) for target in targets]
        return [[join(part, axis) for part in zip(*pieces, strict=True)]]

    def _cut(self, tensor: LazyTensor, sizes: Any) -> list[LazyTensor]:
        shares, rows = self.shares(sizes), tensor.shape[0]
        shares = [share // math.gcd(*shares) for share in shares]
        if rows % sum(shares):
            raise CheckpointError(
                f"{tensor.origin} has {rows} rows, which {' + '.join(map(str, shares))} parts do not divide."
            )
        unit, start, pieces = rows // sum(shares), 0, []
        for share in shares:
            pieces.append(tensor.cut(0, start, start + share * unit))
            start += share * unit
        return pieces


def by_expert(rows_of_all: LazyTensor, experts: int) -> LazyTensor:
    """View a matrix with the rows of all experts, `[experts * rows, columns]`, as a stack `[experts, rows, columns]`.

    Raises:
        CheckpointError: it is no matrix, or its rows cannot be divided by the number of experts.
    """
    shape = rows_of_all.shape
    if len(shape) != 2 or shape[0] % experts:
        raise CheckpointError(
            f"{rows_of_all.origin} has shape {list(shape)}; expected: a matrix with the rows of {experts} experts."
        )
    return rows_of_all.view(experts, shape[0] // experts, shape[1])


def permute_pairs(tensor: LazyTensor, heads: int, *, to_halves: bool) -> LazyTensor:
    """View a query or key projection with its rows reordered within each head, for the other rotary pairing.

    Pairs of channels (r, i) are rotated together. With `to_halves`, rows r0 i0 r1 i1 ... become r0 r1 ... i0 i1 ...;
    without, the reverse.
    """

    def permute(rows: torch.Tensor) -> torch.Tensor:
        half = rows.shape[0] // heads // 2
        pair = (half, 2) if to_halves else (2, half)
        return rows.view(heads, *pair, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    return tensor.map(permute)


def split(tensor: LazyTensor, axis: int, files: int) -> list[LazyTensor]:
    """View equal slices of a tensor along an axis, one for each file.

    Raises:
        CheckpointError: the axis is not divisible by the number of files.
    """
    size = tensor.shape[axis]
    if size % files:
        raise CheckpointError(
            f"{tensor.origin} of shape {list(tensor.shape)} cannot be split over {files} files: {size} is not a "
            f"multiple of {files}. Choose a number of files that divides {size}."
        )
    part = size // files
    return [tensor.cut(axis, i * part, (i + 1) * part) for i in range(files)]


def are_equal(a: LazyTensor, b: LazyTensor) -> bool:
    """Return whether two tensors have the same shape, dtype and elements, which are read block by block."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and all(
        torch.equal(a.read(*rows), b.read(*rows)) for rows in blocks(a)
    )


def one_of(copies: list[LazyTensor], why: str) -> LazyTensor:
    """View the first of several copies of a tensor; reading it compares all copies.

    `why` says why the copies should be equal; it ends the error message.

    Raises:
        CheckpointError: copies differ in shape or dtype.
    """
    first, *others = copies
    if not others:
        return first
    problems = [f"{copy.origin}: differs from {first.origin}, though {why}" for copy in others]
    for copy, problem in zip(others, problems, strict=True):
        if (copy.shape, copy.dtype) != (first.shape, first.dtype):
            raise CheckpointError(problem)

    def compare(expected: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        for tensor, problem in zip(tensors, problems, strict=True):
            if not torch.equal(tensor, expected):
                raise CheckpointError(problem)
        return expected

    return Computed(compare, copies, first.shape, first.dtype, first.origin)
