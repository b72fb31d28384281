"""Triton kernels of `packed_rows`: rows times each expert's matrix, whose codes are unpacked in registers.

One program computes a tile of rows and outputs of one expert; it finds out on the device which expert and rows these
are. A byte of int4 holds the weights of one input for two outputs. So a tile of bytes is two tiles of weights: for two
sums in `x W^T`, or for two terms of one sum in `x W`, the product for gradients.

Weights are rounded to the rows' dtype, as if the matrix were unpacked first, and sums are in float32.

Shapes: N rows, E experts, O outputs, I inputs, C terms of a sum (I, or O if transposed), S splits of the sum.
"""

import triton
import triton.language as tl
from triton import knobs

# Triton's interpreter stores bfloat16 as integers, which `tl.dot` would multiply, and truncates in casts to bfloat16.
_INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)

# How rows are assigned to matrices (`by` in `packed_rows`).
ONE, ENDS, IDS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Triton must not compile other kernels if these arguments are 1 or multiples of 16: then a check of a kernel for one
# number of rows holds for all that have the same constants.
_COUNTS = ("num_rows", "num_experts", "num_elements")


@triton.jit
def _dot(a, b, total):
    """Return total + a b in float32, without TF32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _round(x, dtype: tl.constexpr):
    """Round a float32 to another dtype: to nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _rows_of_program(
    groups_ptr, num_rows, num_experts, BY: tl.constexpr, M: tl.constexpr, GROUPS: tl.constexpr
):
    """Return the number of a program's expert, its rows `[M]`, and a mask that is true for rows that exist.

    Rows without an expert have the number E; programs without rows have a number above E.
    """
    program = tl.program_id(0)
    if BY == ONE:
        rows = program * M + tl.arange(0, M)
        return tl.zeros((), tl.int32), rows, rows < num_rows
    elif BY == IDS:
        # There is a program for each row. The one of an expert's first row computes all rows of this expert.
        rows = tl.arange(0, M)
        ids = tl.load(groups_ptr + rows, mask=rows < num_rows, other=0)
        ids = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)
        expert = tl.sum(tl.where(rows == program, ids, 0), axis=0)
        exists = (ids == expert) & (rows < num_rows)
        first = tl.min(tl.where(exists, rows, M), axis=0)
        return tl.where(first == program, expert, num_experts + 1), rows, exists
    else:
        # Rows after the last expert's end have no expert: they are the group with number E.
        group = tl.arange(0, GROUPS)
        ends = tl.load(groups_ptr + group, mask=group < num_experts, other=num_rows)
        starts = tl.load(groups_ptr + group - 1, mask=(group > 0) & (group <= num_experts), other=num_rows)
        starts = tl.where(group == 0, 0, starts)
        tiles = (ends - starts + M - 1) // M
        tiles_before = tl.cumsum(tiles, axis=0) - tiles
        expert = tl.sum((tiles_before + tiles <= program).to(tl.int32), axis=0)
        is_expert = group == expert
        begin = tl.sum(tl.where(is_expert, starts - tiles_before * M, 0), axis=0) + program * M
        rows = begin + tl.arange(0, M)
        return expert, rows, rows < tl.sum(tl.where(is_expert, ends, 0), axis=0)


@triton.jit
def _store(out_ptr, rows, row_exists, columns, exists, num_columns, values):
    ptrs = out_ptr + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    values = _round(values, out_ptr.dtype.element_ty)
    tl.store(ptrs, values, mask=row_exists[:, None] & exists[None, :])


@triton.jit
def _int4_weights(shifted, words, dtype: tl.constexpr):
    """Return `(code - 8) * scale + offset`; `shifted` is 128 + code, a word has scale and offset in bfloat16."""
    scale = (words << 16).to(tl.float32, bitcast=True)
    offset = (words & -65536).to(tl.float32, bitcast=True) - 136.0 * scale
    return _round(shifted * scale + offset, dtype)


@triton.jit
def _shifted(codes, bits):
    """Return 128 + code in float32. The code becomes bits of the number, which is cheaper than a conversion.

    `bits` are those of 128.0.
    """
    return ((codes.to(tl.int32) << 16) | bits).to(tl.float32, bitcast=True)


