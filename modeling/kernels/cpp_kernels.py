"""Products of few rows with matrices on a CPU: kernels in C++, compiled when they are first needed.

A step of decoding reads every weight once. With one row, torch's products reach half to three quarters of the memory's
speed, in float32 and bfloat16 as in 4 and 8 bits, and those of 4 and 8 bits are several times slower than bfloat16 with
many rows. The kernels in cpp/ read memory at its full speed. A step is then so short that calls between products count:
the feed-forward and the norms have kernels, too.

They are compiled by the C++ backend of `torch.compile`, which keeps the result on disk: four seconds once. They need
AVX-512 for bfloat16; for 4 bits there is one for AVX2, too, for any number of rows. Without a compiler, on other
processors, or with `LLAMOE_CPP_KERNELS=0` in the environment, torch's kernels are used.

Shapes: N rows, I inputs, O outputs, H hidden size, F intermediate size.
"""

import ctypes
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._private_api import compile_cpp
from .waiting import log_if_slow

logger = logging.getLogger("llamoe")

_SOURCES = Path(__file__).parent / "cpp"
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
# fmt: off
_ARGUMENTS = {
    "products": [_POINTER] * 2 + [_SIZE] * 4 + [_INT, _SIZE] + [_POINTER, _POINTER, _SIZE] * 3,
    "feed_forward": [_POINTER] * 2 + [_SIZE] * 2 + [_INT] + [_SIZE] * 5 + [_INT] + [_POINTER] * 6,
    "project": [_SIZE] + [_POINTER] * 2 + [_FLOAT, _POINTER] + [_SIZE] * 3 + [_INT]
    + [_POINTER, _POINTER, _SIZE] * 3 + [_SIZE] + [_POINTER] * 2 + [_SIZE, _INT, _FLOAT, _FLOAT],
    "attend_and_project": [_SIZE] + [_POINTER] + ([_POINTER] + [_SIZE] * 2) * 2 + [_SIZE] * 4 + [_FLOAT]
    + [_SIZE] * 2 + [_INT] + [_POINTER] * 2 + [_SIZE] + [_POINTER] * 2,
    "normalized_feed_forward": [_SIZE] + [_POINTER] * 2 + [_FLOAT, _POINTER] + [_SIZE] * 6 + [_INT] + [_POINTER] * 6,
    "rms_norm": [_SIZE] + [_POINTER] * 3 + [_SIZE] * 2 + [_FLOAT],
}
# fmt: on
# Outputs of a 4-bit matrix are computed as many at a time.
BLOCK = 64
BITS = {torch.bfloat16: 16, torch.float32: 32}

# The compiled kernels: False before the first use, None where there are none. And that of 4 bits for AVX2.
_library: Any = False
_int4_library: Any = False
# Why there are none, and what would help.
_why_none = ("", "")
# Why they could not be made, until that is told.
_reasons: list[str] = []


class Matrix(NamedTuple):
    """A matrix.

    Attributes:
        bits: 4, 8, 16 or 32.
        group_size: for 4 bits: inputs that share a scale, a multiple of 32; 0 for others.
        codes: 4 bits: `[O, I / 2]` uint8, in the layout that torch's kernel reads with AVX-512. 8 bits: `[O, I]` int8.
            16 and 32 bits: the matrix in bfloat16 or float32, contiguous; `[O, I]`, or `[I, O]` if `is_input_first`.
        scales: bfloat16. 4 bits: `[I / group_size, O, 2]`, scale, and the value of code 8. 8 bits: `[O]`. None for
            others.
        is_input_first: only for 16 and 32 bits.
    """

    bits: int
    group_size: int
    codes: torch.Tensor
    scales: torch.Tensor | None
    is_input_first: bool = False

    @property
    def inputs(self) -> int:
        """I."""
        if self.bits > 8:
            return self.codes.shape[not self.is_input_first]
        return self.codes.shape[1] * 8 // self.bits

    @property
    def outputs(self) -> int:
        """O."""
        return self.codes.shape[self.is_input_first]


