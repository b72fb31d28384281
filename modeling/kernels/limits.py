"""Numbers of rows up to which one way to multiply is faster than another.

Rows are those of one product, unless a docstring says otherwise. A decode step has a row for each token of its batch,
and in a mixture a row for each expert of a token.
"""

# Decoding on a CPU (`cpp_kernels`).
CPP_PLAIN_MAX_ROWS = 16
"""Most rows for the compiled kernels with plain weights. For this number they take in float32 0.9 of the time of
torch's product with AVX-512 and 1.0 with AVX2; in bfloat16 0.3 to 0.7."""
CPP_PLAIN_AMX_MAX_ROWS = 8
"""The same in bfloat16 if torch uses AMX; for 12 rows the kernels take 1.3 of torch's time."""
CPP_PLAIN_AVX512_BF16_MAX_ROWS = 1
"""The same for an output-first bfloat16 matrix if torch uses AVX-512's bfloat16 instructions: the kernels take 0.5 to
0.8 of torch's time for one row, 1.2 to 1.6 for two, 1.5 to 2.9 for eight (matrices of a 7B model, Zen 4)."""

# Products in bfloat16 and float16 on a CPU (`float32_blocks`).
DOT_PRODUCT_MAX_ROWS = 3
"""Most rows for torch's product with an output-first matrix on a CPU without instructions for the dtype; more rows are
multiplied in float32, block by block."""
IMITATED_MAX_ROWS = 8
"""The same for bfloat16 if oneDNN emulates its instructions by those of AVX-512."""

# Packed matrices on a CPU (`formats`). A kernel unpacks the matrix again for every few rows. For more rows than these
# it is faster to unpack the matrix once, and multiply it by torch.
FEW_BITS_FLOAT_MAX_ROWS = 16
"""Most rows for llamoe's 4-bit and 8-bit kernels with float rows."""
FEW_BITS_AMX_MAX_ROWS = 128
"""Most rows for llamoe's 4-bit and 8-bit kernels with rows quantized to bytes, if torch uses AMX; else all rows."""

# Experts (`moe`).
PEFT_ORDER_MAX_ROWS = 16
"""Most rows of all experts for which the CPU multiplies by LoRA factors in peft's layout; for more rows it first copies
them into the layout of the stacks."""

# Experts on a GPU (`packed_rows`).
TRITON_MAX_ROWS = 128
"""Most rows of all plain experts for the Triton kernels; for more rows torch's grouped product is faster, although the
host waits for it."""
TRITON_PREFERRED_MAX_ROWS = {9: 64, 10: 64}
"""The same by major compute capability. On these devices the host does not wait for torch's grouped product, which also
reads an expert once for more rows than a tile of the kernels has. Calculated, not measured."""
TRITON_UNSORTED_MAX_ROWS = 32
"""Most rows of all experts that the Triton kernels take unsorted, in one tile; for more rows it is cheaper to sort them
by expert first."""
TRITON_MAX_ROWS_A_MATRIX = {8: 1024, 9: 512, 10: 256, 12: 1024}
"""Most rows per matrix (for experts the average) that the Triton kernels multiply by packed weights, by major compute
capability; for more rows it is cheaper to unpack the matrix into memory once. Calculated, not measured; A100 and the
cards of 8.6 and 8.9, which have slower memory, share a number."""
