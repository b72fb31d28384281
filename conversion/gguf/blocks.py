"""Dequantize the tensors of a GGUF file, by the package gguf.

A row of a tensor is a row of blocks, each of 32 or 256 numbers. The types Q4_0, Q4_1 and Q4_K have codes of 4 bits with
a scale and a smallest value for each 32 numbers, as int4 in groups of 32 has: int4 keeps their codes.

Shapes: O outputs, I inputs, G groups of 32 inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...configuration.errors import CheckpointError
from ...modeling.formats import Format, Int4
from ...modeling.formats.packed import pack_for, scales_for

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Dtypes of the types that are not quantized."""

_GROUP = 32
# Dequantize so many numbers at a time, since float32 needs a lot of memory.
_AT_ONCE = 1 << 22


def library(path: Any) -> Any:
    """Import the package gguf; `path` is the file that needs it."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{path}: GGUF files need the package gguf ({error}). Install it with: pip install 'llamoe[packed]'"
        ) from error
    return gguf


def size_of_block(kind: str) -> tuple[int, int]:
    """Return the numbers and the bytes in a block of a type."""
    gguf = library(kind)
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


class GgufLayout:
    """The layout of all matrices in GGUF files; a matrix is one tensor, whose "kind" is the name of its type."""

    def weight_of(self, tensors: Mapping[str, torch.Tensor], sizes: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight `[O, I]`."""
        [(kind, stored)] = tensors.items()
        if kind in PLAIN:
            return stored
        gguf, weight = library(kind), torch.empty(sizes, dtype=dtype)
        step = max(_AT_ONCE // sizes[1], 1)
        for rows, target in zip(stored.split(step), weight.split(step), strict=True):
            target.copy_(torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])))
        return weight

    def parts_of(
        self, matrices: Sequence[Mapping[str, torch.Tensor]], sizes: Any, form: Format
    ) -> list[torch.Tensor] | None:
        """Return int4's parts with the codes of matrices of the same sizes, joined by rows.

        Return None if `form` is not int4 in groups of 32, or a type has no codes that int4 can hold.
        """
        types = [(*tensors,)[0] for tensors in matrices]
        if not isinstance(form, Int4) or form.group_size != _GROUP or not _CODES.keys() >= {*types}:
            return None
        parts = []
        for kind, tensors in zip(types, matrices, strict=True):
            codes, *others = _CODES[kind](tensors[kind].numpy().reshape(-1, size_of_block(kind)[1]))
            arrays = [codes.reshape(sizes), *(other.reshape(sizes[0], -1) for other in others)]
            parts.append([torch.from_numpy(np.ascontiguousarray(array)) for array in arrays])
        codes, scale, offset = (torch.cat(part) for part in zip(*parts, strict=True))
        packed = pack_for(form, codes)
        return [packed, scales_for(form, packed, scale, offset)]


def _halves(blocks: np.ndarray) -> np.ndarray:
    return blocks.copy().view(np.float16).astype(np.float32)


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    """Split bytes `[..., n]` into 4-bit codes `[..., 2, n]`: first all low halves, then all high."""
    return np.stack((blocks & 15, blocks >> 4), -2)


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scale, np.zeros_like(scale)


def _q4_1(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    scale, low = np.hsplit(_halves(blocks[:, :4]), 2)
    return _nibbles(blocks[:, 4:]), scale, low + 8 * scale


def _q4_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    of_scales, of_lows = np.hsplit(_halves(blocks[:, :4]), 2)
    scales, lows = library("Q4_K").quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    scale = of_scales * scales.astype(np.float32)
    return _nibbles(blocks[:, 16:].reshape(-1, 32)), scale, 8 * scale - of_lows * lows.astype(np.float32)


# Functions from blocks to codes, and per group of 32 the scale and the weight of code 8.
_CODES: dict[str, Callable[[np.ndarray], tuple[np.ndarray, ...]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}
