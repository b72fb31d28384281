"""Products of few rows with matrices on a CPU: kernels in C++, compiled when they are first needed.

A step of decoding reads every weight once. With one row, torch's products reach half to three quarters of the memory's
speed, in float32 and bfloat16 as in 4 and 8 bits, and those of 4 and 8 bits are several times slower than bfloat16 with
many rows. The kernels in cpp/ read memory at its full speed. A step is then so short that calls between products count:
the feed-forward and the norms have kernels, too.

They are compiled by the C++ backend of `torch.compile`, which keeps the result on disk: five seconds once. One source
serves every processor with AVX2, AVX-512 or NEON, by the vectors of GCC and Clang; only products of bytes are written
for each (`cpp/bytes_*.h`). Without a compiler, on other processors, or with `LLAMOE_CPP_KERNELS=0` in the environment,
torch's kernels are used.

Shapes: N rows, I inputs, O outputs, H hidden size, F intermediate size.
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
_ROWS = [_SIZE, _POINTER, _POINTER, _FLOAT, _POINTER]
_ARGUMENTS = {
    "products": [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _INT],
    "unpack": [_POINTER, _SIZE, _POINTER, _SIZE, _INT],
    "feed_forward": [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _INT],
    "project": [*[_POINTER] * 4, _FLOAT, _POINTER, _INT],
    "finish": [_POINTER, _POINTER, *([_POINTER, _SIZE, _SIZE] * 2), _SIZE, _POINTER, _POINTER, _INT],
    "decode": [_POINTER, _SIZE, *[_POINTER] * 4, _FLOAT, _POINTER, _INT],
    "normalized_feed_forward": [*_ROWS, _SIZE, _POINTER, _SIZE, _INT],
    "rms_norm": [_SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _FLOAT],
    "route": [*_ROWS, _SIZE, *[_POINTER] * 4, _INT],
    "mixture": [*_ROWS, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER, _INT],
}
# Triton and others set CXX to a C compiler, which links no C++ library by itself.
_CPP_RUNTIME = ["-Wl,--no-as-needed", "-lstdc++"] if sys.platform == "linux" else []
# Outputs of a 4-bit matrix are computed as many at a time.
BLOCK = 64
BITS = {torch.bfloat16: 16, torch.float32: 32}

# A folder cannot be made or written, or its drive is full.
_NOT_KEPT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR}
# The compiled kernels: False before the first use, None where there are none.
_library: Any = False
# Why there are none, and what would help.
_why_none = ("", "")
# Why they could not be made, until that is told.
_reasons: list[str] = []


class Adapter(NamedTuple):
    """What an adapter adds to the products with a matrix: `scale * B A x`.

    Attributes:
        a: `[r, I]` with contiguous rows, float32 or bfloat16.
        b: `[O, r]` in the same dtype, in any strides.
        scale: the factor.
        apart: of a stack of matrices the bytes between two experts' `a`, and between their `b`.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    apart: tuple[int, int] = (0, 0)


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
        in_bytes: for 4 and 8 bits: whether rows are quantized to 8 bits, a scale for each 32 inputs.
        adapters: what is added to its products, one after the other.
    """

    bits: int
    group_size: int
    codes: torch.Tensor
    scales: torch.Tensor | None
    is_input_first: bool = False
    in_bytes: bool = False
    adapters: tuple[Adapter, ...] = ()

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


def adapted(matrix: Matrix | None, adapters: Sequence[Adapter]) -> Matrix | None:
    """The matrix with what adapters add to its products; None where no kernel takes them."""
    if matrix is None or not adapters:
        return matrix
    dtypes = (torch.float32,) if matrix.bits == 32 else (torch.float32, torch.bfloat16)
    for a, b, *_ in adapters:
        takes = all(
            type(each) in (torch.Tensor, torch.nn.Parameter)
            and each.is_cpu
            and each.dtype == a.dtype
            and each.dtype in dtypes
            and each.data_ptr() % each.itemsize == 0
            for each in (a, b)
        )
        # Packed inputs may be padded.
        fits = 0 <= matrix.inputs - a.shape[1] < max(matrix.group_size, 1) and b.shape == (
            matrix.outputs,
            len(a),
        )
        if not takes or not fits or not a.is_contiguous():
            return None
    return matrix._replace(adapters=(*matrix.adapters, *adapters))


def library() -> Any:
    """The compiled kernels; None where there are none. The first call compiles them."""
    global _library
    if _library is False:
        _library = _compile()
    return _library


def why_no_cpp_kernels() -> tuple[str, str] | None:
    """Why there are no compiled kernels, and what would help, or ""; None where there are.

    The first call compiles them.
    """
    return None if library() is not None else _why_none


def cpp_instructions() -> str | None:
    """The instructions that the compiled kernels use, in words; None where there are none."""
    found = library()
    return None if found is None else found.instructions().decode()


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
            found = compiled(flags)
        with torch.device("cpu"), torch.no_grad():
            if not _agrees(found):
                raise RuntimeError("their results are wrong on this machine")
    except Exception as error:
        # Compilers fail in many ways, and torch's kernels do the same.
        remedy = "install a C++ compiler, such as g++, or name one in CXX"
        if isinstance(error, OSError) and error.errno in _NOT_KEPT:
            remedy = "name a folder in TORCHINDUCTOR_CACHE_DIR where torch can keep files"
        _why_none = (" ".join(str(error).split()), remedy)
        _reasons.append(str(error))
        return None
    return found


def flags_of_processor() -> list[str] | str:
    """What a compiler is told beside "for this processor"; a reason, where there are no kernels for it.

    The flags are part of the key under which a compiled file is kept. They name the processor's instructions, so that
    another one finds files of its own in the same folder.
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
    # Who holds torch to AVX2 wants to see a processor that has no more, and later ones have AVX-VNNI besides.
    is_held = os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"
    return [*flags, "-mno-avx512f", *["-mno-avxvnni"] * is_held]