@triton.jit
def _int4(
    x_ptrs,
    codes_ptr,
    words_ptr,
    row_exists,
    column_block,
    first,
    last,
    num_out,
    num_in,
    padded_in,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    REST: tl.constexpr,  # outputs in the last block if it is not full
):
    """Return a tile of the product with an int4 matrix: sums of the outputs in low and in high bits of the bytes.

    Both are `[M, COLUMNS / 2]`. Then come the numbers of these outputs, and a mask that is true for outputs that exist.
    """
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    column = tl.arange(0, COLUMNS // 2)
    block = column_block * (COLUMNS // 64) + column // 32
    byte = column % 32
    output, beside = block * 64 + byte, 32
    pitch = tl.full((COLUMNS // 2,), 32, tl.int32)
    exists = output < num_out
    if REST > 0:
        is_rest = block == num_out // 64
        output = tl.where(is_rest, block * 64 + 2 * byte, output)
        beside = tl.where(is_rest, 1, 32)
        pitch = tl.where(is_rest, REST // 2, 32)
        exists = output < num_out
    deep = tl.arange(0, DEPTH)
    codes_ptrs = (
        codes_ptr
        + block.to(tl.int64)[None, :] * (padded_in * 32)
        + byte[None, :]
        + (first + deep)[:, None] * pitch[None, :]
    )
    words_ptr += tl.cast(first // GROUP, tl.int64) * num_out
    low = tl.zeros((M, COLUMNS // 2), tl.float32)
    high = tl.zeros((M, COLUMNS // 2), tl.float32)
    for begin in tl.range(first, last, DEPTH, num_stages=STAGES):
        # Only if `bits` is no constant does Triton put the weights into shared memory, where all warps use them.
        # Otherwise each warp would unpack all weights.
        bits = tl.where(begin >= 0, 0x43000000, 0)
        # Codes are padded to whole groups of inputs, so only `x` needs a mask for the last inputs.
        x = tl.load(x_ptrs, mask=row_exists[:, None] & (deep < num_in - begin)[None, :], other=0.0)
        codes = tl.load(codes_ptrs, mask=exists[None, :], other=0)
        # All inputs of an iteration are in one group.
        words = words_ptr + tl.cast(begin // GROUP - first // GROUP, tl.int64) * num_out + output
        words_low = tl.load(words, mask=exists, other=0)
        words_high = tl.load(words + beside, mask=exists, other=0)
        low = _dot(x, _int4_weights(_shifted(codes & 15, bits), words_low[None, :], dtype), low)
        high = _dot(x, _int4_weights(_shifted(codes >> 4, bits), words_high[None, :], dtype), high)
        x_ptrs += DEPTH
        codes_ptrs += DEPTH * pitch[None, :]
    return low, high, output, output + beside, exists


@triton.jit
def _int4_transposed(
    x_ptr,
    rows,
    codes_ptr,
    words_ptr,
    row_exists,
    column_block,
    first,
    last,
    num_out,
    num_in,
    padded_in,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    REST: tl.constexpr,
):
    """Return a tile of the transposed product with an int4 matrix, a sum over blocks of 64 outputs: `[M, COLUMNS]`.

    Then come the numbers of the inputs, which are the columns, and a mask that is true for inputs that exist.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # All inputs of a tile are in one group.
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < num_in
    byte = tl.arange(0, 32)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * num_out
    words_ptr += tl.cast(column_block * COLUMNS // GROUP, tl.int64) * num_out
    total = tl.zeros((M, COLUMNS), tl.float32)
    for begin in tl.range(first, last, 64, num_stages=STAGES):
        bits = tl.where(begin >= 0, 0x43000000, 0)
        output, pitch, beside, has_output = begin + byte, 32, 32, begin + byte < num_out
        if REST > 0:
            is_rest = begin == num_out - REST
            output = tl.where(is_rest, begin + 2 * byte, output)
            beside = tl.where(is_rest, 1, 32)
            pitch = tl.where(is_rest, REST // 2, 32)
            has_output = output < num_out
        codes_ptrs = codes_ptr + tl.cast(begin // 64, tl.int64) * (padded_in * 32)
        codes_ptrs = codes_ptrs + byte[:, None] + columns[None, :] * pitch
        codes = tl.load(codes_ptrs, mask=has_output[:, None] & exists[None, :], other=0)
        x_mask = row_exists[:, None] & has_output[None, :]
        x_low = tl.load(x_ptrs + output[None, :], mask=x_mask, other=0.0)
        x_high = tl.load(x_ptrs + (output + beside)[None, :], mask=x_mask, other=0.0)
        words_low = tl.load(words_ptr + output, mask=has_output, other=0)
        words_high = tl.load(words_ptr + output + beside, mask=has_output, other=0)
        total = _dot(x_low, _int4_weights(_shifted(codes & 15, bits), words_low[:, None], dtype), total)
        total = _dot(x_high, _int4_weights(_shifted(codes >> 4, bits), words_high[:, None], dtype), total)
    return total, columns, exists


@triton.jit
def _dense(
    x_ptrs,
    weight_ptr,
    scales_ptr,  # one scale for each output
    row_exists,
    column_block,
    first,
    last,
    num_terms,
    num_columns,
    stride_term,
    stride_column,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Return a tile of the product with a dense matrix of any strides, `[M, COLUMNS]`.

    Then come the numbers of the columns, and a mask that is true for columns that exist.
    """
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < num_columns
    deep = tl.arange(0, DEPTH)
    weight_ptrs = (
        weight_ptr
        + (first + deep)[:, None].to(tl.int64) * stride_term
        + columns[None, :].to(tl.int64) * stride_column
    )
    total = tl.zeros((M, COLUMNS), tl.float32)
    for begin in tl.range(first, last, DEPTH, num_stages=STAGES):
        has_term = deep < num_terms - begin
        x = tl.load(x_ptrs, mask=row_exists[:, None] & has_term[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=has_term[:, None] & exists[None, :], other=0)
        if SCALED and TRANSPOSED:
            scale = tl.load(scales_ptr + begin + deep, mask=has_term, other=0.0).to(tl.float32)
            weight = _round(weight.to(tl.float32) * scale[:, None], dtype)
        elif SCALED:
            # Codes are whole numbers up to 128, which all dtypes can hold.
            weight = weight.to(tl.float32).to(dtype)
        total = _dot(x, weight, total)
        x_ptrs += DEPTH
        weight_ptrs += DEPTH * tl.cast(stride_term, tl.int64)
    if SCALED and not TRANSPOSED:
        scale = tl.load(scales_ptr + columns, mask=exists, other=0.0).to(tl.float32)
        total = total * scale[None, :]
    return total, columns, exists


@triton.jit(do_not_specialize=_COUNTS)
def product_kernel(
    x_ptr,  # [N, C], contiguous
    codes_ptr,
    scales_ptr,
    groups_ptr,
    out_ptr,  # [S, N, columns], contiguous
    num_rows,
    num_experts,
    num_out,
    num_in,
    padded_in,  # used for int4 only
    split_size,
    stride_expert,  # the strides are used for dense matrices only
    stride_out,
    stride_in,
    IS_INT4: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BY: tl.constexpr,
    GROUPS: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    REST: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Write a tile of the product, or of a split of its sums; rows without an expert are zero.

    The grid is: tiles of rows, tiles of columns, splits.
    """
    expert, rows, row_exists = _rows_of_program(groups_ptr, num_rows, num_experts, BY, M, GROUPS)
    column_block = tl.program_id(1)
    split = tl.program_id(2)
    num_terms = num_out if TRANSPOSED else num_in
    num_columns = num_in if TRANSPOSED else num_out
    first = split * split_size
    last = tl.minimum(first + split_size, num_terms)
    out_ptr += split.to(tl.int64) * num_rows * num_columns
    if expert < num_experts:
        far = expert.to(tl.int64)
        x_ptrs = x_ptr + rows[:, None].to(tl.int64) * num_terms + first + tl.arange(0, DEPTH)[None, :]
        if IS_INT4:
            codes_ptr += far * num_out * (padded_in // 2)
            scales_ptr += far * num_out * (padded_in // GROUP)
            if TRANSPOSED:
                sums, columns, exists = _int4_transposed(
                    x_ptr, rows, codes_ptr, scales_ptr, row_exists, column_block, first, last, num_out, num_in,
                    padded_in, M, COLUMNS, STAGES, GROUP, REST,
                )  # fmt: skip
                _store(out_ptr, rows, row_exists, columns, exists, num_columns, sums)
            else:
                sums, more, columns, more_columns, exists = _int4(
                    x_ptrs, codes_ptr, scales_ptr, row_exists, column_block, first, last, num_out, num_in,
                    padded_in, M, COLUMNS, DEPTH, STAGES, GROUP, REST,
                )  # fmt: skip
                _store(out_ptr, rows, row_exists, columns, exists, num_columns, sums)
                _store(out_ptr, rows, row_exists, more_columns, exists, num_columns, more)
        else:
            codes_ptr += far * stride_expert
            if SCALED:
                scales_ptr += far * num_out
            sums, columns, exists = _dense(
                x_ptrs, codes_ptr, scales_ptr, row_exists, column_block, first, last, num_terms, num_columns,
                stride_out if TRANSPOSED else stride_in, stride_in if TRANSPOSED else stride_out,
                M, COLUMNS, DEPTH, STAGES, TRANSPOSED, SCALED,
            )  # fmt: skip
            _store(out_ptr, rows, row_exists, columns, exists, num_columns, sums)
    elif expert == num_experts:
        columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
        zeros = tl.zeros((M, COLUMNS), tl.float32)
        _store(out_ptr, rows, row_exists, columns, columns < num_columns, num_columns, zeros)


@triton.jit(do_not_specialize=_COUNTS)
def sum_splits_kernel(parts_ptr, out_ptr, num_elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the splits `[S, elements]` in order, and round the sum once."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * num_elements + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, _round(total, out_ptr.dtype.element_ty), mask=mask)
