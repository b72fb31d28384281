"""Dequantize matrices in the types of GGUF files, by the package gguf.

A row of a matrix is a row of blocks, each of 32 or 256 numbers. Blocks of Q4_0, Q4_1 and Q4_K have codes of 4 bits, and
for each 32 numbers a scale and a smallest value, as int4 in groups of 32 has. So int4 keeps their codes.

Shapes: O outputs, I inputs, G groups of 32 inputs, B blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gguf
import torch

from ...modeling.formats import Format, Int4
from ...modeling.formats.packed import pack_for, scales_for

SIZES = {kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
"""How many numbers and how many bytes a block of each type has."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""torch's dtypes of GGUF's types that are not quantized."""

_GROUP = 32
# How many numbers are dequantized at a time, since float32 needs a lot of memory.
_AT_ONCE = 1 << 22


class GgufLayout:
    """The layout of matrices in GGUF files: a matrix is one tensor, by the name of its type, such as "Q4_K"."""

    def weight_of(self, tensors: Mapping[str, torch.Tensor], sizes: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return a matrix dequantized, `[O, I]`; one of a plain type as it is."""
        [(kind, stored)] = tensors.items()
        if kind in PLAIN:
            return stored
        kind, weight = gguf.GGMLQuantizationType[kind], torch.empty(sizes, dtype=dtype)
        step = max(_AT_ONCE // sizes[1], 1)
        for rows, target in zip(stored.split(step), weight.split(step), strict=True):
            target.copy_(torch.from_numpy(gguf.dequantize(rows.numpy(), kind)))
        return weight

    def parts_of(
        self, matrices: Sequence[Mapping[str, torch.Tensor]], sizes: Any, form: Format
    ) -> list[torch.Tensor] | None:
        """Return the tensors in which int4 stores the matrices' own codes; the matrices are joined by rows.

        Return None if `form` is not int4 in groups of 32, or if int4 cannot hold the codes of a matrix's type.
        """
        tensors = [(kind, stored) for matrix in matrices for kind, stored in matrix.items()]
        is_int4 = isinstance(form, Int4) and form.group_size == _GROUP
        if not is_int4 or any(kind not in _CODES for kind, _ in tensors):
            return None
        rows = []
        for kind, stored in tensors:
            codes, *others = _CODES[kind](stored.view(-1, SIZES[kind][1]))
            rows.append([codes.reshape(sizes), *(other.reshape(sizes[0], -1) for other in others)])
        codes, scale, offset = (torch.cat(part) for part in zip(*rows, strict=True))
        return [pack_for(form, codes), scales_for(form, sizes[1], scale, offset)]


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """Read bytes `[B, 2 n]` as float16, `[B, n]` in float32."""
    return blocks.contiguous().view(torch.float16).float()


def _nibbles(blocks: torch.Tensor) -> torch.Tensor:
    """Split bytes `[..., n]` into 4-bit codes `[..., 2, n]`: first all low halves, then all high."""
    return torch.stack((blocks & 15, blocks >> 4), -2)


def _q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scale, torch.zeros_like(scale)


def _q4_1(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale, low = _halves(blocks[:, :4]).split(1, 1)
    return _nibbles(blocks[:, 4:]), scale, low + 8 * scale


def _q4_k(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    of_scales, of_lows = _halves(blocks[:, :4]).split(1, 1)
    both = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16].contiguous().numpy())
    scales, lows = (torch.from_numpy(part).float() for part in both)
    scale = of_scales * scales
    return _nibbles(blocks[:, 16:].reshape(-1, 32)), scale, 8 * scale - of_lows * lows


# Functions from blocks `[B, bytes]` to codes, and per group of 32 numbers the scale and the value of code 8.
_CODES: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}
