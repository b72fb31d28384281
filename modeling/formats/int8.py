"""int8: 8-bit codes, with a scale for each output.

Shapes: O outputs, I inputs, N rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..kernels import GpuMatrix, Matrix, blocks_in
from .few_bits import FewBits, rows_of
from .format import MAKERS, Parts, Sizes
from .scales import symmetric


@dataclass(frozen=True)
class Int8(FewBits):
    """The format with 8-bit codes and a scale for each output.

    Its parts are codes, `[O, I]` int8, and scales, `[O]` bfloat16.
    """

    @property
    def key(self) -> str:
        return f"int8{self.in_bytes * ':bytes'}"

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(tuple(sizes), torch.int8), ((sizes[0],), torch.bfloat16)]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        quantized = [symmetric(rows, self.search) for rows in rows_of(weight_OI)]
        codes, scales = (torch.cat(parts) for parts in zip(*quantized, strict=True))
        return [codes, scales[:, 0]]

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = parts
        return codes.to(dtype).mul_(scales.to(dtype)[:, None])

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        return GpuMatrix("dense", sizes, *parts, strides=(sizes[0] * sizes[1], sizes[1], 1))

    def for_cpu_kernel(self, parts: Parts) -> Matrix:
        return Matrix(8, 0, *parts, in_bytes=self.in_bytes)

    def blocks(
        self, parts: Parts, dtype: torch.dtype, is_whole: bool = False
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        codes = parts[0]
        if is_whole or not codes.is_cpu:
            yield slice(None), codes.to(dtype).T
            return
        for some, codes_OI in blocks_in(codes, dtype):
            yield some, codes_OI.T

    def scaled(self, x_NO: torch.Tensor, parts: Parts) -> torch.Tensor:
        return x_NO * parts[1].to(x_NO.dtype)


MAKERS["int8"] = lambda *rows: Int8(in_bytes=bool(rows))