def plain_matrix(weight: torch.Tensor, is_input_first: bool = False) -> Matrix | None:
    """The matrix of a contiguous weight on the CPU in bfloat16 or float32; None for another.

    Numbers of a mapped file may begin at any byte. The kernels want them at multiples of their size.
    """
    bits = BITS.get(weight.dtype)
    if bits is None or not weight.is_cpu or not weight.is_contiguous() or weight.data_ptr() % weight.itemsize:
        return None
    return Matrix(bits, 0, weight, None, is_input_first)


def library() -> Any:
    """The compiled kernels; None where there are none. The first call compiles them."""
    global _library
    if _library is False:
        _library = _compile()
    return _library


def int4_library() -> Any:
    """The compiled `products` of 4 bits, for AVX-512 or AVX2, or None. The first call compiles them."""
    global _int4_library
    if _int4_library is False:
        _int4_library = library() or _compile_for_avx2()
    return _int4_library


def why_no_cpp_kernels() -> tuple[str, str] | None:
    """Why there are no compiled kernels, and what would help, or ""; None where there are.

    The first call compiles them.
    """
    return None if library() is not None else _why_none


def _compile() -> Any:
    global _why_none
    if os.environ.get("LLAMOE_CPP_KERNELS", "1") == "0":
        _why_none = ("LLAMOE_CPP_KERNELS=0 turns them off", "unset LLAMOE_CPP_KERNELS")
        return None
    capability = torch.backends.cpu.get_cpu_capability()
    _why_none = (f"they need AVX-512 for bfloat16, and torch computes with {capability} here", "")
    if capability != "AVX512" or not torch.cpu.get_capabilities().get("avx512_bf16"):
        return None
    return _compiled("kernels.cpp", _ARGUMENTS, _agrees)


def _compile_for_avx2() -> Any:
    is_off = os.environ.get("LLAMOE_CPP_KERNELS", "1") == "0"
    if is_off or torch.backends.cpu.get_cpu_capability() != "AVX2":
        return None
    return _compiled("int4_avx2.cpp", {"products": _ARGUMENTS["products"]}, _agrees_on_int4)


def _compiled(source: str, arguments: dict[str, list[Any]], agrees: Callable[[Any], bool]) -> Any:
    global _why_none
    try:
        with log_if_slow("llamoe: compiling kernels for this processor, once"):
            found = compile_cpp(_source(source))
        if not found.is_supported():
            return None
        for name, types in arguments.items():
            getattr(found, name).argtypes = types
            getattr(found, name).restype = None
        with torch.device("cpu"), torch.no_grad():
            if not agrees(found):
                raise RuntimeError("their results are wrong on this machine")
    except Exception as error:
        # Compilers fail in many ways, and torch's kernels do the same.
        remedy = "install a C++ compiler, such as g++, or name one in CXX"
        _why_none = (" ".join(str(error).split()), remedy)
        _reasons.append(str(error))
        return None
    return found


def _source(name: str) -> str:
    """A file with those that it includes, since the compiler is given a text."""
    text = (_SOURCES / name).read_text(encoding="utf-8")
    return re.sub(r'^#include "(.+)"$', lambda match: _source(match[1]), text, flags=re.MULTILINE)


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    # Two roundings to bfloat16, of sums in another order.
    return bool((found.float() - expected.float()).abs().max() <= 0.01 * expected.abs().max())


