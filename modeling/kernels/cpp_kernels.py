"""C++ kernels for decoding on a CPU: products of few rows with a matrix, RMSNorm, and attention of one query.

A decode step reads every weight once. The kernels in cpp/ read weights as fast as the memory can deliver them; torch's
products of one row reach half to three quarters of this speed. For many rows torch's 4-bit and 8-bit products are
several times slower than those in bfloat16. Its attention of one bfloat16 query takes several times as long as reading
the KV cache. Its norm consists of ten operations, whose code has left the processor's cache after each large product.

The C++ backend of `torch.compile` compiles the kernels at first use, in five seconds, and keeps the result on disk. One
source is for all processors with AVX2, AVX-512 or NEON; only products of bytes are written for each (`cpp/bytes_*.h`).
Without a compiler, on other processors, or with `LLAMOE_CPP_KERNELS=0` in the environment, torch's kernels are used.

Shapes: N rows, I inputs, O outputs.
"""

import ctypes
import errno
import logging
import os
import platform
import re
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._private_api import compile_cpp
from .waiting import log_if_slow

logger = logging.getLogger("llamoe")

_SOURCES = Path(__file__).parent / "cpp"
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_MATRIX = [_SIZE, _POINTER, _POINTER, *[_SIZE] * 5]
_ARGUMENTS = {
    "product": [_POINTER, _POINTER, _SIZE, *_MATRIX, _INT],
    "rms_norm": [_SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _FLOAT],
    "attention": [_SIZE, _POINTER, *[_POINTER, _SIZE, _SIZE] * 2, *[_SIZE] * 4, _FLOAT, _POINTER, _INT],
    "unpack": [*_MATRIX, _SIZE, _POINTER, _SIZE, _INT],
    "pack_words": [_POINTER, *[_SIZE] * 5, _POINTER, _INT],
}
# Triton and other libraries set CXX to a C compiler, which does not link the C++ library by itself.
_CPP_RUNTIME = ["-Wl,--no-as-needed", "-lstdc++"] if sys.platform == "linux" else []
# Number of outputs of a 4-bit matrix that are computed together.
BLOCK = 64
BITS = {torch.bfloat16: 16, torch.float32: 32}

# Errors for a cache folder that cannot be created or written, or whose drive is full.
_NO_FOLDER_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR}
# The compiled kernels: False before the first use, None if they cannot be compiled.
_library: Any = False
# The reason why there are no kernels, and what a user could do.
_why_none = ("", "")
# The reason why compilation failed, until it is logged.
_reasons: list[str] = []


class Matrix(NamedTuple):
    """A weight matrix in the layout of the C++ kernels.

    Attributes:
        bits: 4, 8, 16 or 32.
        group_size: of 4 bits, the number of inputs that share a scale, a multiple of 32; else 0.
        codes: 4 bits: `[O, I / 2]` uint8, in the layout that torch's kernel reads with AVX-512. 8 bits: `[O, I]` int8.
            16 and 32 bits: the matrix in bfloat16 or float32, contiguous; `[O, I]`, or `[I, O]` if `is_input_first`.
        scales: bfloat16. 4 bits: `[I / group_size, O, 2]`, the scale, and the weight that code 8 means. 8 bits: `[O]`.
            16 and 32 bits: None.
        is_input_first: only for 16 and 32 bits.
        in_bytes: only for 4 and 8 bits: quantize the rows to 8 bits, with a scale for each 32 inputs.
    """

    bits: int
    group_size: int
    codes: torch.Tensor
    scales: torch.Tensor | None
    is_input_first: bool = False
    in_bytes: bool = False


def plain_matrix(weight_OI: torch.Tensor) -> Matrix | None:
    """Describe a bfloat16 or float32 weight on the CPU for the kernels; None if they cannot read it.

    The kernels need numbers at addresses that are multiples of their size; in a mapped file they may begin at any byte.

    Args:
        weight_OI: contiguous, or a view of a contiguous matrix `[I, O]`.
    """
    bits = BITS.get(weight_OI.dtype)
    if bits is None or not weight_OI.is_cpu or weight_OI.data_ptr() % weight_OI.itemsize:
        return None
    if weight_OI.is_contiguous():
        return Matrix(bits, 0, weight_OI, None)
    return Matrix(bits, 0, weight_OI.T, None, is_input_first=True) if weight_OI.T.is_contiguous() else None


