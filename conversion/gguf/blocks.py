"""Dequantize the tensors of a GGUF file as lazy tensors, by the package gguf.

A row of a tensor is a row of blocks, each of 32 or 256 numbers. Rows are permuted, and experts chosen, as bytes. The
types Q4_0, Q4_1 and Q4_K have codes of 4 bits with a scale and a smallest value for each 32 numbers, as int4 has: their
codes are taken over as they are.

Shapes: O outputs, I inputs, G groups of 32 inputs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...configuration.errors import CheckpointError
from ...modeling.formats import Format, Int4
from ...modeling.formats.packed import int4_of
from ..io import LazyTensor

_GROUP = 32
# Numbers that are dequantized at a time.
_AT_ONCE = 1 << 22


def library(path: Any) -> Any:
    """Import the package gguf; `path` is a file that needs it."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{path}: GGUF files need the package gguf ({error}). Install it with: pip install 'llamoe[packed]'"
        ) from error
    return gguf


class Blocks(LazyTensor):
    """The dequantized values of a block-quantized tensor of two or more axes.

    Attributes:
        stored: its bytes, `[..., bytes of a row]` uint8.
        kind: type of the blocks.
    """

    def __init__(self, stored: LazyTensor, kind: Any, dtype: torch.dtype):
        numbers, nbytes = library(stored.origin).GGML_QUANT_SIZES[kind]
        super().__init__((*stored.shape[:-1], stored.shape[-1] // nbytes * numbers), dtype, stored.origin)
        self.stored, self.kind = stored, kind

    def with_rows(self, change: Callable[[LazyTensor], LazyTensor]) -> "Blocks":
        """View the result of a function of the bytes that keeps rows whole."""
        return Blocks(change(self.stored), self.kind, self.dtype)

    def row(self, index: int) -> "Blocks":
        """View one index of the first axis, as a tensor without that axis."""
        return self.with_rows(lambda stored: stored.row(index))

    def codes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return 4-bit codes `[O, I]`, and per group the scale and the weight of code 8, `[O, G]`.

        Return None if the type has no codes that int4 can store.
        """
        if (read := _CODES.get(self.kind.name)) is None:
            return None
        blocks = self.stored.read().numpy().reshape(-1, library(self.origin).GGML_QUANT_SIZES[self.kind][1])
        codes, *others = (torch.from_numpy(np.ascontiguousarray(each)) for each in read(blocks))
        scale, offset = (each.view(self.shape[0], -1) for each in others)
        return codes.view(self.shape), scale, offset

    def _read(self, start, stop):
        rows = self.stored.read(start, stop).flatten(0, -2)
        result = torch.empty(len(rows), self.shape[-1], dtype=self.dtype)
        step = max(_AT_ONCE // self.shape[-1], 1)
        dequantize = library(self.origin).dequantize
        for some, into in zip(rows.split(step), result.split(step), strict=True):
            into.copy_(torch.from_numpy(dequantize(some.numpy(), self.kind)))
        return result.view(self._piece_shape(start, stop))


class Matrix(LazyTensor):
    """Matrices of a linear layer or expert, joined by rows; int4 may reuse their codes."""

    def __init__(self, matrices: list[LazyTensor], is_input_first: bool = False):
        first = matrices[0]
        shape = (sum(each.shape[0] for each in matrices), first.shape[1])
        super().__init__(shape[::-1] if is_input_first else shape, first.dtype, first.origin)
        self._matrices, self._is_input_first = matrices, is_input_first

    def packed_as(self, form: Format) -> list[torch.Tensor] | None:
        """Return the parts of a format with the same codes; None for other formats."""
        if not isinstance(form, Int4) or form.group_size != _GROUP:
            return None
        parts = [each.codes() if isinstance(each, Blocks) else None for each in self._matrices]
        if None in parts:
            return None
        return int4_of(*(torch.cat(each) for each in zip(*parts, strict=True)), form)

    def _read(self, start, stop):
        matrix = torch.cat([each.read() for each in self._matrices])
        return (matrix.T if self._is_input_first else matrix)[start:stop]


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


_CODES: dict[str, Callable[[np.ndarray], tuple[np.ndarray, ...]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}
