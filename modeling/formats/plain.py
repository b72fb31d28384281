"""Plain weights, as trained: floats of 16, 32 or 64 bits.

Shapes: O outputs, I inputs, N rows.
"""

from dataclasses import dataclass

import torch

from ..kernels import GpuMatrix
from .format import MAKERS, Format, Parts, Sizes


@dataclass(frozen=True)
class Plain(Format):
    """The format of a matrix in a floating-point dtype, and the only one whose weights can have gradients.

    It has one part, `[O, I]` or `[I, O]`. Products cast the matrix to the dtype of the rows.

    Attributes:
        compute_dtype: dtype of the part.
        is_input_first: True if the part is `[I, O]`.
    """

    compute_dtype: torch.dtype
    is_input_first: bool = False
    suffixes = ("",)
    is_packed = False

    @property
    def key(self) -> str:
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return f"plain:{dtype}:{int(self.is_input_first)}"

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(sizes[:: -1 if self.is_input_first else 1], self.compute_dtype)]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        weight = weight_OI.T if self.is_input_first else weight_OI
        return [weight.to(self.compute_dtype).contiguous()]

    def input_first(self, parts: Parts) -> torch.Tensor:
        """Return the matrix `[I, O]`, or a stack of them: the part itself, or a view."""
        return parts[0] if self.is_input_first else parts[0].mT

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        return self.input_first(parts).mT.to(dtype)

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        weight_OI = self.input_first(parts).mT
        expert_stride = weight_OI.stride(0) if weight_OI.dim() == 3 else 0
        return GpuMatrix("dense", sizes, parts[0], strides=(expert_stride, *weight_OI.stride()[-2:]))


MAKERS["plain"] = lambda dtype, is_input_first: Plain(getattr(torch, dtype), is_input_first == "1")
