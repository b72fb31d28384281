"""int4: 4-bit codes, with a scale and an offset for each output and group of inputs.

Shapes: O outputs, I inputs, P inputs with padding, N rows.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..kernels import BLOCK_WEIGHTS, GpuMatrix, Matrix, cpp_unpack
from .few_bits import FewBits, rows_of
from .format import MAKERS, Parts, Sizes
from .int4_layout import OUTPUTS_MULTIPLE, pack, slices_of, unpack
from .scales import asymmetric


@dataclass(frozen=True)
class Int4(FewBits):
    """The format with 4-bit codes, and a scale and an offset for each output and group of inputs.

    Its parts are codes in the order of `int4_layout`, `[O, P / 2]` uint8, and scales and offsets,
    `[P / group_size, O, 2]` bfloat16. Codes pad the last group if it is not full.

    Attributes:
        group_size: number of consecutive inputs that share a scale: 32, 64, 128 or 256.
    """

    group_size: int

    @property
    def key(self) -> str:
        return f"int4:{self.group_size}{self.in_bytes * ':bytes'}"

    def refusal(self, sizes: Sizes) -> str | None:
        if sizes[0] % OUTPUTS_MULTIPLE:
            return f"it has {sizes[0]} outputs, which is not a multiple of {OUTPUTS_MULTIPLE}, as int4 needs"
        return None

    def padded(self, num_in: int) -> int:
        return -(-num_in // self.group_size) * self.group_size

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        num_out, padded = sizes[0], self.padded(sizes[1])
        scales = (padded // self.group_size, num_out, 2)
        return [((num_out, padded // 2), torch.uint8), (scales, torch.bfloat16)]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        codes, scales = [], []
        padding = self.padded(weight_OI.shape[1]) - weight_OI.shape[1]
        for rows in rows_of(weight_OI):
            if padding:
                # Copies of the last weight do not change the range of the last group.
                rows = F.pad(rows[None], (0, padding), mode="replicate")[0]
            codes_of_rows, *scale_and_offset = asymmetric(rows.view(-1, self.group_size), self.search)
            codes.append(pack(codes_of_rows.view(rows.shape)))
            scales.append(torch.cat(scale_and_offset, 1).view(len(rows), -1, 2))
        return [torch.cat(codes), torch.cat(scales).transpose(0, 1).contiguous()]

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        packed, scales = parts
        dtype = dtype if dtype == torch.bfloat16 else torch.float32
        out_PO = torch.empty(packed.shape[1] * 2, len(packed), dtype=dtype, device=packed.device)
        for some in slices_of(packed, len(out_PO), BLOCK_WEIGHTS):
            unpack(packed[some], scales[:, some], out_PO[:, some])
        return out_PO[: sizes[1]].T

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        codes, scales = parts
        # The kernels read a scale and its offset as one 32-bit word.
        return GpuMatrix("int4", sizes, codes, scales.view(torch.int32), group=self.group_size)

    def for_cpu_kernel(self, parts: Parts) -> Matrix:
        return Matrix(4, self.group_size, *parts, in_bytes=self.in_bytes)

    def blocks(
        self, parts: Parts, dtype: torch.dtype, is_whole: bool = False
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        num_in, memory = parts[0].shape[1] * 2, torch.empty(0, dtype=dtype)
        for some in slices_of(parts[0], num_in, sys.maxsize if is_whole else BLOCK_WEIGHTS):
            packed, scales = parts[0][some], parts[1][:, some]
            size = packed.numel() * 2
            # All blocks share one tensor: allocating the whole matrix takes longer than unpacking it.
            if memory.numel() < size:
                memory = torch.empty(size, dtype=dtype, device=packed.device)
            weight_PO = memory[:size].view(num_in, -1)
            # Without the compiled kernel, torch takes 16 times as long.
            if not cpp_unpack(Matrix(4, self.group_size, packed, scales), weight_PO):
                unpack(packed, scales, weight_PO)
            yield some, weight_PO


MAKERS["int4"] = lambda size, *rows: Int4(int(size), in_bytes=bool(rows))
