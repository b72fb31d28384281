"""Interface of weight formats, products with packed matrices, and `MAKERS`, the table of all formats.

A format stores one matrix `[O, I]`, of a linear layer or of one expert, as one or several tensors, its parts. A stack
of experts has the same parts with an axis for experts in front. A format uses no modules.

A new format is one file of this folder, `<word>.py`: a frozen dataclass that derives from `Format`, and
`MAKERS["<word>"]`. It must give

* `suffixes` and `compute_dtype`;
* `key`: its word and its fields, such as "int4:32", from which the maker makes an equal format;
* `parts(sizes)`: shapes and dtypes of the parts; the first holds the codes;
* `quantize(weight)`: the parts of a matrix;
* `matrix(parts, sizes, dtype)`: the unpacked matrix, which products use by default.

It may give `refusal`, if it does not support all sizes; `multiply` and `multiply_transposed`, if it has a product
faster than unpacking first; and `for_gpu_kernel`, if the Triton kernels support its codes.
`QuantizedLinear(layer, form)` and `QuantizedExperts(experts, form)` take any format.

Shapes: O outputs, I inputs, N rows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar

import torch

from ..kernels import (
    GpuMatrix,
    is_right,
    linear,
    max_rows_of_matrix,
    packed_product,
    why_no_gpu_kernel,
)

Parts = Sequence[torch.Tensor]
Sizes = tuple[int, int]
"""O and I."""


class Format(ABC):
    """One way to store a matrix, and the products of rows with it from either side."""

    suffixes: ClassVar[tuple[str, ...]]
    """Suffixes of the parts' names after the weight's name; the first is "", for the weight or its codes."""
    compute_dtype: torch.dtype
    """Dtype of the products."""
    is_packed: ClassVar[bool] = True
    """True if the first part holds codes, which only this format can read, instead of plain weights."""
    is_unfused_in_files: ClassVar[bool] = False
    """True if files store an expert's gate, up and down separately, as linear layers."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Text from which `format_of` makes this format again: custom operators take no objects."""

    @property
    def exact(self) -> "Format":
        """The same format without rounding of rows to 8 bits, as training needs."""
        return self

    def refusal(self, sizes: Sizes) -> str | None:
        """Explain why a matrix of these sizes cannot be stored; None if it can."""
        return None

    @abstractmethod
    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each part."""

    def nbytes(self, sizes: Sizes) -> int:
        """Return the size of all parts in bytes."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts(sizes))

    @abstractmethod
    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        """Quantize a matrix of any float dtype and strides to its parts."""

    @abstractmethod
    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized matrix `[O, I]`, which may be a view with any strides."""

    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """Multiply rows by the transposed matrix, `[N, O]`, both in `compute_dtype`."""
        return linear(x_NI, self.matrix(parts, sizes, x_NI.dtype))

    def multiply_transposed(self, x_NO: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """Multiply rows by the matrix, `[N, I]`: the gradient of `multiply`."""
        return linear(x_NO, self.matrix(parts, sizes, x_NO.dtype).T)

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        """Return a matrix or a stack for `kernels.packed_product`; None if it does not support this format."""
        return None

    def product(
        self, x_NC: torch.Tensor, parts: Parts, sizes: Sizes, transposed: bool = False
    ) -> torch.Tensor:
        """Multiply rows by the matrix or its transpose; few rows by a Triton kernel, if there is one for the format."""
        device = parts[0].device
        if (
            self.is_packed
            and may_have_gpu_kernel(device)
            and x_NC.shape[0] <= max_rows_of_matrix(device)
            and has_gpu_kernel(self, parts, sizes, x_NC.dtype, transposed=transposed)
        ):
            matrix: Any = self.for_gpu_kernel(parts, sizes)
            return packed_product(x_NC, matrix, transposed=transposed)
        return (self.multiply_transposed if transposed else self.multiply)(x_NC, parts, sizes)


def may_have_gpu_kernel(device: torch.device) -> bool:
    """Return True if the device type can have kernels for packed matrices; runs for each product."""
    return device.type == "cuda"


# A compiler runs this function while tracing, and treats the result as a constant.
_why_no_gpu_kernel = torch.compiler.assume_constant_result(why_no_gpu_kernel)


def has_gpu_kernel(
    form: Format,
    parts: Parts,
    sizes: Sizes,
    dtype: torch.dtype | None = None,
    num_experts: int = 0,
    transposed: bool = False,
    may_check: bool = True,
) -> bool:
    """Return True if a Triton kernel multiplies such matrices correctly; the first call checks it.

    Args:
        form: of the parts.
        parts: of one matrix, or of a stack.
        sizes: O and I.
        dtype: of the rows; default: the format's.
        num_experts: E; 0 for one matrix.
        transposed: for the product of gradients.
        may_check: run the check if there was none; it launches kernels and waits for them.
    """
    dtype = dtype or form.compute_dtype
    # The kernels do not cast plain weights.
    is_supported = dtype != torch.float64 and (form.is_packed or dtype == form.compute_dtype)
    if not is_supported or _why_no_gpu_kernel(parts[0].device):
        return False
    matrix = form.for_gpu_kernel(parts, sizes)

    def unpacked(codes: torch.Tensor, expert: int) -> torch.Tensor:
        of_stack = [codes, *parts[1:]]
        of_one = [part[expert] for part in of_stack] if num_experts else of_stack
        return form.matrix(of_one, sizes, dtype).to(dtype)

    return matrix is not None and is_right(matrix, unpacked, dtype, num_experts, transposed, may_check)


MAKERS: dict[str, Callable[..., Format]] = {}
"""Functions from a key's fields to its format, by the key's first word; each format's file adds its own."""


@lru_cache
def format_of(key: str) -> Format:
    """Make the format of this key."""
    name, *fields = key.split(":")
    if name not in MAKERS:
        import_module(f"{__package__}.{name}")
    return MAKERS[name](*fields)
