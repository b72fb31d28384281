"""Faster kernels; each replaces operations of torch that give the same result up to rounding.

Reading order: limits (numbers of rows up to which each kernel is used), tracing (is a compiler or tracer recording?),
waiting (a message while kernels compile), cpp_kernels (on a CPU, products of few rows and attention of one query),
float32_blocks (bfloat16 and float16 on a CPU without instructions for them), cpu (`linear`, which chooses the product),
single_queries (attention of one token a row), packed_rows_triton and packed_rows (on a GPU, products with packed
matrices, products of few rows with plain matrices, and a check of the kernels). Triton is not installed everywhere and
is slow to import: only files named `…_triton` import it at their top.
"""

from .cpp_kernels import (
    Matrix,
    cpp_instructions,
    cpp_pack_words,
    cpp_product,
    cpp_unpack,
    why_no_cpp_kernels,
)
from .cpu import SHORTCUTS_ARE_ON, can_use_shortcut, linear, rms_norm, widened
from .float32_blocks import (
    BLOCK_WEIGHTS,
    blocks_in,
    dtype_of_blocks,
    needs_float32,
    plain_max_rows,
    rows_in_bytes,
    rows_of_torch,
)
from .limits import (
    FEW_BITS_FLOAT_MAX_ROWS,
    PEFT_ORDER_MAX_ROWS,
    TRITON_UNSORTED_MAX_ROWS,
)
from .packed_rows import (
    GpuMatrix,
    few_rows_limit,
    is_right,
    kernel_failures,
    max_rows_of_matrix,
    packed_product,
    why_no_gpu_kernel,
)
from .single_queries import are_single_queries, attend_to_single_queries
from .tracing import is_exported, is_readable, is_recorded, is_tracing, is_transformed
