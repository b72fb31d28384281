"""Base class of int4 and int8, with their products.

Kernels multiply few rows by the codes: compiled C++ on a CPU, Triton on a GPU (`Format.product`). For more rows, or
without a kernel, the matrix is unpacked block by block, and torch multiplies the rows by each block.

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
    """A format with codes of 4 or 8 bits and scales in bfloat16.

    Attributes:
        search: quantize with the scales that have the least squared error, not with the range of the weights.
        in_bytes: quantize rows to 8 bits in the CPU kernels.
    """

    search: bool = True
    in_bytes: bool = False
    suffixes = ("", "_scale")
    compute_dtype = torch.bfloat16

    @property
    def exact(self) -> Format:
        return replace(self, in_bytes=False)

    def padded(self, num_in: int) -> int:
        """Return P, the number of inputs that codes have for a matrix of `num_in` inputs."""
        return num_in

    @abstractmethod
    def for_cpu_kernel(self, parts: Parts) -> Matrix:
        """Describe a matrix to the C++ kernels."""

    @abstractmethod
    def blocks(
        self, parts: Parts, dtype: torch.dtype, is_whole: bool = False
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of outputs and their unpacked weights, `[P, outputs]`, which the next block may overwrite.

        A block fits into a CPU's cache unless `is_whole`.
        """

    def scaled(self, x_NO: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Multiply columns by the scales of their outputs; return `x_NO` itself if `blocks` has applied the scales."""
        return x_NO

    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        if padding := self.padded(sizes[1]) - sizes[1]:
            x_NI = F.pad(x_NI, (0, padding))
        # The kernels unpack codes once for every few rows. For many rows it is faster to unpack all codes once.
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
        # A sum over several blocks is in float32, since bfloat16 would be rounded after each block.
        for some, weight_PO in self.blocks(parts, x.dtype, is_whole=x.dtype != torch.float32):
            y_NP.addmm_(x[:, some], weight_PO.T)
        return y_NP[:, : sizes[1]].to(x_NO.dtype)


def rows_of(weight_OI: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the weights of some outputs after the other in float32, to be quantized at once.

    On a CPU the cache holds them; on a GPU they take up to half a gigabyte.
    """
    for some in slices_of(weight_OI, weight_OI.shape[1], 1 << 17, 1 << 27):
        yield weight_OI[some].contiguous().float()
