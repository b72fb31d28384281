"""Base class of int4 and int8, with their products.

On a CPU a compiled kernel multiplies few rows by the codes, on a GPU a Triton kernel does (`Format.product`). Otherwise
the matrix is unpacked block by block, and torch multiplies each block.

Shapes: O outputs, I inputs, P inputs with padding, N rows.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ..kernels import FEW_BITS_FLOAT_MAX_ROWS, Matrix, cpp_product, dtype_of_blocks, rows_in_bytes
from .format import Format, Parts, Sizes
from .int4_layout import slices_of


@dataclass(frozen=True, kw_only=True)
class FewBits(Format):
    """A format of codes of 4 or 8 bits, and scales in bfloat16.

    Attributes:
        search: choose scales by the least squared error.
        in_bytes: CPU kernels quantize rows to 8 bits.
    """

    search: bool = True
    in_bytes: bool = False
    suffixes = ("", "_scale")
    compute_dtype = torch.bfloat16

    @property
    def exact(self) -> Format:
        return replace(self, in_bytes=False)

    def padded(self, num_in: int) -> int:
        """Return P, the number of inputs that are stored for `num_in` inputs."""
        return num_in

    @abstractmethod
    def for_cpu_kernel(self, parts: Parts) -> Matrix:
        """Describe a matrix to the compiled kernels."""

    @abstractmethod
    def blocks(
        self, parts: Parts, dtype: torch.dtype, is_whole: bool = False
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of outputs with their columns `[P, …]`, which the next block may overwrite.

        Args:
            parts: of one matrix.
            dtype: of the columns.
            is_whole: do not divide the matrix into blocks that fit into a CPU's cache.
        """

    def scaled(self, x_NO: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Multiply columns by the scales of outputs, if `blocks` does not apply them."""
        return x_NO

    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        if padding := self.padded(sizes[1]) - sizes[1]:
            x_NI = F.pad(x_NI, (0, padding))
        # The kernels unpack codes again for every few rows; for more rows unpacking once is faster.
        most = rows_in_bytes() if self.in_bytes else FEW_BITS_FLOAT_MAX_ROWS
        if parts[0].is_cpu and len(x_NI) <= most:
            y_NO = cpp_product(x_NI, self.for_cpu_kernel(parts))
            if y_NO is not None:
                return y_NO
        x = x_NI.to(dtype_of_blocks(x_NI))
        y_NO = x.new_empty(len(x), sizes[0])
        for some, weight_PO in self.blocks(parts, x.dtype):
            torch.mm(x, weight_PO, out=y_NO[:, some])
        return self.scaled(y_NO, parts).to(x_NI.dtype)

    def multiply_transposed(self, x_NO: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        x = self.scaled(x_NO.to(dtype_of_blocks(x_NO)), parts)
        y_NP = x.new_zeros(len(x), self.padded(sizes[1]))
        # Sums over several blocks are in float32: in 16 bits they would be rounded after each block.
        for some, weight_PO in self.blocks(parts, x.dtype, is_whole=x.dtype != torch.float32):
            y_NP.addmm_(x[:, some], weight_PO.T)
        return y_NP[:, : sizes[1]].to(x_NO.dtype)


def rows_of(weight_OI: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the outputs to quantize at once, in float32; on a GPU they take up to half a gigabyte."""
    for some in slices_of(weight_OI, weight_OI.shape[1], 1 << 17, 1 << 27):
        yield weight_OI[some].contiguous().float()
