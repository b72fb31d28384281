"""int4: 4-bit codes, with a scale and an offset for each output and group of inputs.

Shapes: O outputs, I inputs, P inputs with padding, N rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..kernels import (
    BLOCK_WEIGHTS,
    INT4_TORCH_MAX_ROWS,
    GpuMatrix,
    Matrix,
    cpp_product,
    cpp_unpack,
    dtype_of_blocks,
)
from .format import MAKERS, Parts, Sizes
from .int4_layout import (
    ROWS_MULTIPLE,
    is_torchs_layout,
    pack,
    pieces,
    unpack,
)
from .scales import FewBits, asymmetric, rows_of

# Maximum padding, as a share of the matrix.
_MOST_PADDING = 1 / 8


@dataclass(frozen=True)
class Int4(FewBits):
    """4-bit codes, with a scale and an offset for each output and group of inputs; CPU kernels multiply them.

    Parts: the codes in the kernel's layout, and `[P / group_size, O, 2]` bfloat16, scale and offset. A last group that
    is not full is padded.

    Attributes:
        group_size: inputs that share a scale.
    """

    group_size: int

    @property
    def key(self) -> str:
        return f"int4:{self.group_size}{self.in_bytes * ':bytes'}"

    def refusal(self, sizes: Sizes) -> str | None:
        num_out, num_in = sizes
        if num_out % ROWS_MULTIPLE:
            return f"it has {num_out} outputs, which is not a multiple of {ROWS_MULTIPLE}, as int4 needs"
        if (padding := self._padded(num_in) - num_in) > num_in * _MOST_PADDING:
            return (
                f"its {num_in} inputs are not multiples of group_size={self.group_size}, and padding would add "
                f"{padding / num_in:.0%}"
            )
        return None

    def _padded(self, num_in: int) -> int:
        return -(-num_in // self.group_size) * self.group_size

    def parts(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        num_out, padded = sizes[0], self._padded(sizes[1])
        scales = (padded // self.group_size, num_out, 2)
        return [((num_out, padded // 2), torch.uint8), (scales, torch.bfloat16)]

    def quantize(self, weight_OI: torch.Tensor) -> list[torch.Tensor]:
        codes, scales = self.empty_parts(weight_OI)
        padding = self._padded(weight_OI.shape[1]) - weight_OI.shape[1]
        for some, rows in rows_of(weight_OI):
            if padding:
                # Pad with the last weight, so that the group's range does not change.
                rows = F.pad(rows[None], (0, padding), mode="replicate")[0]
            found = asymmetric(rows.view(-1, self.group_size), self.search)
            codes[some] = pack(found[0].view(rows.shape))
            scales[:, some] = torch.cat(found[1:], 1).view(len(rows), -1, 2).transpose(0, 1)
        return [codes, scales]

    def matrix(self, parts: Parts, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        packed, scales = parts
        dtype = dtype if dtype == torch.bfloat16 else torch.float32
        out_PO = torch.empty(packed.shape[1] * 2, len(packed), dtype=dtype, device=packed.device)
        for some in pieces(packed):
            unpack(packed[some], scales[:, some], out_PO[:, some])
        return out_PO[: sizes[1]].T

    def for_gpu_kernel(self, parts: Parts, sizes: Sizes) -> GpuMatrix | None:
        codes, scales = parts
        # Kernels read a scale and its offset as one 32-bit word.
        return GpuMatrix("int4", sizes, codes, scales.view(torch.int32), group=self.group_size)

    def multiply(self, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        packed, scales = parts
        if padding := packed.shape[1] * 2 - x_NI.shape[1]:
            x_NI = F.pad(x_NI, (0, padding))
        if packed.is_cpu and x_NI.shape[0] <= self.kernel_max_rows:
            y_NO = cpp_product(x_NI, Matrix(4, self.group_size, *parts, in_bytes=self.in_bytes))
            if y_NO is not None:
                return y_NO
        if packed.is_cpu and x_NI.shape[0] <= INT4_TORCH_MAX_ROWS and is_torchs_layout():
            kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
            return kernel(x_NI.contiguous(), packed, self.group_size, scales)
        x = x_NI.to(dtype_of_blocks(x_NI))
        y_NO = x.new_empty(len(x), len(packed))
        for some, weight_PO in self._blocks(parts, x.dtype):
            torch.mm(x, weight_PO, out=y_NO[:, some])
        return y_NO.to(x_NI.dtype)

    def _blocks(
        self, parts: Parts, dtype: torch.dtype, is_whole: bool = False
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of outputs with their unpacked columns `[P, …]`; each block overwrites the one before.

        The blocks share one buffer: allocating memory for the whole matrix takes longer than unpacking it. Without the
        compiled kernel torch unpacks, which takes 16 times as long.
        """
        packed, scales = parts
        num_in = packed.shape[1] * 2
        memory = torch.empty(0, dtype=dtype)
        for some in pieces(packed, packed.numel() * 2 if is_whole else BLOCK_WEIGHTS):
            size = num_in * (some.stop - some.start)
            if memory.numel() < size:
                memory = torch.empty(size, dtype=dtype, device=packed.device)
            weight_PO = memory[:size].view(num_in, -1)
            if not cpp_unpack(Matrix(4, self.group_size, packed[some], scales[:, some]), weight_PO):
                unpack(packed[some], scales[:, some], weight_PO)
            yield some, weight_PO

    def multiply_transposed(self, x_NO: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
        x = x_NO.to(dtype_of_blocks(x_NO))
        y_NP = x.new_zeros(len(x), parts[0].shape[1] * 2)
        # Sum in float32: 16-bit sums would be rounded after each block.
        for some, weight_PO in self._blocks(parts, x.dtype, is_whole=x.dtype != torch.float32):
            y_NP.addmm_(x[:, some], weight_PO.T)
        return y_NP[:, : sizes[1]].to(x_NO.dtype)


MAKERS["int4"] = lambda size, *rows: Int4(int(size), in_bytes=bool(rows))
