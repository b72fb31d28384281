"""Plain numbers, as trained: 16, 32 or 64 bits.

Shapes: O outputs, I inputs, N rows.
"""

from dataclasses import dataclass

import torch

from ..kernels import GpuMatrix, linear
from .format import MAKERS, Format, Parts, Sizes


@dataclass(frozen=True)
class Plain(Format):
    """A matrix in a floating-point dtype; the only format whose weights can have gradients.

    Its one part is `[O, I]`, or `[I, O]` if input-first. Rows of another dtype have the matrix cast to theirs.

    Attributes:
        is_input_first: whether the part is `[I, O]`.
    """

    compute_dtype: torch.dtype
    is_input_first: bool = False
    suffixes = ("",)
    is_packed = False

    @property
    def key(self) -> str:
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return f"plain:{dtype}:{int(self.is_input_first)}"

    @property
    def alignment(self) -> int:
        return self.compute_dtype.itemsize

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(sizes[:: -1 if self.is_input_first else 1], self.compute_dtype)]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        weight = weight_OI.T if self.is_input_first else weight_OI
        return [weight.to(self.compute_dtype).contiguous()]

    def input_first(self, parts: Parts) -> torch.Tensor:
        """The matrix `[I, O]`, or a stack of them: the part itself, or a view."""
        return parts[0] if self.is_input_first else parts[0].mT

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        return self.input_first(parts).mT.to(dtype)

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def dtype_in_autocast(self, dtype: torch.dtype) -> torch.dtype:
        # Autocast leaves float64 alone.
        return self.compute_dtype if self.compute_dtype == torch.float64 else dtype

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        weight_OI = self.input_first(parts).mT
        apart = weight_OI.stride(0) if weight_OI.dim() == 3 else 0
        return GpuMatrix("dense", sizes, parts[0], strides=(apart, *weight_OI.stride()[-2:]))

    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        weight_IO = self.input_first(parts).to(x_NI.dtype)
        return linear(x_NI, weight_IO.T)

    def multiply_transposed(self, x_NO: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        return self.multiply(x_NO, [parts[0].T], sizes)


_PLAIN = {
    is_input_first: {
        dtype: Plain(dtype, is_input_first)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    }
    for is_input_first in (False, True)
}


def plain_format(dtype: torch.dtype, is_input_first: bool) -> Plain:
    """The plain format of this dtype and order."""
    return _PLAIN[is_input_first].get(dtype) or Plain(dtype, is_input_first)


MAKERS["plain"] = lambda dtype, is_input_first: plain_format(getattr(torch, dtype), is_input_first == "1")
