"""Formats of a quantized matrix: what it is stored as, how rows are multiplied by it, and what it means.

A format works on one matrix `[O, I]` of a linear layer or of one expert. It is stored as several tensors, its parts. A
stack of experts has the same parts with an axis for experts in front.

Shapes: O outputs, I inputs, P inputs with padding, N rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch.nn import functional as F

from ..kernels import Matrix, cpp_products
from .int4_layout import BLOCK, ROWS_MULTIPLE, byte_rows, from_byte_order, pack, to_byte_order
from .scales import asymmetric, symmetric

Parts = Sequence[torch.Tensor]
Sizes = tuple[int, int]
"""O and I."""

# Weights that are quantized or unpacked at a time: what the processor's cache holds.
_CHUNK = 1 << 17
# Share of a matrix that padding may add.
_MOST_PADDING = 1 / 8


class Format(ABC):
    """One way to store a matrix."""

    suffixes: ClassVar[tuple[str, ...]]
    """What follows the weight's name in the names of the parts; the first is "", the packed codes."""
    compute_dtype: torch.dtype
    alignment: ClassVar[int] = 1
    """Bytes of which the address of the codes must be a multiple for a kernel."""
    kernel_max_rows: ClassVar[int] = 0
    """Up to this many rows a kernel, which unpacks for each few rows, is faster than unpacking once."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Text from which `format_of` makes this format again: operators take no objects."""

    @abstractmethod
    def refusal(self, sizes: Sizes) -> str | None:
        """Why a matrix of these sizes cannot be stored; None if it can."""

    @abstractmethod
    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part."""

    @abstractmethod
    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a matrix of any float dtype and strides."""

    @abstractmethod
    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """The matrix `[O, I]` that the parts mean; mostly a view with other strides."""

    @abstractmethod
    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """The rows times the transpose of the matrix, `[N, O]`, both in `compute_dtype`."""

    def for_kernel(self, parts: Parts) -> Matrix | None:
        """The matrix for `kernels.cpp_kernels`; None if they do not know this format, or it is not on the CPU."""
        return None

    def multiply_transposed(self, x_NO: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """The rows times the matrix, `[N, I]`: the gradient of `multiply`."""
        return x_NO @ self.matrix(parts, sizes, x_NO.dtype)


@dataclass(frozen=True)
class Int4(Format):
    """A scale and an offset for each output and group of inputs; products by a kernel on a CPU with AVX-512.

    Parts: the codes in the kernel's layout, and `[P / group_size, O, 2]` bfloat16, scale and offset. A last group that
    is not full is padded.

    Attributes:
        group_size: inputs that share a scale.
        search: whether scales minimise the squared error.
    """

    group_size: int
    search: bool = True
    suffixes = ("", "_scale")
    compute_dtype = torch.bfloat16
    kernel_max_rows = 1024
    # The same of torch's kernel.
    torch_max_rows = 80

    @property
    def key(self) -> str:
        """See `Format`."""
        return f"int4:{self.group_size}"

    def refusal(self, sizes: Sizes) -> str | None:
        """See `Format`."""
        num_out, num_in = sizes
        if num_out % ROWS_MULTIPLE:
            return f"it has {num_out} outputs, which is no multiple of {ROWS_MULTIPLE}, as int4 needs"
        if (padding := self._padded(num_in) - num_in) > num_in * _MOST_PADDING:
            return (
                f"its {num_in} inputs are no multiple of group_size={self.group_size}, and padding would add "
                f"{padding / num_in:.0%}"
            )
        return None

    def _padded(self, num_in: int) -> int:
        return -(-num_in // self.group_size) * self.group_size

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """See `Format`."""
        num_out, padded = sizes[0], self._padded(sizes[1])
        scales = (padded // self.group_size, num_out, 2)
        return [((num_out, padded // 2), torch.uint8), (scales, torch.bfloat16)]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        """See `Format`."""
        codes, scales = (
            torch.empty(shape, dtype=dtype, device=weight_OI.device)
            for shape, dtype in self.parts(weight_OI.shape)
        )
        padding = self._padded(weight_OI.shape[1]) - weight_OI.shape[1]
        step = max(_CHUNK // weight_OI.shape[1] // BLOCK, 1) * BLOCK
        for start in range(0, len(weight_OI), step):
            rows = weight_OI[start : start + step].contiguous().float()
            if padding:
                # The last weight again, so that the range does not change.
                rows = F.pad(rows[None], (0, padding), mode="replicate")[0]
            found = asymmetric(rows.view(-1, self.group_size), self.search)
            codes[start : start + step] = pack(found[0].view(rows.shape))
            scales[:, start : start + step] = torch.cat(found[1:], 1).view(len(rows), -1, 2).transpose(0, 1)
        return [codes, scales]

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """See `Format`."""
        weight_PO = from_byte_order(self._in_byte_order(parts, dtype))
        return weight_PO[: sizes[1]].T

    def _in_byte_order(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """The matrix `[P, O]`, with its outputs in the order of the bytes."""
        packed, scales = parts
        num_out, padded = packed.shape[0], packed.shape[1] * 2
        dtype = dtype if dtype == torch.bfloat16 else torch.float32
        table = _values_of_bytes(dtype, packed.device)
        scale_G1O, offset_G1O = (to_byte_order(each)[:, None].to(dtype) for each in scales.unbind(2))
        out_PO = torch.empty(padded, num_out, dtype=dtype, device=packed.device)
        groups = max(_CHUNK // num_out // self.group_size, 1)
        for start in range(0, padded // self.group_size, groups):
            some = slice(start, start + groups)
            inputs = slice(start * self.group_size, (start + groups) * self.group_size)
            values = table.index_select(0, byte_rows(packed, inputs).flatten()).view(dtype)
            codes_GgO = values.view(-1, self.group_size, num_out)
            out_GgO = out_PO[inputs].view(codes_GgO.shape)
            torch.addcmul(offset_G1O[some], codes_GgO, scale_G1O[some], out=out_GgO)
        return out_PO

    def for_kernel(self, parts: Parts) -> Matrix | None:
        """See `Format`."""
        return Matrix(4, self.group_size, *parts) if parts[0].is_cpu else None

    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """See `Format`."""
        packed, scales = parts
        if padding := packed.shape[1] * 2 - x_NI.shape[1]:
            x_NI = F.pad(x_NI, (0, padding))
        if packed.is_cpu and len(x_NI) <= self.kernel_max_rows:
            y_NO = cpp_products(x_NI, [self.for_kernel(parts)])
            if y_NO is not None:
                return y_NO
        if packed.is_cpu and len(x_NI) <= self.torch_max_rows and reads_int4_layout():
            return torch.ops.aten._weight_int4pack_mm_for_cpu(
                x_NI.contiguous(), packed, self.group_size, scales
            )
        return from_byte_order(x_NI @ self._in_byte_order(parts, x_NI.dtype))

    def multiply_transposed(self, x_NO: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """See `Format`."""
        return (to_byte_order(x_NO) @ self._in_byte_order(parts, x_NO.dtype).T)[:, : sizes[1]]


@dataclass(frozen=True)
class Int8(Format):
    """A scale for each output; products by a kernel on a CPU.

    Parts: codes `[O, I]` int8, and scales `[O]` bfloat16.

    Attributes:
        search: whether scales minimise the squared error.
    """

    search: bool = True
    suffixes = ("", "_scale")
    compute_dtype = torch.bfloat16
    kernel_max_rows = 24
    # Rows and codes begin at multiples of it: torch's kernel does not check that, and ends the process elsewhere.
    alignment = 32

    @property
    def key(self) -> str:
        """See `Format`."""
        return "int8"

    def refusal(self, sizes: Sizes) -> str | None:
        """See `Format`."""
        if sizes[1] % ROWS_MULTIPLE:
            return f"its {sizes[1]} inputs are no multiple of {ROWS_MULTIPLE}, as int8 needs"
        return None

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """See `Format`."""
        return [(tuple(sizes), torch.int8), ((sizes[0],), torch.bfloat16)]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        """See `Format`."""
        codes, scales = (
            torch.empty(shape, dtype=dtype, device=weight_OI.device)
            for shape, dtype in self.parts(weight_OI.shape)
        )
        step = max(_CHUNK // weight_OI.shape[1], 1)
        for start in range(0, len(weight_OI), step):
            rows = weight_OI[start : start + step].contiguous().float()
            codes[start : start + step], found = symmetric(rows, self.search)
            scales[start : start + step] = found[:, 0]
        return [codes, scales]

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """See `Format`."""
        codes, scales = parts
        return codes.to(dtype).mul_(scales.to(dtype)[:, None])

    def for_kernel(self, parts: Parts) -> Matrix | None:
        """See `Format`."""
        return Matrix(8, 0, *parts) if parts[0].is_cpu else None

    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """See `Format`."""
        codes, scales = parts
        if len(x_NI) <= self.kernel_max_rows and codes.is_cpu:
            y_NO = cpp_products(x_NI, [self.for_kernel(parts)])
            if y_NO is not None:
                return y_NO
        if len(x_NI) <= self.kernel_max_rows and codes.is_cpu and codes.data_ptr() % self.alignment == 0:
            x_NI = x_NI.contiguous()
            if x_NI.data_ptr() % self.alignment:
                x_NI = x_NI.clone()
            return torch.ops.aten._weight_int8pack_mm(x_NI, codes, scales)
        return (x_NI @ codes.to(x_NI.dtype).T).mul_(scales)

    def multiply_transposed(self, x_NO: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """See `Format`."""
        codes, scales = parts
        return (x_NO * scales) @ codes.to(x_NO.dtype)


@lru_cache
def reads_int4_layout() -> bool:
    """Whether torch's 4-bit kernel reads our layout on this machine: on a CPU with AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@lru_cache
def _values_of_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[256]` integers: of each byte both codes less 8, in the bits of two floats side by side."""
    bytes_ = torch.arange(256, device=device)
    values = torch.stack([bytes_ % 16 - 8, bytes_ // 16 - 8], 1).to(dtype)
    return values.view(torch.int32 if dtype.itemsize == 2 else torch.int64).flatten()


MAKERS: dict[str, Callable[..., Format]] = {"int4": lambda size: Int4(int(size)), "int8": Int8}
"""What makes a format of its key's fields, by the key's first word."""


@lru_cache
def format_of(key: str) -> Format:
    """The format of this key."""
    name, *fields = key.split(":")
    return MAKERS[name](*fields)
