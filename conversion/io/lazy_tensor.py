"""Lazy tensors: shape and dtype are known at once, elements are read block by block when they are written.

A converted checkpoint is a set of views of the source's tensors: joined, sliced, transposed, permuted. A view reads
nothing until a block of it is read, so a checkpoint of any size is converted within a few blocks of memory. A block is
the unit of reading and writing: one expert of a stacked tensor, else the whole tensor.
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
        origin: file and name of the tensor, for error messages.
        block_rows: rows of the first axis in a block; by default 1 if there are more than two axes, else all.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, origin: str, block_rows: int | None = None):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.origin = origin
        self.block_rows = block_rows or (1 if self.ndim > 2 else self._rows())

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

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read rows `start` to `stop` of the first axis; a tensor without axes is read whole.

        Returns:
            a contiguous tensor `[stop - start, ...]` on the CPU. Do not write to it: other reads may share it.

        Raises:
            CheckpointError: the file is shorter than its header states.
        """
        stop = self._rows() if stop is None else stop
        assert 0 <= start <= stop <= self._rows(), (self, start, stop)
        rows = self._read(start, stop).contiguous()
        assert tuple(rows.shape) == self._piece_shape(start, stop), (self, tuple(rows.shape), start, stop)
        assert rows.dtype == self.dtype, (self, rows.dtype)
        return rows

    def cast(self, dtype: torch.dtype) -> "LazyTensor":
        """View a floating-point tensor in another dtype; return other tensors unchanged."""
        if dtype == self.dtype or not self.dtype.is_floating_point:
            return self
        return _Cast(self, dtype)

    def cut(self, dim: int, start: int, stop: int) -> "LazyTensor":
        """View indices `start` to `stop` of an axis."""
        dim %= self.ndim
        if (start, stop) == (0, self.shape[dim]):
            return self
        # Merge with an earlier cut of the same axis, so that only the wanted elements are copied.
        if isinstance(self, _Cut) and self.dim == dim:
            return _Cut(self.tensor, dim, self.start + start, self.start + stop)
        return _Cut(self, dim, start, stop)

    def view(self, *shape: int) -> "LazyTensor":
        """View under another shape with as many elements, row-major."""
        return self if shape == self.shape else _View(self, shape)

    def transpose(self) -> "LazyTensor":
        """View with the last two axes swapped."""
        return _Transposed(self) if self.ndim > 2 else self.map(torch.t, self.shape[::-1])

    def map(
        self, function: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int] | None = None
    ) -> "LazyTensor":
        """View the result of a function of the whole tensor; the function must not change its argument.

        The result must have the tensor's dtype, and the shape `shape`, by default the tensor's.
        """
        return Computed(function, [self], self.shape if shape is None else shape, self.dtype, self.origin)

    def row(self, index: int) -> "LazyTensor":
        """View one index of the first axis, as a tensor without that axis."""
        return self.cut(0, index, index + 1).view(*self.shape[1:])

    def _rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def _piece_shape(self, start: int, stop: int) -> tuple[int, ...]:
        return (stop - start, *self.shape[1:]) if self.shape else ()

    @abstractmethod
    def _read(self, start: int, stop: int) -> torch.Tensor: ...


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def blocks(tensor: LazyTensor) -> list[tuple[int, int]]:
    """List the blocks in which a tensor is read and written: each block's first row, and the row after its last."""
    rows, step = tensor._rows(), max(tensor.block_rows, 1)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def join(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """View tensors joined along an axis, as by `torch.cat`.

    Raises:
        CheckpointError: dtypes differ, or sizes of another axis.
    """
    dim %= parts[0].ndim
    return parts[0] if len(parts) == 1 else _Join(parts, dim)


def stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """View tensors of one shape as rows of a new first axis, as by `torch.stack`."""
    return _Join([part.view(1, *part.shape) for part in parts], 0)


class _Join(LazyTensor):
    def __init__(self, parts: Sequence[LazyTensor], dim: int):
        first = parts[0]
        for part in parts[1:]:
            others = [(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (first, part)]
            if part.dtype != first.dtype or others[0] != others[1]:
                raise CheckpointError(
                    f"{part.origin} is {part.described}, but {first.origin} is {first.described}: parts of one tensor "
                    "need one dtype and matching sizes."
                )
        shape = (*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :])
        super().__init__(shape, first.dtype, first.origin, first.block_rows if dim else None)
        self.parts, self.dim = list(parts), dim

    def cut(self, dim, start, stop):
        """View indices of an axis; if one part holds them all, view that part, so that no other part is read."""
        if dim % self.ndim == self.dim:
            begin = 0
            for part in self.parts:
                end = begin + part.shape[self.dim]
                if begin <= start and stop <= end:
                    return part.cut(self.dim, start - begin, stop - begin)
                begin = end
        return super().cut(dim, start, stop)

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


class _Cut(LazyTensor):
    def __init__(self, tensor: LazyTensor, dim: int, start: int, stop: int):
        assert 0 <= start <= stop <= tensor.shape[dim], (tensor, dim, start, stop)
        shape = (*tensor.shape[:dim], stop - start, *tensor.shape[dim + 1 :])
        block_rows = tensor.block_rows if dim else min(tensor.block_rows, stop - start)
        super().__init__(shape, tensor.dtype, tensor.origin, block_rows)
        self.tensor, self.dim, self.start = tensor, dim, start

    def _read(self, start, stop):
        if self.dim == 0:
            return self.tensor.read(self.start + start, self.start + stop)
        return self.tensor.read(start, stop).narrow(self.dim, self.start, self.shape[self.dim])


class _View(LazyTensor):
    """A reshaped tensor; a read of rows reads only those rows of the original tensor that hold the elements."""

    def __init__(self, tensor: LazyTensor, shape: Sequence[int]):
        assert prod(shape) == tensor.numel, (tensor, shape)
        # `width`: elements in a row of this view; `inner`: in a row of the original.
        self.tensor, self.width, self.inner = tensor, prod(shape[1:]), prod(tensor.shape[1:])
        block_rows, elements = None, tensor.block_rows * self.inner
        # A stack of experts that is viewed as a matrix is still read expert by expert.
        if len(shape) < 3 <= tensor.ndim and self.width and elements % self.width == 0:
            block_rows = elements // self.width
        super().__init__(shape, tensor.dtype, tensor.origin, block_rows)

    def view(self, *shape):
        """View under another shape; under the original's shape return the original, which may be a packed weight."""
        return self.tensor if shape == self.tensor.shape else super().view(*shape)

    def _read(self, start, stop):
        begin, end = start * self.width, stop * self.width
        shape = self._piece_shape(start, stop)
        if begin == end or not self.inner:
            return torch.empty(shape, dtype=self.dtype)
        first = begin // self.inner
        rows = self.tensor.read(first, -(-end // self.inner)).reshape(-1)
        return rows[begin - first * self.inner : end - first * self.inner].reshape(shape)


class _Cast(LazyTensor):
    def __init__(self, tensor: LazyTensor, dtype: torch.dtype):
        super().__init__(tensor.shape, dtype, tensor.origin, tensor.block_rows)
        self.tensor = tensor

    def _read(self, start, stop):
        return self.tensor.read(start, stop).to(self.dtype)

    def cut(self, dim, start, stop):
        """View indices of an axis, so that only these are cast."""
        return self.tensor.cut(dim, start, stop).cast(self.dtype)


class _Transposed(LazyTensor):
    """A stack of transposed matrices."""

    def __init__(self, tensor: LazyTensor):
        *stacked, rows, columns = tensor.shape
        super().__init__((*stacked, columns, rows), tensor.dtype, tensor.origin)
        self.tensor = tensor

    def _read(self, start, stop):
        return self.tensor.read(start, stop).transpose(-1, -2)


class Computed(LazyTensor):
    """The result of a function of whole tensors, each at most one matrix; the function must not change them."""

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
