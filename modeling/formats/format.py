"""Interface of weight formats, products with packed matrices, and `MAKERS`, the table of all formats.

A format stores the matrix `[O, I]` of a linear layer or of one expert as one or more tensors, called its parts. For a
stack of experts each part has an axis for experts in front.

To add a format, add one file `<word>.py` to this folder. It defines a frozen dataclass that derives from `Format`, and
enters it as `MAKERS["<word>"]`. The class must define

* `suffixes` and `compute_dtype`;
* `key`: the word and the fields, such as "int4:32", from which `MAKERS["<word>"]` makes an equal format;
* `parts(sizes)`: the shapes and dtypes of the parts; the first part holds the codes;
* `quantize(weight)`: the parts of a matrix;
* `matrix(parts, sizes, dtype)`: the unpacked matrix, which `multiply` uses by default.

The class may define `refusal` if it does not support all sizes, `multiply` and `multiply_transposed` if it has products
that are faster than unpacking first, and `for_gpu_kernel` if the Triton kernels can read its codes.
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
    """A way to store a matrix, with the products of rows and the matrix or its transpose."""

    suffixes: ClassVar[tuple[str, ...]]
    """What follows the weight's name in the names of the parts. The first is "", for the weight itself or its codes."""
    compute_dtype: torch.dtype
    """Dtype of the products."""
    is_packed: ClassVar[bool] = True
    """True if the first part holds codes, False if it holds plain weights."""
    is_unfused_in_files: ClassVar[bool] = False
    """True if files store an expert's gate, up and down as three linear layers."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Text from which `format_of` makes an equal format: custom operators take no objects as arguments."""

    @property
    def exact(self) -> "Format":
        """This format with products that do not round rows to 8 bits, as training needs."""
        return self

    def refusal(self, sizes: Sizes) -> str | None:
        """Return why a matrix of these sizes cannot be stored; None if it can."""
        return None

    @abstractmethod
    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each part of one matrix."""

    def nbytes(self, sizes: Sizes) -> int:
        """Return the bytes of all parts of one matrix."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts(sizes))

    @abstractmethod
    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        """Quantize a matrix of any float dtype and strides to its parts."""

    @abstractmethod
    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized matrix `[O, I]`, maybe as a view with any strides."""

    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """Multiply rows in `compute_dtype` by the transposed matrix: `[N, O]`."""
        return linear(x_NI, self.matrix(parts, sizes, x_NI.dtype))

    def multiply_transposed(self, x_NO: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """Multiply rows in `compute_dtype` by the matrix, as for gradients of rows: `[N, I]`."""
        return linear(x_NO, self.matrix(parts, sizes, x_NO.dtype).T)

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        """Describe a matrix or a stack to `kernels.packed_product`; None if that cannot read this format."""
        return None

    def product(
        self, x_NC: torch.Tensor, parts: Parts, sizes: Sizes, transposed: bool = False
    ) -> torch.Tensor:
        """Multiply rows by the transposed matrix, or, if `transposed`, by the matrix; few rows by a Triton kernel."""
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
    """Return True if there are Triton kernels for this type of device; cheap, since each product asks."""
    return device.type == "cuda"


# torch.compile runs this function while it traces, and takes the result as a constant.
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
    """Return True if a Triton kernel multiplies matrices like this one correctly; the first call checks the kernel.

    Args:
        form: format of the matrix.
        parts: parts of one matrix, or of a stack.
        sizes: O and I.
        dtype: dtype of the rows; default: `compute_dtype` of the format.
        num_experts: E; 0 for one matrix.
        transposed: ask for the kernel of `multiply_transposed`.
        may_check: launch kernels to check them, unless they are checked; False: take unchecked kernels for wrong.
    """
    dtype = dtype or form.compute_dtype
    # The kernels cast codes to the dtype of the rows, but no plain weights.
    is_supported = dtype != torch.float64 and (form.is_packed or dtype == form.compute_dtype)
    if not is_supported or _why_no_gpu_kernel(parts[0].device):
        return False
    matrix = form.for_gpu_kernel(parts, sizes)

    def unpacked(codes: torch.Tensor, expert: int) -> torch.Tensor:
        all_parts = [codes, *parts[1:]]
        parts_of_one = [part[expert] for part in all_parts] if num_experts else all_parts
        return form.matrix(parts_of_one, sizes, dtype).to(dtype)

    return matrix is not None and is_right(matrix, unpacked, dtype, num_experts, transposed, may_check)


MAKERS: dict[str, Callable[..., Format]] = {}
"""By the first word of a key, the function that makes a format from the key's other fields."""


@lru_cache
def format_of(key: str) -> Format:
    """Return the format with this key; its file is imported if need be."""
    name, *fields = key.split(":")
    if name not in MAKERS:
        import_module(f"{__package__}.{name}")
    return MAKERS[name](*fields)
