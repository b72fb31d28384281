"""How many rows are few: every limit between two ways to the same product, with whom it limits and why.

The unit is rows of one product, unless a name says otherwise. A decode step has a row for each token of its batch, and
in a mixture a row for each expert of a token.
"""

# Decoding on a CPU (`cpp_kernels`).
CPP_PLAIN_MAX_ROWS = 16
"""The compiled kernels with weights of 16 and 32 bits. At this number they take 0.9 of the time of torch's product in
float32 with AVX-512, as much with AVX2, and a third to 0.7 in bfloat16."""
CPP_PLAIN_AMX_MAX_ROWS = 8
"""The same in bfloat16, where torch multiplies by AMX; at 12 rows the kernels take 1.3 of its time."""
CPP_PLAIN_AVX512_BF16_MAX_ROWS = 1
"""The same in bfloat16 with an output-first matrix, where torch has AVX-512's instructions for it: one row takes the
kernels 0.5 to 0.8 of its time, two rows 1.2 to 1.6, eight rows 1.5 to 2.9 (matrices of a 7B model, Zen 4)."""

# Products of 16 bits on a CPU (`float32_blocks`).
DOT_PRODUCT_MAX_ROWS = 3
"""Torch's product with an output-first matrix, a sum of dot products a row, without instructions for 16 bits."""
IMITATED_MAX_ROWS = 8
"""The same where oneDNN imitates instructions for bfloat16 with those of AVX-512."""

# Packed matrices on a CPU (`formats`). A kernel unpacks for each few rows; above, unpacking once is faster.
FEW_BITS_FLOAT_MAX_ROWS = 16
"""Our kernels of 4 and 8 bits whose rows stay float."""
FEW_BITS_AMX_MAX_ROWS = 128
"""Our kernels of 4 and 8 bits whose rows become bytes, where torch multiplies bfloat16 by AMX; elsewhere they serve any
number of rows."""
INT4_TORCH_MAX_ROWS = 48
"""Torch's kernel of 4 bits, with AVX-512."""
INT8_TORCH_MAX_ROWS = 12
"""Torch's kernel of 8 bits."""

# Experts (`moe`).
PEFT_ORDER_MAX_ROWS = 16
"""Rows of all experts that the CPU multiplies by adapters in peft's order: copying into the stacks' costs more."""

# Experts on a GPU (`packed_rows`).
TRITON_MAX_ROWS = 128
"""Rows of all experts of 16 or 32 bits that the Triton kernels take; above, torch's grouped product, made for many,
is worth that the host waits for it."""
TRITON_PREFERRED_MAX_ROWS = {9: 64, 10: 64}
"""Fewer by compute capability, where torch's grouped product does not wait for the host, and reads an expert once for
more rows than a tile of the kernels has. No card was timed."""
TRITON_UNSORTED_MAX_ROWS = 32
"""Rows of all experts that the Triton kernels take unsorted, in one tile; above, that computes too much, and a sort is
cheap beside the products."""
TRITON_MAX_ROWS_A_MATRIX = {8: 1024, 9: 512, 10: 256, 12: 1024}
"""Rows of a matrix, for experts on average, that the Triton kernels multiply by packed weights, by the major compute
capability; above, unpacking the matrix into memory once is cheaper by calculation. A100, and the cards of 8.6 and 8.9
with slower memory, share a number. No card was timed."""
