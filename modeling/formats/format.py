"""What the numbers of a matrix are: the questions that each format answers, and `MAKERS`, the table of all formats.

A format works on one matrix `[O, I]` of a linear layer or of one expert. It is stored as one or several tensors, its
parts. A stack of experts has the same parts with an axis for experts in front. A format knows no modules.

Shapes: O outputs, I inputs, N rows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import ClassVar

import torch

from ..kernels import GpuMatrix

Parts = Sequence[torch.Tensor]
Sizes = tuple[int, int]
"""O and I."""


def chunk_of(device: torch.device) -> int:
    """Weights that are quantized at a time: what a processor's cache holds, or, where launches cost, a whole matrix."""
    # Half a gigabyte in float32, for the largest heads in vocabularies.
    return 1 << 17 if device.type == "cpu" else 1 << 27


class Format(ABC):
    """One way to store a matrix."""

    suffixes: ClassVar[tuple[str, ...]]
    """What follows the weight's name in the names of the parts; the first is "", the weight or its codes."""
    compute_dtype: torch.dtype
    """Dtype of the products."""
    is_packed: ClassVar[bool] = True
    """Whether the first part holds codes, which only this format's products read, and not numbers."""

    @property
    def kernel_max_rows(self) -> int:
        """Up to this many rows a compiled kernel is faster than unpacking once."""
        return 0

    @property
    def alignment(self) -> int:
        """Bytes of which the address of the first part must be a multiple for a kernel."""
        return 1

    @property
    @abstractmethod
    def key(self) -> str:
        """Text from which `format_of` makes this format again: operators take no objects."""

    @property
    def exact(self) -> "Format":
        """The format whose products do not round rows: what training takes."""
        return self

    def refusal(self, sizes: Sizes) -> str | None:
        """Why a matrix of these sizes cannot be stored; None if it can."""
        return None

    @abstractmethod
    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part."""

    def nbytes(self, sizes: Sizes) -> int:
        """Bytes of all parts."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts(sizes))

    @abstractmethod
    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a matrix of any float dtype and strides."""

    @abstractmethod
    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """The matrix `[O, I]` that the parts mean; mostly a view with other strides."""

    @abstractmethod
    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """The rows times the transpose of the matrix, `[N, O]`, both in `compute_dtype`."""

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in a dtype that the products take."""
        return x if x.dtype == self.compute_dtype else x.to(self.compute_dtype)

    def dtype_in_autocast(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the products where autocast asks for one; packed weights have one of their own."""
        return self.compute_dtype

    def gpu_kernel_refusal(self, sizes: Sizes, dtype: torch.dtype) -> str | None:
        """Why the Triton kernels do not multiply rows of a dtype by matrices of these sizes; None if they do."""
        if type(self).for_gpu_kernel is Format.for_gpu_kernel:
            return f"{self.key} has no Triton kernel."
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"The kernels take rows of bfloat16, float16 or float32, not {dtype}."
        return None

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        """The matrix for `kernels.packed_product`, or a stack of them; None if it does not know this format."""
        return None

    def multiply_transposed(self, x_NO: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """The rows times the matrix, `[N, I]`: the gradient of `multiply`."""
        return x_NO @ self.matrix(parts, sizes, x_NO.dtype)


MAKERS: dict[str, Callable[..., Format]] = {}
"""What makes a format of its key's fields, by the key's first word."""


@lru_cache
def format_of(key: str) -> Format:
    """The format of this key."""
    name, *fields = key.split(":")
    return MAKERS[name](*fields)
