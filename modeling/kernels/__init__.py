"""Faster ways to the same numbers, each beside a plain version of the same function.

Reading order: limits (how many rows are few), tracing (whether a compiler or tracer records the pass), waiting (what a
user waits for), cpp_kernels (products of few rows, and attention of one query, on a CPU), float32_blocks (16 bits on a
CPU without instructions for them), cpu (the product that linear layers ask for, and its guard), single_queries
(attention of one token a row), packed_rows_triton, packed_rows (packed matrices on a GPU, plain ones for few rows, and
a check of both). Files named `…_triton` import Triton, which is not installed everywhere and takes long to import; the
others import it only when a kernel is about to run.
"""

from .cpp_kernels import (
    Matrix,
    cpp_instructions,
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
    INT4_TORCH_MAX_ROWS,
    INT8_TORCH_MAX_ROWS,
    PEFT_ORDER_MAX_ROWS,
    TRITON_UNSORTED_MAX_ROWS,
)
from .packed_rows import (
    GpuMatrix,
    few_rows_limit,
    has_gpu,
    is_right,
    kernel_failures,
    max_rows_of_matrix,
    packed_product,
    why_no_gpu_kernel,
)
from .single_queries import are_single_queries, attend_to_single_queries
from .tracing import is_exported, is_readable, is_recorded, is_tracing, is_transformed