def library() -> Any:
    """Return the compiled kernels, or None if this machine has none. The first call compiles them."""
    global _library
    if _library is False:
        _library = _compile()
    return _library


def why_no_cpp_kernels() -> tuple[str, str] | None:
    """Return why there are no compiled kernels, and what would help or ""; None if there are kernels.

    The first call compiles them.
    """
    return None if library() is not None else _why_none


def cpp_instructions() -> str | None:
    """Return the name of the instructions that the compiled kernels use; None if there are no kernels."""
    kernels = library()
    return None if kernels is None else kernels.instructions().decode()


def _compile() -> Any:
    global _why_none
    if os.environ.get("LLAMOE_CPP_KERNELS", "1") == "0":
        _why_none = ("LLAMOE_CPP_KERNELS=0 turns them off", "unset LLAMOE_CPP_KERNELS")
        return None
    flags = flags_of_processor()
    if isinstance(flags, str):
        _why_none = (flags, "")
        return None
    try:
        with log_if_slow("llamoe: compiling kernels for this processor, once"):
            kernels = compiled(flags)
        with torch.device("cpu"), torch.no_grad():
            if not _agrees(kernels):
                raise RuntimeError("their results are wrong on this machine")
    except Exception as error:
        # Catch everything: compilers fail in many ways, and torch's kernels can be used instead.
        remedy = "install a C++ compiler, such as g++, or name one in CXX"
        if isinstance(error, OSError) and error.errno in _NO_FOLDER_ERRORS:
            remedy = "name a folder in TORCHINDUCTOR_CACHE_DIR where torch can keep files"
        _why_none = (" ".join(str(error).split()), remedy)
        _reasons.append(str(error))
        return None
    return kernels


