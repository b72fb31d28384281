"""Products in bfloat16 and float16 on a CPU without instructions for them: block by block in float32.

Without such instructions torch multiplies many rows in scalar loops, which take up to thirty times as long as in
float32. Here a block of the matrix is cast to float32 and stays in the processor's cache while BLAS multiplies it, so
that memory is read only once, in 16 bits. Sums are in float32 and rounded once. `in_float32` is for inference,
`product_of_16_bits` also for autograd and compilers.

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
"""Number of weights in a block: in float32 (2 MiB) it fits into the processor's caches of the first two levels."""


def _rows_of_torch(dtype: torch.dtype) -> int | None:
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    if not has_mkldnn_products(dtype):
        return DOT_PRODUCT_MAX_ROWS
    can = torch.cpu.get_capabilities()
    # Processors with AVX-512 for float16 have it for bfloat16, too. oneDNN emulates only the instructions for bfloat16.
    is_imitated = not (can.get("avx512_bf16") or can.get("avx_ne_convert") or can.get("amx_bf16"))
    return IMITATED_MAX_ROWS if is_imitated and dtype == torch.bfloat16 else None


# Computed at import: a compiler could not trace the queries of the processor.
_ROWS_OF_TORCH = {dtype: _rows_of_torch(dtype) for dtype in (torch.bfloat16, torch.float16)}


def rows_of_torch(dtype: torch.dtype) -> int | None:
    """Return the most rows for which torch's product in this dtype beats float32 blocks; None: any number.

    The number is for this CPU. None also means that the CPU has instructions for the dtype.
    """
    return _ROWS_OF_TORCH.get(dtype)


# With AMX, and no other instructions, torch multiplies in bfloat16 faster than the kernels multiply bytes.
_HAS_AMX = has_mkldnn_products(torch.bfloat16) and bool(torch.cpu.get_capabilities().get("amx_bf16"))
_HAS_AVX512_BF16 = has_mkldnn_products(torch.bfloat16) and bool(
    torch.cpu.get_capabilities().get("avx512_bf16")
)


def rows_in_bytes() -> int:
    """Return the most rows, as int8, for which the 4-bit and 8-bit kernels beat unpacking the matrix once."""
    return FEW_BITS_AMX_MAX_ROWS if _HAS_AMX else sys.maxsize


def plain_max_rows(dtype: torch.dtype, is_output_first: bool = True) -> int:
    """Return the most rows that the compiled kernels multiply by plain weights of this dtype faster than torch does."""
    if dtype == torch.bfloat16 and _HAS_AMX:
        return CPP_PLAIN_AMX_MAX_ROWS
    if dtype == torch.bfloat16 and _HAS_AVX512_BF16 and is_output_first:
        return CPP_PLAIN_AVX512_BF16_MAX_ROWS
    return CPP_PLAIN_MAX_ROWS


def in_float32(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor | None:
    """Multiply rows by the transpose of a 16-bit matrix, block by block; return None if torch's product is faster.

    For gradients and under compilers use `product_of_16_bits`.

    Args:
        x_NI: on the CPU, in the dtype of the matrix.
        weight_OI: output-first, or a view of an input-first matrix.

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
        for inputs, block_IO in blocks_in(weight_OI.T, torch.float32):
            y.addmm_(x[:, inputs], block_IO)
    else:
        y = x.new_empty(len(x), len(weight_OI))
        for outputs, block_OI in blocks_in(weight_OI, torch.float32):
            torch.mm(x, block_OI.T, out=y[:, outputs])
    return y.to(x_NI.dtype)


def dtype_of_blocks(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which these rows are multiplied fastest by a packed matrix after it is unpacked."""
    return torch.float32 if needs_float32(x) else x.dtype


def needs_float32(x: torch.Tensor) -> bool:
    """Return True if these rows are multiplied faster in float32 than in their dtype."""
    return x.is_cpu and rows_of_torch(x.dtype) is not None


def blocks_in(matrix_OI: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (slice, these rows of the matrix cast to dtype) block by block; each block overwrites the previous one.

    The blocks share one buffer: to allocate memory for the whole matrix takes longer than the cast.
    """
    step = max(BLOCK_WEIGHTS // max(matrix_OI.shape[1], 1), 1)
    block = matrix_OI.new_empty(min(step, len(matrix_OI)), matrix_OI.shape[1], dtype=dtype)
    for start in range(0, len(matrix_OI), step):
        rows = slice(start, min(start + step, len(matrix_OI)))
        yield rows, block[: rows.stop - start].copy_(matrix_OI[rows])


@torch.library.custom_op("llamoe::product_of_16_bits", mutates_args=())
def product_of_16_bits(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Multiply as `in_float32`, or by torch if that is faster, with gradients and under compilers: `[N, O]`."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        y_NO = in_float32(x_NI, weight_OI)
        return torch.mm(x_NI, weight_OI.T) if y_NO is None else y_NO


@product_of_16_bits.register_fake
def _(x_NI, weight_OI):
    return x_NI.new_empty(x_NI.shape[0], weight_OI.shape[0])


def _save_product(ctx, inputs, output):
    # Save only what the gradients need: for frozen weights not the rows, which would be most of the memory.
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    x_NI, weight_OI = inputs
    ctx.save_for_backward(x_NI if needs_weight else None, weight_OI if needs_x else None)


def _differentiate_product(ctx, grad_NO):
    x_NI, weight_OI = ctx.saved_tensors
    grad_x = None if weight_OI is None else product_of_16_bits(grad_NO, weight_OI.T)
    return grad_x, None if x_NI is None else product_of_16_bits(grad_NO.T, x_NI.T)


product_of_16_bits.register_autograd(_differentiate_product, setup_context=_save_product)