def compiled(flags: Sequence[str]) -> Any:
    """The kernels, compiled with these flags."""
    # torch forbids to fuse products and sums.
    found = compile_cpp(_source("kernels.cpp"), [*flags, "-ffp-contract=fast", *_CPP_RUNTIME])
    for name, types in _ARGUMENTS.items():
        getattr(found, name).argtypes = types
        getattr(found, name).restype = None
    found.instructions.restype = ctypes.c_char_p
    return found


def _source(name: str) -> str:
    """A file with those that it includes, since the compiler is given a text."""
    text = (_SOURCES / name).read_text(encoding="utf-8")
    return re.sub(r'^#include "(.+)"$', lambda match: _source(match[1]), text, flags=re.MULTILINE)


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    # Two roundings to bfloat16, of sums in another order.
    return bool((found.float() - expected.float()).abs().max() <= 0.01 * expected.abs().max())


def _agrees(found: Any) -> bool:
    """Whether the kernels agree with plain operations, for numbers of rows that run each of their forms."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in, group_size = 128, 192, 64
    codes = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8, generator=generator)
    scales = torch.rand(num_out, generator=generator).bfloat16()
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
                if not _is_close(multiply(x, prepare([matrix], found)), expected @ weight_IO):
                    return False
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = x.to(dtype), codes.to(dtype)
            # Also where rows begin within a cache line.
            for rows in (weight, weight.flatten()[2 : 2 - num_in].view(-1, num_in)):
                a, b = (torch.randn(shape, generator=generator) for shape in ((5, num_in), (len(rows), 5)))
                matrix = Matrix(BITS[dtype], 0, rows, None)
                expected = x @ rows.T
                if not _is_close(multiply(x, prepare([matrix], found)), expected):
                    return False
                # As large as the products.
                b *= codes.float().std()
                adapters = (Adapter(a, b, 0.5), Adapter(a, b.T.contiguous().T, 0.5))
                products = prepare([matrix._replace(adapters=adapters)], found)
                if not _is_close(multiply(x, products), expected + x.float() @ a.T @ b.T):
                    return False
    return True


def _as_bytes(x_NI: torch.Tensor) -> torch.Tensor:
    """What rows are multiplied as where they are quantized."""
    parts = x_NI.unflatten(1, (-1, 32))
    scales = parts.abs().amax(2, keepdim=True) / 127
    return ((parts / scales).round() * scales).flatten(1)


class _PlacedAdapter(ctypes.Structure):
    """An adapter as the kernels know it, likewise."""

    _fields_ = (
        *(("bits", _SIZE), ("a", _POINTER), ("b", _POINTER)),
        *((name, _SIZE) for name in ("inputs", "rank", "output_stride", "rank_stride", "a_apart", "b_apart")),
        ("scale", _FLOAT),
    )


class _Placed(ctypes.Structure):
    """A matrix as the kernels know it, by its addresses, which are right as long as its tensors are there."""

    _fields_ = (
        *(("bits", _SIZE), ("codes", _POINTER), ("scales", _POINTER)),
        *(
            (name, _SIZE)
            for name in ("inputs", "outputs", "group_size", "stride", "in_bytes", "num_adapters")
        ),
        ("adapters", ctypes.POINTER(_PlacedAdapter)),
    )


def place(matrices: Sequence[Matrix]) -> Any:
    """What the kernels are told of matrices."""
    placed = (_Placed * len(matrices))()
    for at, matrix in zip(placed, matrices, strict=True):
        bits, group_size, codes, scales, is_input_first, in_bytes, adapters = matrix
        outputs = matrix.outputs
        at.bits, at.codes, at.scales = bits, codes.data_ptr(), None if scales is None else scales.data_ptr()
        at.inputs, at.outputs, at.group_size, at.in_bytes = matrix.inputs, outputs, group_size, in_bytes
        if bits == 4:
            at.stride = scales.stride(0) // 2
        else:
            at.stride = outputs if is_input_first else 0
        if adapters:
            at.num_adapters, at.adapters = len(adapters), _place_adapters(adapters)
    return placed


def _place_adapters(adapters: Sequence[Adapter]) -> Any:
    placed = (_PlacedAdapter * len(adapters))()
    for at, (a, b, scale, apart) in zip(placed, adapters, strict=True):
        at.bits, at.a, at.b, at.scale = BITS[a.dtype], a.data_ptr(), b.data_ptr(), scale
        at.inputs, at.rank, at.output_stride, at.rank_stride = a.shape[1], len(a), *b.stride()
        at.a_apart, at.b_apart = apart
    return placed


class Products(NamedTuple):
    """Up to three matrices of one format by their addresses."""

    library: Any
    inputs: int
    sizes: list[int]
    """Outputs of each matrix."""
    placed: Any


def are_alike(matrices: Sequence[Matrix | None]) -> bool:
    """Whether one call multiplies by all of them: one format, and whole blocks of outputs where they have any."""
    first = matrices[0]
    if first is None:
        return False
    form = first.bits, first.group_size, first.is_input_first, first.in_bytes
    return all(
        each is not None
        and (each.bits, each.group_size, each.is_input_first, each.in_bytes) == form
        and not (each.bits == 4 and each.outputs % BLOCK)
        for each in matrices
    )


def prepare(matrices: Sequence[Matrix | None], found: Any = None) -> Products | None:
    """What multiplies by up to three matrices at once; None where they are unlike, or there is no kernel.

    That none was compiled is told for quantized weights, once.

    Args:
        matrices: of the same inputs; output-first.
        found: the kernels; default: those of this processor.
    """
    if not are_alike(matrices) or len({each.inputs for each in matrices}) > 1:
        return None
    found = found or library()
    if _reasons and matrices[0].bits <= 8:
        logger.warning(
            "Kernels of quantized weights on a CPU were not compiled; torch's slower ones are used: %s",
            _reasons.pop(),
        )
    if found is None:
        return None
    return Products(found, matrices[0].inputs, [each.outputs for each in matrices], place(matrices))


def multiply(x: torch.Tensor, products: Products) -> torch.Tensor:
    """Rows times the transposes of matrices, `[N, O]`, their outputs side by side."""
    found, num_in, sizes, placed = products
    num_rows = x.numel() // num_in
    y = x.new_empty(num_rows, sum(sizes))
    x = x.contiguous()
    found.products(x.data_ptr(), y.data_ptr(), num_rows, placed, len(sizes), torch.get_num_threads())
    return y


def cpp_unpack(matrix: Matrix, out_IO: torch.Tensor) -> bool:
    """Write what codes of 4 bits mean into `[I, O]`, whose rows may lie apart; False where there is no kernel.

    Args:
        matrix: of whole blocks; its scales may be those of some outputs of a larger one.
        out_IO: float32 or bfloat16.
    """
    found = library() if matrix.codes.is_cpu and matrix.outputs % BLOCK == 0 else None
    if found is None:
        return False
    placed, threads = place([matrix]), torch.get_num_threads()
    found.unpack(placed, BITS[out_IO.dtype], out_IO.data_ptr(), out_IO.stride(0), threads)
    return True


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
