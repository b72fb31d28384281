"""bitsandbytes' formats: what `Linear4bit` and `Linear8bitLt` hold, for the experts' matrices.

An expert's gate and up lie in one stack, but un-fused they are two linear layers, which bitsandbytes quantizes each by
itself: their blocks and nested statistics are two. So every part has an axis in front for the matrices that lie upon
each other, of which the down projection has one.

bitsandbytes is imported when a matrix is quantized, unpacked or multiplied.

Shapes: O outputs, I inputs, M matrices with O / M outputs each, N rows, B blocks of a matrix.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from ..kernels import GpuMatrix
from .format import MAKERS, Format, Parts, Sizes
from .int8 import Int8

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# Blocks that share a scale of their scales.
NESTED_BLOCKSIZE = 256
# bitsandbytes' kernel for CPUs takes 24 bytes for each number that it quantizes. Whole blocks of all sizes.
_NUMBERS_AT_ONCE = 1 << 16
# Rows in 8 bits that become float32 at once.
_ROWS_AT_ONCE = 1024
# Addresses from which CUDA kernels load several codes at once.
_ALIGNMENT = 16
_INT8 = Int8()
# Of a scale, in 8 bits.
_PER_CODE = 1 / 127


@dataclass(frozen=True)
class BitsAndBytesFormat(Format):
    """Several matrices, each stored as bitsandbytes stores a linear layer's weight.

    Attributes:
        compute_dtype: of the products.
        matrices: M.
    """

    compute_dtype: torch.dtype
    matrices: int = 1

    def of_one(self, sizes: Sizes) -> Sizes:
        """Sizes of each of the matrices."""
        return sizes[0] // self.matrices, sizes[1]

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((self.matrices, *shape), dtype) for shape, dtype in self.parts_of_one(*self.of_one(sizes))]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        found = [self.quantize_one(matrix) for matrix in weight_OI.chunk(self.matrices)]
        return [torch.stack(each) for each in zip(*found, strict=True)]

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        if self.matrices == 1:
            return self.one_matrix([part[0] for part in parts], sizes, dtype)
        whole = torch.empty(sizes, dtype=dtype, device=parts[0].device)
        for rows, one in zip(whole.chunk(self.matrices), zip(*parts, strict=True), strict=True):
            # One after the other: joined afterwards, all of them would be there twice.
            rows.copy_(self.one_matrix(one, self.of_one(sizes), dtype))
        return whole

    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        return _joined(
            [self.multiply_one(x_NI, one, self.of_one(sizes)) for one in zip(*parts, strict=True)], 1
        )

    @abstractmethod
    def parts_of_one(self, num_out: int, num_in: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of one matrix."""

    @abstractmethod
    def quantize_one(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """The parts of one matrix `[O / M, I]` of 16 or 32 bits."""

    @abstractmethod
    def one_matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """The matrix that the parts of one mean."""

    @abstractmethod
    def multiply_one(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        """The rows times the transpose of one matrix."""


@dataclass(frozen=True)
class Bnb4Bit(BitsAndBytesFormat):
    """Codes of 4 bits and a scale for each block of weights, as in `Linear4bit`.

    Parts: codes `[M, ceil(O / M * I / 2)]` uint8, and scales `[M, B]` float32, called absmax. Products are
    bitsandbytes' own: its kernels for few rows on GPUs, and a matrix that is unpacked first elsewhere. Its kernel for
    CPUs with bfloat16 is left out. It takes codes in another order and scales of 16 bits, from which neither the
    stored weights nor a GPU's products could be had again.

    Attributes:
        quant_type: "nf4" or "fp4".
        blocksize: weights in a block.
    """

    quant_type: str = "nf4"
    blocksize: int = 64
    suffixes = ("", "_absmax")
    is_nested = False

    @property
    def key(self) -> str:
        fields = [_name(self.compute_dtype), str(self.matrices), self.quant_type, str(self.blocksize)]
        return ":".join(["bitsandbytes-4bit" + ("-nested" if self.is_nested else ""), *fields])

    def parts_of_one(self, num_out: int, num_in: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        numbers = num_out * num_in
        return [((-(-numbers // 2),), torch.uint8), ((-(-numbers // self.blocksize),), torch.float32)]

    def quantize_one(self, weight: torch.Tensor) -> list[torch.Tensor]:
        from bitsandbytes.functional import quantize_4bit

        numbers = weight.reshape(-1)
        codes, scales = [], []
        for part in numbers.split(_NUMBERS_AT_ONCE if weight.is_cpu else numbers.numel()):
            part_codes, state = quantize_4bit(part, blocksize=self.blocksize, quant_type=self.quant_type)
            codes.append(part_codes.view(-1))
            scales.append(state.absmax)
        return [_joined(codes, 0), *self._statistics(_joined(scales, 0))]

    def one_matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(_aligned(parts[0]).view(-1, 1), self.state(parts, sizes, dtype))

    def multiply_one(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        from bitsandbytes import matmul_4bit

        # Releases before 0.50 want a row, as `Linear4bit` gave it to them, and later ones take it, too.
        codes = _aligned(parts[0]).view(1, -1)
        return matmul_4bit(x_NI, codes, quant_state=self.state(parts, sizes, x_NI.dtype))

    def gpu_kernel_refusal(self, sizes: Sizes, dtype: torch.dtype) -> str | None:
        if sizes[1] % self.blocksize:
            return f"The kernels take whole blocks: {sizes[1]} inputs are not a multiple of blocksize={self.blocksize}."
        return super().gpu_kernel_refusal(sizes, dtype)

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        codes, scales, *nested = parts
        device = codes.device
        return GpuMatrix(
            "table",
            sizes,
            codes,
            scales,
            group=self.blocksize,
            table=code_of(self.quant_type, device),
            nested=nested[0] if nested else None,
            offset=nested[1] if nested else None,
            dynamic=code_of("dynamic", device) if nested else None,
            matrices=self.matrices,
        )

    def state(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> Any:
        """The `QuantState` of one matrix; `dtype` is that of the unpacked weights."""
        from bitsandbytes.functional import QuantState

        return QuantState(
            absmax=parts[1],
            shape=torch.Size(sizes),
            code=code_of(self.quant_type, parts[0].device),
            blocksize=self.blocksize,
            quant_type=self.quant_type,
            dtype=dtype,
        )

    def _statistics(self, absmax: torch.Tensor) -> list[torch.Tensor]:
        """The parts but the codes, from the scales `[B]`."""
        return [absmax]


@dataclass(frozen=True)
class Bnb4BitNested(Bnb4Bit):
    """The same with double quantization: the scales are codes themselves.

    Parts: codes; codes of the scales `[M, B]` uint8; their own scales `[M, ceil(B / 256)]` float32, called nested
    absmax; and the mean of the scales `[M]` float32, called offset.
    """

    suffixes = ("", "_absmax", "_nested_absmax", "_nested_offset")
    is_nested = True

    def parts_of_one(self, num_out: int, num_in: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        codes, (blocks, _) = super().parts_of_one(num_out, num_in)
        nested = (-(-blocks[0] // NESTED_BLOCKSIZE),)
        return [codes, (blocks, torch.uint8), (nested, torch.float32), ((), torch.float32)]

    def state(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> Any:
        from bitsandbytes.functional import QuantState

        state = super().state(parts, sizes, dtype)
        state.offset = parts[3]
        state.state2 = QuantState(
            absmax=parts[2],
            code=code_of("dynamic", parts[0].device),
            blocksize=NESTED_BLOCKSIZE,
            dtype=torch.float32,
        )
        state.nested = True
        return state

    def _statistics(self, absmax: torch.Tensor) -> list[torch.Tensor]:
        from bitsandbytes.functional import quantize_blockwise

        offset = absmax.mean()
        codes, state = quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCKSIZE)
        return [codes, state.absmax, offset]


@dataclass(frozen=True)
class Bnb8Bit(BitsAndBytesFormat):
    """Codes of 8 bits and a scale for each output, as in `Linear8bitLt`.

    Parts: codes `[M, O / M, I]` int8, and the largest absolute weight of each output, `[M, O / M]` float32, which
    bitsandbytes calls SCB; a weight is `code * SCB / 127`. The weights are those of LLM.int8(), and the rows stay in
    the products' dtype: nothing of them is rounded to 8 bits, and no outliers are looked for.
    """

    suffixes = ("", "_scb")

    @property
    def key(self) -> str:
        return f"bitsandbytes-8bit:{_name(self.compute_dtype)}:{self.matrices}"

    def parts_of_one(self, num_out: int, num_in: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((num_out, num_in), torch.int8), ((num_out,), torch.float32)]

    def quantize_one(self, weight: torch.Tensor) -> list[torch.Tensor]:
        from bitsandbytes.functional import int8_vectorwise_quant

        at_once = max(_NUMBERS_AT_ONCE // weight.shape[1], 1) if weight.is_cpu else len(weight)
        found = [
            int8_vectorwise_quant(rows.contiguous().to(torch.float16))[:2] for rows in weight.split(at_once)
        ]
        return [_joined(list(parts), 0) for parts in zip(*found, strict=True)]

    def one_matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.empty(sizes, dtype=dtype, device=parts[0].device)
        pieces = (each.split(_ROWS_AT_ONCE) for each in (whole, *parts))
        for rows, codes, scb in zip(*pieces, strict=True):
            # In bitsandbytes' own order.
            rows.copy_((codes * scb[:, None]).mul_(_PER_CODE))
        return whole

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        # Matrices that lie upon each other are one with more outputs.
        return GpuMatrix("dense", sizes, *parts, part=_PER_CODE, strides=(sizes[0] * sizes[1], sizes[1], 1))

    def multiply_one(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        codes, scb = parts
        # Codes are exact in bfloat16, and their products with rows of float16 could be too large.
        if x_NI.dtype == torch.bfloat16 and _INT8.refusal(sizes) is None:
            y_NO = _INT8.multiply(x_NI, [codes, _ones(sizes[0], codes.device)], sizes)
            return (y_NO * (scb * _PER_CODE)).to(x_NI.dtype)
        return F.linear(x_NI, self.one_matrix(parts, sizes, x_NI.dtype))


@lru_cache
def code_of(name: str, device: torch.device) -> torch.Tensor:
    """The numbers that codes stand for: of "nf4" or "fp4", or of the scales with double quantization, "dynamic"."""
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    return create_dynamic_map().to(device) if name == "dynamic" else get_4bit_type(name, device=device)


@lru_cache
def _ones(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16, device=device)


def _joined(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _aligned(codes: torch.Tensor) -> torch.Tensor:
    """Codes of an expert at an address that kernels take: sizes that are not multiples of 32 leave others."""
    return codes.clone() if codes.is_cuda and codes.data_ptr() % _ALIGNMENT else codes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _four_bits(form: type[Bnb4Bit]) -> Callable[..., Format]:
    return lambda dtype, matrices, quant_type, size: form(
        getattr(torch, dtype), int(matrices), quant_type, int(size)
    )


MAKERS["bitsandbytes-4bit"] = _four_bits(Bnb4Bit)
MAKERS["bitsandbytes-4bit-nested"] = _four_bits(Bnb4BitNested)
MAKERS["bitsandbytes-8bit"] = lambda dtype, matrices: Bnb8Bit(getattr(torch, dtype), int(matrices))
