"""Products of bfloat16 rows with 4- and 8-bit matrices on a CPU: kernels in C++, compiled when they are first needed.

torch's own kernels for these formats reach half of the memory's speed with one row, and with many rows are several
times slower than a product in bfloat16. Those in few_bits.cpp read memory at its full speed. A step of decoding is then
so short that calls between products count: the feed-forward and the norms have kernels, too.

The file is compiled by the C++ backend of `torch.compile`, which keeps the result on disk: two seconds once. Without a
compiler, on a processor without AVX-512 for bfloat16, or with `LLAMOE_CPP_KERNELS=0` in the environment, the formats
use torch's kernels.

Shapes: N rows, I inputs, O outputs, H hidden size, F intermediate size.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._private_api import compile_cpp

logger = logging.getLogger("llamoe")

_SOURCE = Path(__file__).with_suffix(".cpp")
_POINTER, _SIZE, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS = {
    "products": [_POINTER] * 2 + [_SIZE] * 4 + [_THREADS, _SIZE] + [_POINTER, _POINTER, _SIZE] * 3,
    "feed_forward": [_POINTER] * 2 + [_SIZE] * 7 + [_THREADS] + [_POINTER] * 4 + [_SIZE] + [_POINTER] * 2,
    "rms_norm": [_POINTER] * 3 + [_SIZE] * 2 + [ctypes.c_float],
}
# Outputs of a 4-bit matrix are computed as many at a time; sizes of vectors are multiples of the other number.
_BLOCK, _VECTOR = 64, 16
# Above this many rows torch's own norm, which several threads share, is faster.
_NORM_MAX_ROWS = 128

# The compiled kernels; None before the first use, and where there are none.
_library: Any = None
# Beside it, since compilers of graphs cannot ask a library for its truth.
_was_tried = _is_loaded = False


class Matrix(NamedTuple):
    """A matrix of few bits.

    Attributes:
        bits: 4 or 8.
        group_size: for 4 bits: inputs that share a scale, a multiple of 32; 0 for 8 bits.
        codes: 4 bits: `[O, I / 2]` uint8, in the layout that torch's kernel reads with AVX-512. 8 bits: `[O, I]` int8.
        scales: bfloat16. 4 bits: `[I / group_size, O, 2]`, scale, and the value of code 8. 8 bits: `[O]`.
    """

    bits: int
    group_size: int
    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def inputs(self) -> int:
        """I."""
        return self.codes.shape[1] * 8 // self.bits


def library() -> Any:
    """The compiled kernels; None where there are none. The first call compiles them."""
    global _library, _was_tried, _is_loaded
    if not _was_tried:
        _library = _compile()
        _was_tried, _is_loaded = True, _library is not None
    return _library


def is_loaded() -> bool:
    """Whether the kernels are compiled and in use, because a model has needed them."""
    return _is_loaded


def _compile() -> Any:
    if (
        os.environ.get("LLAMOE_CPP_KERNELS", "1") == "0"
        or torch.backends.cpu.get_cpu_capability() != "AVX512"
    ):
        return None
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        return None
    try:
        found = compile_cpp(_SOURCE.read_text(encoding="utf-8"))
        if not found.is_supported():
            return None
        for name, types in _ARGUMENTS.items():
            getattr(found, name).argtypes = types
            getattr(found, name).restype = None
        if not _is_right(found):
            raise RuntimeError("their results are wrong on this machine")
    except Exception as error:
        # Compilers fail in many ways, and torch's kernels do the same.
        logger.warning(
            "Kernels for weights of few bits were not compiled; torch's slower ones are used: %s", error
        )
        return None
    return found


def _is_right(found: Any) -> bool:
    """Whether the kernels agree with plain operations, for numbers of rows that run each of their forms."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in, group_size = 128, 192, 64
    codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.int32, generator=generator)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
    scales = torch.randn(num_in // group_size, num_out, 2, generator=generator).bfloat16()
    codes8 = torch.randint(-127, 128, (num_out - 1, num_in), dtype=torch.int8, generator=generator)
    scales8 = torch.rand(num_out - 1, generator=generator).bfloat16()
    for num_rows in (1, 7):
        x = torch.randn(num_rows, num_in, generator=generator).bfloat16()
        expected = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group_size, scales)
        expected8 = (x.float() @ codes8.float().T) * scales8.float()
        y = _products(found, x, [Matrix(4, group_size, packed, scales)])
        y8 = _products(found, x, [Matrix(8, 0, codes8, scales8)])
        for ours, theirs in ((y, expected), (y8, expected8)):
            # Two roundings to bfloat16, of sums in another order.
            if not (ours.float() - theirs.float()).abs().max() <= 0.01 * theirs.abs().max():
                return False
    return True


