"""Lazy tensors: shape and dtype are known at once, elements are read block by block when they are written.

A converted checkpoint is a set of views of the source's tensors: joined, sliced, transposed, permuted. A view reads
nothing until one of its blocks is asked for, so that a checkpoint of any size is converted within a few blocks of
memory. A block is the unit of reading and writing: one row of the first axis of a stacked tensor (one expert), else a
whole matrix.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod

import torch

from ...configuration.errors import CheckpointError


class LazyTensor(ABC):
    """A tensor that can be read by rows of its first axis.

    Attributes:
        shape: a tuple.
        dtype: dtype that `read` returns.
        origin: file and tensor that it comes from, for messages.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, origin: str):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.origin = origin

    @property
    def dtype_name(self) -> str:
        """The dtype, such as "float32"."""
        return dtype_name(self.dtype)

    @property
    def described(self) -> str:
        """Dtype and shape, for messages."""
        return f"{self.dtype_name} {list(self.shape)}"

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    @property
    def block_rows(self) -> int:
        """Number of rows of the first axis in a block."""
        return self._usual_block_rows()

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read rows `start` to `stop` of the first axis; a tensor without axes is read whole.

        Returns:
            contiguous, on the CPU, of shape `[stop - start, ...]`. Do not write to it: other reads may share it.

        Raises:
            CheckpointError: the file holds less than its header states.
        """
        stop = self._rows() if stop is None else stop
        assert 0 <= start <= stop <= self._rows(), (self, start, stop)
        rows = self._read(start, stop).contiguous()
        assert tuple(rows.shape) == self._piece_shape(start, stop), (self, tuple(rows.shape), start, stop)
        assert rows.dtype == self.dtype, (self, rows.dtype)
        return rows

    def cast(self, dtype: torch.dtype) -> "LazyTensor":
        """View as another dtype; tensors that are not floating are unchanged."""
        if dtype == self.dtype or not self.dtype.is_floating_point:
            return self
        return _Cast(self, dtype=dtype)

    def cut(self, dim: int, start: int, stop: int) -> "LazyTensor":
        """View indices `start` to `stop` of an axis."""
        dim %= self.ndim
        if (start, stop) == (0, self.shape[dim]):
            return self
        # Merged with an earlier cut, so that only the wanted elements are copied.
        if isinstance(self, _Cut) and self.dim == dim:
            return _Cut(self.tensor, dim, self.start + start, self.start + stop)
        return _Cut(self, dim, start, stop)

    def view(self, *shape: int) -> "LazyTensor":
        """View under another shape with as many elements, row-major."""
        return self if shape == self.shape else _View(self, shape)

    def transpose(self) -> "LazyTensor":
        """View with the last two axes swapped."""
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return self.map(lambda tensor: tensor.transpose(-1, -2), shape)

    def map(
        self, function: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int] | None = None
    ) -> "LazyTensor":
        """View the result of a function, of the same dtype, and of the same shape unless another is given.

        The function gets one row `[1, ...]` at a time of a tensor of three or more axes, else the whole tensor, and
        must not change it.
        """
        shape = self.shape if shape is None else shape
        if self.ndim > 2:
            return _MapRows(self, function, shape)
        return Computed(function, [self], shape, self.dtype, self.origin)

    def row(self, index: int) -> "LazyTensor":
        """View one index of the first axis, as a tensor without that axis."""
        return self.cut(0, index, index + 1).view(*self.shape[1:])

    def _rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def _usual_block_rows(self) -> int:
        return 1 if self.ndim > 2 else self._rows()

    def _piece_shape(self, start: int, stop: int) -> tuple[int, ...]:
        return (stop - start, *self.shape[1:]) if self.shape else ()

    @abstractmethod
    def _read(self, start: int, stop: int) -> torch.Tensor: ...


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def check_alike(tensors: Sequence[LazyTensor], why: str = "") -> None:
    """Raise a `CheckpointError` if one has another shape or dtype than the first; `why` ends the sentence."""
    first = tensors[0]
    for tensor in tensors[1:]:
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{tensor.origin} is {tensor.described}, but {first.origin} is {first.described}.{why and f' {why}'}"
            )


def blocks(tensor: LazyTensor) -> list[tuple[int, int]]:
    """List the ranges of rows in which a tensor is read and written."""
    rows, step = tensor._rows(), max(tensor.block_rows, 1)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def join(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """View tensors joined along an axis, as by `torch.cat`."""
    dim %= parts[0].ndim
    return parts[0] if len(parts) == 1 else _Join(parts, dim)


def stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """View tensors of one shape as rows of a new first axis, as by `torch.stack`."""
    return _Join([part.view(1, *part.shape) for part in parts], 0)


class _Join(LazyTensor):
    def __init__(self, parts: Sequence[LazyTensor], dim: int):
        first = parts[0]
        for part in parts:
            assert part.shape[:dim] == first.shape[:dim], (first, part)
            assert part.shape[dim + 1 :] == first.shape[dim + 1 :], (first, part)
            assert part.dtype == first.dtype, (first, part)
        shape = (*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :])
        super().__init__(shape, first.dtype, first.origin)
        self.parts, self.dim = list(parts), dim

    def cut(self, dim, start, stop):
        """View indices of an axis; if one part has them all, a view of that part, so that no other is read."""
        if dim % self.ndim == self.dim:
            begin = 0
            for part in self.parts:
                end = begin + part.shape[self.dim]
                if begin <= start and stop <= end:
                    return part.cut(self.dim, start - begin, stop - begin)
                begin = end
        return super().cut(dim, start, stop)

    @property
    def block_rows(self):
        return self.parts[0].block_rows if self.dim else self._usual_block_rows()

    def _wanted(self, start, stop) -> list[tuple[LazyTensor, int, int]]:
        """List the parts that hold rows `start` to `stop`, with the range of rows in each."""
        if self.dim:
            return [(part, start, stop) for part in self.parts]
        spans, begin = [], 0
        for part in self.parts:
            first, last = max(start - begin, 0), min(stop - begin, part.shape[0])
            if first < last:
                spans.append((part, first, last))
            begin += part.shape[0]
        return spans

    def _read(self, start, stop):
        wanted = self._wanted(start, stop)
        if len(wanted) == 1:
            part, first, last = wanted[0]
            return part.read(first, last)
        result = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        position = 0
        for part, first, last in wanted:
            rows = part.read(first, last)
            result.narrow(self.dim, position, rows.shape[self.dim]).copy_(rows)
            position += rows.shape[self.dim]
        return result


class _Derived(LazyTensor):
    """Another look at one tensor; by default of the same shape, dtype and blocks."""

    def __init__(
        self, tensor: LazyTensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__(tensor.shape if shape is None else shape, dtype or tensor.dtype, tensor.origin)
        self.tensor = tensor

    @property
    def block_rows(self):
        return self.tensor.block_rows


class _Cut(_Derived):
    def __init__(self, tensor: LazyTensor, dim: int, start: int, stop: int):
        assert 0 <= start <= stop <= tensor.shape[dim], (tensor, dim, start, stop)
        super().__init__(tensor, (*tensor.shape[:dim], stop - start, *tensor.shape[dim + 1 :]))
        self.dim, self.start = dim, start

    @property
    def block_rows(self):
        return self.tensor.block_rows if self.dim else min(self.tensor.block_rows, self._rows())

    def _read(self, start, stop):
        if self.dim == 0:
            return self.tensor.read(self.start + start, self.start + stop)
        return self.tensor.read(start, stop).narrow(self.dim, self.start, self.shape[self.dim])


class _View(_Derived):
    """Any reshape: rows of the result are a run of elements, and the rows that cover the run are read."""

    def __init__(self, tensor: LazyTensor, shape: Sequence[int]):
        assert prod(shape) == tensor.numel, (tensor, shape)
        super().__init__(tensor, shape)
        # Elements of a row of the result, and of a row of the tensor.
        self.width, self.inner = prod(self.shape[1:]), prod(tensor.shape[1:])

    def view(self, *shape):
        """View under another shape; the tensor itself if that is its own."""
        return self.tensor if shape == self.tensor.shape else super().view(*shape)

    @property
    def block_rows(self):
        elements = self.tensor.block_rows * self.inner
        if self.ndim < 3 <= self.tensor.ndim and self.width and elements % self.width == 0:
            return max(elements // self.width, 1)
        return self._usual_block_rows()

    def _read(self, start, stop):
        begin, end = start * self.width, stop * self.width
        shape = self._piece_shape(start, stop)
        if begin == end or not self.inner:
            return torch.empty(shape, dtype=self.dtype)
        first = begin // self.inner
        rows = self.tensor.read(first, -(-end // self.inner)).reshape(-1)
        return rows[begin - first * self.inner : end - first * self.inner].reshape(shape)


class _Cast(_Derived):
    def _read(self, start, stop):
        return self.tensor.read(start, stop).to(self.dtype)

    def cut(self, dim, start, stop):
        """View indices of an axis; only they are cast."""
        return self.tensor.cut(dim, start, stop).cast(self.dtype)


class _MapRows(_Derived):
    """A function of each row of a tensor of three or more axes."""

    def __init__(self, tensor: LazyTensor, function: Callable, shape: Sequence[int]):
        super().__init__(tensor, shape)
        self.function = function
        assert self.shape[:1] == tensor.shape[:1], (tensor, shape)

    @property
    def block_rows(self):
        return self._usual_block_rows()

    def _read(self, start, stop):
        rows = [self.function(self.tensor.read(row, row + 1)) for row in range(start, stop)]
        if not rows:
            return torch.empty(self._piece_shape(0, 0), dtype=self.dtype)
        return rows[0] if len(rows) == 1 else torch.cat(rows)


class Computed(LazyTensor):
    """The result of a function of whole tensors, which it must not change; for matrices and smaller tensors."""

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        inputs: Sequence[LazyTensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        origin: str,
    ):
        super().__init__(shape, dtype, origin)
        self.function, self.inputs = function, list(inputs)

    def _read(self, start, stop):
        result = self.function(*(tensor.read() for tensor in self.inputs))
        return result[start:stop] if self.shape else result
