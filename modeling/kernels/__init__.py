"""Faster ways to the same numbers, each beside a plain version of the same function.

Reading order: tracing (whether a compiler or tracer records the pass), few_bits (weights of 4 and 8 bits on a CPU), cpu
(CPU shortcuts and the one guard for them), few_rows_triton, few_rows (a GPU kernel for few rows of experts), trial,
trust (that kernel's test before its first use). Files named `…_triton` import Triton, which is not installed everywhere
and takes long to import; the others import it only when a kernel is about to run.
"""

from .cpu import (
    SHORTCUTS_ARE_ON,
    apply_feed_forward,
    apply_gate,
    apply_linear,
    apply_linears,
    are_single_queries,
    attend_to_single_queries,
    can_use_shortcut,
    multiply_rows,
)
from .few_bits import Matrix, few_bits_feed_forward, few_bits_norm, few_bits_products, is_loaded
from .few_rows import TRITON_MAX_ROWS, few_rows_experts, few_rows_fits
from .tracing import is_exported, is_readable, is_recorded, is_tracing, is_transformed
from .trial import Way, describe
from .trust import rows_known, rows_to_trust

__all__ = [
    "Matrix",
    "SHORTCUTS_ARE_ON",
    "TRITON_MAX_ROWS",
    "Way",
    "apply_feed_forward",
    "apply_gate",
    "apply_linear",
    "apply_linears",
    "are_single_queries",
    "attend_to_single_queries",
    "can_use_shortcut",
    "describe",
    "few_bits_feed_forward",
    "few_bits_norm",
    "few_bits_products",
    "few_rows_experts",
    "few_rows_fits",
    "is_exported",
    "is_loaded",
    "is_readable",
    "is_recorded",
    "is_tracing",
    "is_transformed",
    "multiply_rows",
    "rows_known",
    "rows_to_trust",
]