def few_bits_products(x_NI: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor | None:
    """Rows times the transposes of up to three matrices of one format; None where there is no kernel.

    Args:
        x_NI: bfloat16 on the CPU.
        matrices: of I inputs.

    Returns:
        `[N, O]` bfloat16, the outputs of the matrices side by side.
    """
    found = library()
    if found is None or (
        matrices[0].bits == 4 and any(matrix.codes.shape[0] % _BLOCK for matrix in matrices)
    ):
        return None
    return _products(found, x_NI.contiguous(), matrices)


def _products(found: Any, x: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor:
    bits, group_size, *_ = matrices[0]
    pointers: list[Any] = []
    num_out = 0
    for _, _, codes, scales in matrices:
        own = codes.shape[0]
        pointers += (codes.data_ptr(), scales.data_ptr(), own)
        num_out += own
    pointers += (None, None, 0) * (3 - len(matrices))
    num_rows, num_in = x.shape
    y = x.new_empty(num_rows, num_out)
    threads = torch.get_num_threads()
    found.products(
        x.data_ptr(), y.data_ptr(), num_rows, bits, num_in, group_size, threads, len(matrices), *pointers
    )
    return y


def few_bits_feed_forward(
    x_NH: torch.Tensor, gate: Matrix, up: Matrix | None, down: Matrix
) -> torch.Tensor | None:
    """`down(silu(gate(x)) * up(x))`; None where there is no kernel.

    Args:
        x_NH: bfloat16 on the CPU.
        gate: `[F, H]`, or `[2 F, H]` with the rows of up after those of gate.
        up: `[F, H]`, or None.
        down: `[H, F]`; its inputs may be padded.

    Returns:
        `[N, H]` bfloat16.
    """
    found = library()
    size = gate.codes.shape[0] if up is not None else gate.codes.shape[0] // 2
    (num_rows, num_in), num_out = x_NH.shape, down.codes.shape[0]
    bits = gate.bits
    if (
        found is None
        or size % _VECTOR
        or gate.inputs != num_in
        or (bits == 4 and (size % _BLOCK or num_out % _BLOCK))
    ):
        return None
    x_NH = x_NH.contiguous()
    y_NH = x_NH.new_empty(num_rows, num_out)
    first, first_scales = gate.codes.data_ptr(), gate.scales.data_ptr()
    if up is None:
        # Bytes of the codes of F outputs, and of their scales: two numbers of two bytes, or one.
        second, second_scales = first + size * num_in * bits // 8, first_scales + size * (16 // bits)
    else:
        second, second_scales = up.codes.data_ptr(), up.scales.data_ptr()
    found.feed_forward(
        x_NH.data_ptr(),
        y_NH.data_ptr(),
        num_rows,
        bits,
        num_in,
        size,
        down.inputs,
        num_out,
        gate.group_size,
        torch.get_num_threads(),
        first,
        first_scales,
        second,
        second_scales,
        gate.codes.shape[0],
        down.codes.data_ptr(),
        down.scales.data_ptr(),
    )
    return y_NH


def few_bits_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor | None:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last axis; None where there is no kernel, or torch's is faster.

    Args:
        x: `[..., D]` on the CPU.
        weight: `[D]` or None.
        eps: added to the mean square.
    """
    size = x.shape[-1]
    if x.dtype != torch.bfloat16 or not 0 < x.numel() <= _NORM_MAX_ROWS * size or size % _VECTOR:
        return None
    if weight is not None and not (
        weight.dtype == torch.bfloat16 and weight.is_cpu and weight.is_contiguous()
    ):
        return None
    x = x.contiguous()
    y = torch.empty_like(x)
    scale = None if weight is None else weight.data_ptr()
    library().rms_norm(x.data_ptr(), scale, y.data_ptr(), x.numel() // size, size, eps)
    return y
