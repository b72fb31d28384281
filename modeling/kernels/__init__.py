"""Faster ways to the same numbers, each beside a plain version of the same function.

Reading order: tracing (whether a compiler or tracer records the pass), waiting (what a user waits for), cpp_kernels
(products of few rows on a CPU), cpp_layer (a layer for one of them), float32_blocks (16 bits on a CPU without
instructions for them), cpu (CPU shortcuts and the one guard for them), few_rows_triton, few_rows (a GPU kernel for few
rows of experts), few_rows_check (whether it is right on this device). Files named `…_triton` import Triton, which is
not installed everywhere and takes long to import; the others import it only when a kernel is about to run.
"""

from .cpp_kernels import (
    Matrix,
    cpp_feed_forward,
    cpp_norm,
    cpp_products,
    has_feed_forward,
    int4_library,
    plain_matrix,
    why_no_cpp_kernels,
)
from .cpp_layer import Rotation, cpp_attend, cpp_project
from .cpu import (
    PLAIN_MAX_ROWS,
    SHORTCUTS_ARE_ON,
    apply_feed_forward,
    apply_gate,
    apply_linear,
    apply_linears,
    apply_normalized_feed_forward,
    are_single_queries,
    attend_to_single_queries,
    can_use_shortcut,
    is_silu,
    is_watched,
    matrices_of,
    multiply_rows,
    norm_weight,
)
from .few_rows import TRITON_MAX_ROWS, few_rows_experts, few_rows_fits, few_rows_limit
from .few_rows_check import find_difference, kernel_is_right
from .float32_blocks import BLOCK_WEIGHTS, blocks_in_float32, in_float32, needs_float32, rows_of_torch
from .tracing import is_exported, is_readable, is_recorded, is_tracing, is_transformed

__all__ = [
    "BLOCK_WEIGHTS",
    "Matrix",
    "PLAIN_MAX_ROWS",
    "SHORTCUTS_ARE_ON",
    "Rotation",
    "TRITON_MAX_ROWS",
    "apply_feed_forward",
    "apply_gate",
    "apply_linear",
    "apply_linears",
    "apply_normalized_feed_forward",
    "are_single_queries",
    "attend_to_single_queries",
    "blocks_in_float32",
    "can_use_shortcut",
    "cpp_attend",
    "cpp_feed_forward",
    "cpp_norm",
    "cpp_products",
    "cpp_project",
    "few_rows_experts",
    "few_rows_fits",
    "few_rows_limit",
    "find_difference",
    "has_feed_forward",
    "int4_library",
    "in_float32",
    "is_exported",
    "is_readable",
    "is_recorded",
    "is_silu",
    "is_tracing",
    "is_transformed",
    "is_watched",
    "kernel_is_right",
    "matrices_of",
    "multiply_rows",
    "needs_float32",
    "norm_weight",
    "plain_matrix",
    "rows_of_torch",
    "why_no_cpp_kernels",
]
