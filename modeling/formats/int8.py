"""int8: 8-bit codes, with a scale for each output.

Shapes: O outputs, I inputs, N rows.
"""

from dataclasses import dataclass

import torch

from ..kernels import (
    INT8_TORCH_MAX_ROWS,
    GpuMatrix,
    Matrix,
    blocks_in,
    cpp_product,
    dtype_of_blocks,
    needs_float32,
)
from .format import MAKERS, Parts, Sizes
from .int4_layout import ROWS_MULTIPLE
from .scales import FewBits, rows_of, symmetric


@dataclass(frozen=True)
class Int8(FewBits):
    """8-bit codes, with a scale for each output; CPU kernels multiply them.

    Parts: codes `[O, I]` int8, and scales `[O]` bfloat16.
    """

    # Alignment of rows and codes that torch's kernel needs: it does not check, and crashes the process.
    alignment = 32

    @property
    def key(self) -> str:
        return f"int8{self.in_bytes * ':bytes'}"

    def refusal(self, sizes: Sizes) -> str | None:
        if sizes[1] % ROWS_MULTIPLE:
            return f"its {sizes[1]} inputs are not multiples of {ROWS_MULTIPLE}, as int8 needs"
        return None

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(tuple(sizes), torch.int8), ((sizes[0],), torch.bfloat16)]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        codes, scales = self.empty_parts(weight_OI)
        for some, rows in rows_of(weight_OI):
            codes[some], found = symmetric(rows, self.search)
            scales[some] = found[:, 0]
        return [codes, scales]

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = parts
        return codes.to(dtype).mul_(scales.to(dtype)[:, None])

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        return GpuMatrix("dense", sizes, *parts, strides=(sizes[0] * sizes[1], sizes[1], 1))

    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        codes, scales = parts
        if x_NI.shape[0] <= self.kernel_max_rows and codes.is_cpu:
            y_NO = cpp_product(x_NI, Matrix(8, 0, *parts, in_bytes=self.in_bytes))
            if y_NO is not None:
                return y_NO
        if x_NI.shape[0] <= INT8_TORCH_MAX_ROWS and codes.is_cpu and codes.data_ptr() % self.alignment == 0:
            x_NI = x_NI.contiguous()
            if x_NI.data_ptr() % self.alignment:
                x_NI = x_NI.clone()
            return torch.ops.aten._weight_int8pack_mm(x_NI, codes, scales)
        if not codes.is_cpu:
            return (x_NI @ codes.to(x_NI.dtype).T).mul_(scales)
        x = x_NI.to(dtype_of_blocks(x_NI))
        y_NO = x.new_empty(len(x), len(codes))
        for some, weight_OI in blocks_in(codes, x.dtype):
            torch.mm(x, weight_OI.T, out=y_NO[:, some])
        return y_NO.mul_(scales).to(x_NI.dtype)

    def multiply_transposed(self, x_NO: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        codes, scales = parts
        if not needs_float32(x_NO):
            return (x_NO * scales) @ codes.to(x_NO.dtype)
        x, y_NI = x_NO.float() * scales, x_NO.new_zeros(len(x_NO), sizes[1], dtype=torch.float32)
        for some, weight_OI in blocks_in(codes, torch.float32):
            y_NI.addmm_(x[:, some], weight_OI)
        return y_NI.to(x_NO.dtype)


MAKERS["int8"] = lambda *rows: Int8(in_bytes=bool(rows))