def _agrees_on_int4(found: Any) -> bool:
    """Whether products of 4 bits agree with plain operations, for numbers of rows that run each of their forms."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in, group_size = 128, 192, 64
    codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8, generator=generator)
    low, high = codes.view(-1, 2, BLOCK // 2, num_in).unbind(1)
    packed = (low | high << 4).mT.reshape(num_out, num_in // 2)
    scales = torch.randn(num_in // group_size, num_out, 2, generator=generator).bfloat16()
    scale, offset = scales.float().repeat_interleave(group_size, 0).unbind(2)
    weight_IO = (codes.T.float() - 8) * scale + offset
    rows = [torch.randn(num_rows, num_in, generator=generator).bfloat16() for num_rows in (1, 7)]
    matrix = Matrix(4, group_size, packed, scales)
    return all(_is_close(multiply(x, prepare([matrix], found)), x.float() @ weight_IO) for x in rows)


def _agrees(found: Any) -> bool:
    """Whether the kernels agree with plain operations, for numbers of rows that run each of their forms."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in = 127, 192
    codes = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8, generator=generator)
    scales = torch.rand(num_out, generator=generator).bfloat16()
    for num_rows in (1, 7):
        x = torch.randn(num_rows, num_in, generator=generator).bfloat16()
        expected = (x.float() @ codes.float().T) * scales.float()
        if not _is_close(multiply(x, prepare([Matrix(8, 0, codes, scales)], found)), expected):
            return False
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = x.to(dtype), codes.to(dtype)
            # Also where rows begin within a cache line.
            for rows in (weight, weight.flatten()[2 : 2 - num_in].view(-1, num_in)):
                if not _is_close(
                    multiply(x, prepare([Matrix(BITS[dtype], 0, rows, None)], found)), x @ rows.T
                ):
                    return False
    return _agrees_on_int4(found)


class Products(NamedTuple):
    """Up to three matrices of one format by their addresses, which are right as long as the tensors are there."""

    library: Any
    bits: int
    inputs: int
    group_size: int
    sizes: list[int]
    """Outputs of each matrix."""
    placed: list[Any]
    """Of three matrices, or nothing: addresses of codes and scales, and outputs."""


def prepare(matrices: Sequence[Matrix | None], found: Any = None) -> Products | None:
    """What multiplies by up to three matrices at once; None where they are unlike, or there is no kernel.

    That none was compiled is told for quantized weights, once.

    Args:
        matrices: of the same inputs; output-first.
        found: the kernels; default: those of this processor.
    """
    first, placed, sizes = matrices[0], [], []
    for each in matrices:
        if each is None or first is None or each[:2] != first[:2] or each.inputs != first.inputs:
            return None
        sizes.append(each.outputs)
        placed += (*pointers(each), each.outputs)
    assert first is not None
    bits, group_size, *_ = first
    # Outputs of 4 bits are computed in whole blocks.
    if bits == 4 and any(size % BLOCK for size in sizes):
        return None
    found = found or library() or (int4_library() if bits == 4 else None)
    if _reasons and bits <= 8:
        logger.warning(
            "Kernels of quantized weights on a CPU were not compiled; torch's slower ones are used: %s",
            _reasons.pop(),
        )
    placed += (None, None, 0) * (3 - len(matrices))
    return None if found is None else Products(found, bits, first.inputs, group_size, sizes, placed)


def multiply(x: torch.Tensor, products: Products) -> torch.Tensor:
    """Rows times the transposes of matrices, `[N, O]`, their outputs side by side."""
    found, bits, num_in, group_size, sizes, placed = products
    num_rows, threads = x.numel() // num_in, torch.get_num_threads()
    y = x.new_empty(num_rows, sum(sizes))
    x = x.contiguous()
    found.products(
        x.data_ptr(), y.data_ptr(), num_rows, bits, num_in, group_size, threads, len(sizes), *placed
    )
    return y


def cpp_products(x_NI: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor | None:
    """Rows times the transposes of up to three matrices of one format; None where there is no kernel.

    Args:
        x_NI: on the CPU; float32 for matrices of 32 bits, otherwise bfloat16.
        matrices: of I inputs; output-first.

    Returns:
        `[N, O]` in the dtype of the rows, the outputs of the matrices side by side.
    """
    products = prepare(matrices)
    return None if products is None or products.inputs != x_NI.shape[1] else multiply(x_NI, products)


def pointers(*matrices: Matrix | None) -> list[int | None]:
    """The addresses of codes and scales."""
    found: list[int | None] = []
    for matrix in matrices:
        if matrix is None:
            found += (None, None)
        else:
            _, _, codes, scales, _ = matrix
            found += (codes.data_ptr(), None if scales is None else scales.data_ptr())
    return found
