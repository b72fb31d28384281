"""Products in bfloat16 and float16 on a CPU without instructions for them: block by block in float32.

Without such instructions torch multiplies many rows in scalar loops, up to thirty times slower than float32. Here a
block of the matrix is cast to float32 and stays in the cache while BLAS multiplies it, so memory is read once, in 16
bits. Sums are float32 and rounded once. `product_of_16_bits` is the same for autograd and compilers.

Shapes: N rows, I inputs, O outputs.
"""

import platform
import sys
from collections.abc import Iterator

import torch

from .._private_api import has_mkldnn_products
from .limits import (
    CPP_PLAIN_AMX_MAX_ROWS,
    CPP_PLAIN_AVX512_BF16_MAX_ROWS,
    CPP_PLAIN_MAX_ROWS,
    DOT_PRODUCT_MAX_ROWS,
    FEW_BITS_AMX_MAX_ROWS,
    IMITATED_MAX_ROWS,
)

BLOCK_WEIGHTS = 1 << 19
"""Weights that are cast at a time: a block in float32 stays in the caches of two levels."""


def _rows_of_torch(dtype: torch.dtype) -> int | None:
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    if not has_mkldnn_products(dtype):
        return DOT_PRODUCT_MAX_ROWS
    can = torch.cpu.get_capabilities()
    # AVX-512 instructions for float16 come with those for bfloat16; oneDNN emulates only the latter.
    is_imitated = not (can.get("avx512_bf16") or can.get("avx_ne_convert") or can.get("amx_bf16"))
    return IMITATED_MAX_ROWS if is_imitated and dtype == torch.bfloat16 else None


# Computed at import: a compiler that traces the function could not query the processor.
_ROWS_OF_TORCH = {dtype: _rows_of_torch(dtype) for dtype in (torch.bfloat16, torch.float16)}


def rows_of_torch(dtype: torch.dtype) -> int | None:
    """Return the most rows for which torch's products of this dtype are fast on this CPU; None: no limit.

    Every choice between torch's product and blocks in float32 depends on this limit.
    """
    return _ROWS_OF_TORCH.get(dtype)


# Only AMX multiplies bfloat16 faster than the kernels multiply bytes.
_HAS_AMX = has_mkldnn_products(torch.bfloat16) and bool(torch.cpu.get_capabilities().get("amx_bf16"))
_HAS_AVX512_BF16 = has_mkldnn_products(torch.bfloat16) and bool(
    torch.cpu.get_capabilities().get("avx512_bf16")
)


def rows_in_bytes() -> int:
    """Return the most rows for which the 4-bit and 8-bit kernels are faster than unpacking once."""
    return FEW_BITS_AMX_MAX_ROWS if _HAS_AMX else sys.maxsize


def plain_max_rows(dtype: torch.dtype, is_output_first: bool = True) -> int:
    """Return the most rows that the compiled kernels multiply by plain weights of this dtype as fast as torch."""
    if dtype == torch.bfloat16 and _HAS_AMX:
        return CPP_PLAIN_AMX_MAX_ROWS
    if dtype == torch.bfloat16 and _HAS_AVX512_BF16 and is_output_first:
        return CPP_PLAIN_AVX512_BF16_MAX_ROWS
    return CPP_PLAIN_MAX_ROWS


def in_float32(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor | None:
    """Multiply rows by the transpose of a 16-bit matrix, block by block; None if torch's product is faster.

    Supports neither gradients nor compilers; `product_of_16_bits` does.

    Args:
        x_NI: on the CPU, in the dtype of the matrix.
        weight_OI: output-first, or a view of an input-first one.

    Returns:
        `[N, O]` in the dtype of `x_NI`.
    """
    most = rows_of_torch(weight_OI.dtype) if weight_OI.is_cpu and x_NI.dtype == weight_OI.dtype else None
    is_input_first = weight_OI.stride(0) == 1 < weight_OI.stride(1)
    if most is None or (len(x_NI) <= most and not (is_input_first and most == DOT_PRODUCT_MAX_ROWS)):
        return None
    x = x_NI.float()
    if is_input_first:
        y = x.new_zeros(len(x), len(weight_OI))
        for some, block_IO in blocks_in(weight_OI.T, torch.float32):
            y.addmm_(x[:, some], block_IO)
    else:
        y = x.new_empty(len(x), len(weight_OI))
        for some, block_OI in blocks_in(weight_OI, torch.float32):
            torch.mm(x, block_OI.T, out=y[:, some])
    return y.to(x_NI.dtype)


def dtype_of_blocks(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a packed matrix, once unpacked, is multiplied fastest by these rows."""
    return torch.float32 if needs_float32(x) else x.dtype


def needs_float32(x: torch.Tensor) -> bool:
    """Return whether an unpacked matrix is multiplied faster in float32 than in the dtype of these rows."""
    return x.is_cpu and rows_of_torch(x.dtype) is not None


def blocks_in(matrix_OI: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (slice, rows cast to dtype) block by block; each block overwrites the one before.

    The blocks share one buffer: allocating memory for the whole matrix takes longer than the cast.
    """
    step = max(BLOCK_WEIGHTS // max(matrix_OI.shape[1], 1), 1)
    block = matrix_OI.new_empty(min(step, len(matrix_OI)), matrix_OI.shape[1], dtype=dtype)
    for start in range(0, len(matrix_OI), step):
        some = slice(start, min(start + step, len(matrix_OI)))
        yield some, block[: some.stop - start].copy_(matrix_OI[some])


@torch.library.custom_op("llamoe::product_of_16_bits", mutates_args=())
def product_of_16_bits(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Multiply as `in_float32`, for autograd and compilers; the matrix may need a gradient: `[N, O]`."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        y_NO = in_float32(x_NI, weight_OI)
        return torch.mm(x_NI, weight_OI.T) if y_NO is None else y_NO


@product_of_16_bits.register_fake
def _(x_NI, weight_OI):
    return x_NI.new_empty(x_NI.shape[0], weight_OI.shape[0])


def _save_product(ctx, inputs, output):
    # Save only what the gradients need: rows are the larger part of a frozen model's memory.
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    x_NI, weight_OI = inputs
    ctx.save_for_backward(x_NI if needs_weight else None, weight_OI if needs_x else None)


def _differentiate_product(ctx, grad_NO):
    x_NI, weight_OI = ctx.saved_tensors
    grad_x = None if weight_OI is None else product_of_16_bits(grad_NO, weight_OI.T)
    return grad_x, None if x_NI is None else product_of_16_bits(grad_NO.T, x_NI.T)


product_of_16_bits.register_autograd(_differentiate_product, setup_context=_save_product)