def flags_of_processor() -> list[str] | str:
    """Return the compiler flags for this processor, or, as a text, the reason why there are no kernels for it.

    The flags are part of the key under which a compiled file is kept. They contain a number for the processor's
    instructions, so that processors with other instructions have files of their own in the same folder.
    """
    if sys.platform == "win32":
        return "they need GCC or Clang, and torch compiles with MSVC here"
    can = sorted(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    flags = [f"-DINSTRUCTIONS={zlib.crc32(' '.join(can).encode())}"]
    if platform.machine() not in ("x86_64", "AMD64"):
        return flags
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512"):
        return f"they need AVX2, AVX-512 or NEON, and torch computes with {capability} here"
    if capability == "AVX512":
        return flags
    # A user who limits torch to AVX2 wants the results of a processor that has no AVX-VNNI, either.
    is_limited = os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"
    return [*flags, "-mno-avx512f", *["-mno-avxvnni"] * is_limited]


def compiled(flags: Sequence[str]) -> Any:
    """Return the kernels, compiled with these flags."""
    # torch's own flags forbid fused multiply-add; the last flag counts.
    kernels = compile_cpp(_source("kernels.cpp"), [*flags, "-ffp-contract=fast", *_CPP_RUNTIME])
    for name, types in _ARGUMENTS.items():
        getattr(kernels, name).argtypes = types
        getattr(kernels, name).restype = None
    kernels.instructions.restype = ctypes.c_char_p
    return kernels


def _source(name: str) -> str:
    """Return the text of a source file, with our included files put in: the compiler gets a single text."""
    text = (_SOURCES / name).read_text(encoding="utf-8")
    return re.sub(r'^#include "(.+)"$', lambda match: _source(match[1]), text, flags=re.MULTILINE)


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    # The tolerance allows for sums in another order, and for two roundings to bfloat16.
    return bool((actual.float() - expected.float()).abs().max() <= 0.01 * expected.abs().max())


def _agrees(kernels: Any) -> bool:
    """Return True if the kernels agree with torch's operations, for numbers of rows that run all of their code."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in, group_size = 128, 192, 64
    codes = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8, generator=generator)
    scales = torch.rand(num_out, generator=generator).bfloat16()
    scales_in = torch.rand(num_in, generator=generator).bfloat16()
    small = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8, generator=generator)
    low, high = small.view(-1, 2, BLOCK // 2, num_in).unbind(1)
    packed = (low | high << 4).mT.reshape(num_out, num_in // 2)
    scales_of_groups = torch.randn(num_in // group_size, num_out, 2, generator=generator).bfloat16()
    scale, offset = scales_of_groups.float().repeat_interleave(group_size, 0).unbind(2)
    int4_IO = (small.T.float() - 8) * scale + offset
    int8_IO = codes.T.float() * scales.float()
    for num_rows in (1, 7):
        x = torch.randn(num_rows, num_in, generator=generator).bfloat16()
        for in_bytes in (False, True):
            expected = _as_bytes(x.float()) if in_bytes else x.float()
            for matrix, weight_IO in (
                (Matrix(4, group_size, packed, scales_of_groups, in_bytes=in_bytes), int4_IO),
                (Matrix(8, 0, codes, scales, in_bytes=in_bytes), int8_IO),
            ):
                if not _is_close(_multiply(kernels, x, matrix), expected @ weight_IO):
                    return False
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = x.to(dtype), codes.to(dtype)
            # Also test weights that begin within a cache line, and input-first weights.
            for rows in (weight, weight.flatten()[2 : 2 - num_in].view(-1, num_in), weight.T.contiguous().T):
                if not _is_close(_multiply(kernels, x, plain_matrix(rows)), x @ rows.T):
                    return False
            expected = torch.nn.functional.rms_norm(x.float(), (num_in,), eps=1.0) * scales_in.float()
            if not _is_close(_normalize(kernels, x, scales_in.to(dtype), 1.0), expected):
                return False
    words, repacked = (small[:, ::2] | small[:, 1::2] << 4).view(torch.int32), torch.empty_like(packed)
    _pack_words(kernels, words, None, repacked)
    return torch.equal(repacked, packed) and _attends(kernels, generator)


def _attends(kernels: Any, generator: torch.Generator) -> bool:
    """Return True if attention of one query agrees with torch's, for several numbers of heads that share keys."""
    for heads, dtype in ((6, torch.float32), (15, torch.bfloat16)):
        query = torch.randn(1, heads, 1, 40, generator=generator).to(dtype)
        keys, values = torch.randn(2, 1, 3, 150, 40, generator=generator).to(dtype)[..., 3:, :]
        shared = [states.float().repeat_interleave(heads // 3, 1) for states in (keys, values)]
        expected = torch.nn.functional.scaled_dot_product_attention(query.float(), *shared, scale=0.3)
        if not _is_close(_attend(kernels, query, keys, values, 0.3), expected[:, :, 0][:, None]):
            return False
    return True


def _as_bytes(x_NI: torch.Tensor) -> torch.Tensor:
    """Return the rows, rounded as the kernels round them to bytes."""
    parts = x_NI.unflatten(1, (-1, 32))
    scales = parts.abs().amax(2, keepdim=True) / 127
    return ((parts / scales).round() * scales).flatten(1)


def _arguments(matrix: Matrix) -> tuple:
    """Return the kernels' arguments for a matrix; `Matrix` in kernels.cpp says what they mean."""
    bits, group_size, codes, scales, is_input_first, in_bytes = matrix
    outputs, inputs = codes.shape
    if is_input_first:
        outputs, inputs = inputs, outputs
    if bits == 4:
        inputs *= 2
    stride = scales.stride(0) // 2 if bits == 4 else outputs if is_input_first else 0
    address = None if scales is None else scales.data_ptr()
    return bits, codes.data_ptr(), address, inputs, outputs, group_size, stride, in_bytes


def _multiply(kernels: Any, x: torch.Tensor, matrix: Matrix) -> Any:
    bits, _, _, inputs, outputs, *_ = arguments = _arguments(matrix)
    sizes = x.shape[:-1]
    if inputs != x.shape[-1] or (bits == 4 and outputs % BLOCK):
        return None
    x, y = x.contiguous(), x.new_empty((*sizes, outputs))
    kernels.product(x.data_ptr(), y.data_ptr(), sizes.numel(), *arguments, torch.get_num_threads())
    return y


def _normalize(kernels: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    y, size = torch.empty_like(x), len(weight)
    num_rows = x.numel() // size
    kernels.rms_norm(BITS[x.dtype], x.data_ptr(), weight.data_ptr(), y.data_ptr(), num_rows, size, eps)
    return y


def cpp_product(x: torch.Tensor, matrix: Matrix) -> torch.Tensor | None:
    """Multiply few rows by the transpose of a matrix; return None if there is no kernel.

    If compilation failed, the first call with quantized weights logs a warning.

    Args:
        x: `[..., I]` on the CPU; float32 for a matrix of 32 bits, otherwise bfloat16.
        matrix: of I inputs; with 4 bits only if the number of outputs is a multiple of 64.

    Returns:
        `[..., O]` in the dtype of `x`.
    """
    kernels = _library or library()
    if _reasons and matrix.bits <= 8:
        logger.warning(
            "Kernels of quantized weights on a CPU were not compiled, so torch's slower ones are used: %s",
            _reasons.pop(),
        )
    return None if kernels is None else _multiply(kernels, x, matrix)


def cpp_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """Apply RMSNorm to rows `[..., D]` on the CPU; return None if there is no kernel.

    The weight `[D]` is contiguous and has the dtype of the rows.
    """
    kernels = library() if x.dtype in BITS else None
    return None if kernels is None else _normalize(kernels, x, weight, eps)


def _attend(
    kernels: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    (_, heads, _, size), (_, key_heads, count, _) = query.shape, keys.shape
    query = query.contiguous()
    y = query.new_empty(1, 1, heads, size)
    cached = [it for states in (keys, values) for it in (states.data_ptr(), *states.stride()[1:3])]
    sizes = count, heads, key_heads, size
    kernels.attention(
        BITS[query.dtype], query.data_ptr(), *cached, *sizes, scaling, y.data_ptr(), torch.get_num_threads()
    )
    return y


def cpp_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor | None:
    """Attend with one query per head to all keys of a batch of one row; return None if there is no kernel.

    Args:
        query: `[1, H, 1, D]` on the CPU in float32 or bfloat16.
        keys: `[1, G, K, D]` in the same dtype.
        values: likewise.
        scaling: factor of the scores.

    Returns:
        `[1, 1, H, D]`.
    """
    num_heads, size = query.shape[1], query.shape[3]
    takes = query.dtype in BITS and query.shape[0] == query.shape[2] == 1 and keys.shape == values.shape
    takes = takes and keys.shape[0] == 1 and keys.shape[3] == size and keys.shape[2] > 0
    takes = takes and num_heads % keys.shape[1] == 0
    takes = takes and all(
        type(it) is torch.Tensor and it.is_cpu and it.dtype == query.dtype and it.stride(3) == 1
        for it in (keys, values)
    )
    kernels = library() if takes else None
    return None if kernels is None else _attend(kernels, query, keys, values, scaling)


def cpp_unpack(matrix: Matrix, out_IO: torch.Tensor) -> bool:
    """Unpack a 4-bit matrix into a tensor `[I, O]`; return False if there is no kernel.

    Args:
        matrix: of whole blocks of 64 outputs; its scales may be a slice of a larger matrix's scales.
        out_IO: float32 or bfloat16, with contiguous rows.
    """
    kernels = library() if matrix.codes.is_cpu and len(matrix.codes) % BLOCK == 0 else None
    if kernels is None:
        return False
    bits, threads = BITS[out_IO.dtype], torch.get_num_threads()
    kernels.unpack(*_arguments(matrix), bits, out_IO.data_ptr(), out_IO.stride(0), threads)
    return True


def cpp_pack_words(words: torch.Tensor, places: Sequence[int] | None, packed: torch.Tensor) -> bool:
    """Pack 4-bit codes, which come eight to a 32-bit word, into the kernels' layout; return False without a kernel.

    Args:
        words: int32 with any strides. Either `[O, I / 8]`: a word has the codes of eight inputs, lowest bits first; or
            `[O / 8, I]`: a word has the codes of eight outputs.
        places: for words of eight outputs, which four bits are the code of each output, counted from the lowest; else
            None.
        packed: the result, `[O, I / 2]` uint8, contiguous, of whole blocks of 64 outputs.
    """
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    fits = words.shape == ((outputs, inputs // 8) if places is None else (outputs // 8, inputs))
    takes = fits and words.is_cpu and words.dtype == torch.int32 and outputs % BLOCK == inputs % 8 == 0
    kernels = library() if takes else None
    if kernels is not None:
        _pack_words(kernels, words, places, packed)
    return kernels is not None


def _pack_words(
    kernels: Any, words: torch.Tensor, places: Sequence[int] | None, packed: torch.Tensor
) -> None:
    outputs, half = packed.shape
    digits = sum(place << 4 * output for output, place in enumerate(places or ()))
    sizes = *words.stride(), digits, 2 * half, outputs
    kernels.pack_words(words.data_ptr(), *sizes, packed.data_ptr(), torch.get_num_threads())
