"""Triton kernels of `few_rows`: the experts' two products, reading each hit expert's weights once.

Nothing is sorted. A program gets a range of columns and a slot. It loads all expert ids, takes the slot-th distinct
one, gathers that expert's rows into one tile and streams the expert's weights past it, once. Only the device knows
which experts are hit; grid and launches depend on shapes alone.

Shapes: N rows, E experts, H hidden size, I intermediate size, S splits; R is N rounded up to a power of two.
"""

import triton
import triton.language as tl
from triton import knobs

# The interpreter keeps bfloat16 as integers: it multiplies those integers, and truncates when converting to bfloat16.
_INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)

# Triton must not specialise these arguments for 1 and for multiples of 16: one kernel then serves all numbers of rows
# that share its constants, so a check of one of them holds for all.
_COUNTS = ("num_rows", "num_experts", "num_elements")


@triton.jit
def _dot(a, b, total):
    """Add a product in float32, without TF32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _round(x, dtype: tl.constexpr):
    """A float32 rounded to another dtype: to nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _hit_experts(ids_ptr, stride_ids, num_rows, num_experts, R: tl.constexpr):
    """Load the ids, and number the hit experts in the order of their first rows.

    Returns:
        the ids `[R]`, invalid ones set to `num_experts`; `[R]`, for the first row of each expert its number, else -1;
        the number of hit experts.
    """
    rows = tl.arange(0, R)
    ids = tl.load(ids_ptr + rows * stride_ids, mask=rows < num_rows, other=num_experts)
    ids = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)
    earlier = (ids[:, None] == ids[None, :]) & (rows[None, :] < rows[:, None])
    first = (ids < num_experts) & (tl.sum(earlier.to(tl.int32), axis=1) == 0)
    number = tl.cumsum(first.to(tl.int32), axis=0) - 1
    return ids, tl.where(first, number, -1), tl.sum(first.to(tl.int32), axis=0)


@triton.jit
def _expert_of(slot, ids, number):
    """The slot-th hit expert, and its number of rows."""
    expert = tl.sum(tl.where(number == slot, ids, 0), axis=0)
    return expert, tl.sum((ids == expert).to(tl.int32), axis=0)


@triton.jit
def _rows_of(expert, ids, start, R: tl.constexpr, BLOCK_M: tl.constexpr):
    """Indices `[BLOCK_M]` of an expert's rows from its `start`-th on, and whether each row exists."""
    mine = ids == expert
    place = tl.cumsum(mine.to(tl.int32), axis=0) - 1
    wanted = start + tl.arange(0, BLOCK_M)
    # [BLOCK_M, R]
    found = mine[None, :] & (place[None, :] == wanted[:, None])
    rows = tl.sum(tl.where(found, tl.arange(0, R)[None, :], 0), axis=1)
    return rows, wanted < tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def _gate_up_tile(
    x_ptr,
    weight_ptr,  # of the expert
    hidden_ptr,
    rows,
    row_exists,
    column_block,
    hidden_size,
    intermediate_size,
    stride_xn,
    stride_xh,
    stride_wh,
    stride_wf,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    column_exists = columns < intermediate_size
    deep = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * stride_xn + deep[None, :] * stride_xh
    gate_ptrs = (
        weight_ptr + deep[:, None].to(tl.int64) * stride_wh + columns[None, :].to(tl.int64) * stride_wf
    )
    up_ptrs = gate_ptrs + tl.cast(intermediate_size, tl.int64) * stride_wf
    gate = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    up = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for begin in tl.range(0, hidden_size, DEPTH, num_stages=STAGES):
        exists = deep < hidden_size - begin
        x = tl.load(x_ptrs, mask=row_exists[:, None] & exists[None, :], other=0.0)
        weight_mask = exists[:, None] & column_exists[None, :]
        gate_weight = tl.load(gate_ptrs, mask=weight_mask, other=0.0)
        up_weight = tl.load(up_ptrs, mask=weight_mask, other=0.0)
        gate = _dot(x, gate_weight, gate)
        up = _dot(x, up_weight, up)
        x_ptrs += DEPTH * stride_xh
        gate_ptrs += DEPTH * tl.cast(stride_wh, tl.int64)
        up_ptrs += DEPTH * tl.cast(stride_wh, tl.int64)
    # Rounded where PyTorch's separate operations round.
    dtype = hidden_ptr.dtype.element_ty
    gate = _round(gate, dtype).to(tl.float32)
    activated = _round(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    hidden = _round(activated * _round(up, dtype).to(tl.float32), dtype)
    hidden_ptrs = hidden_ptr + rows[:, None].to(tl.int64) * intermediate_size + columns[None, :]
    tl.store(hidden_ptrs, hidden, mask=row_exists[:, None] & column_exists[None, :])


@triton.jit(do_not_specialize=_COUNTS)
def gate_up_kernel(
    x_ptr,  # [N, H]
    weight_ptr,  # [E, H, 2 I]
    ids_ptr,  # [N]
    hidden_ptr,  # [N, I], contiguous
    num_rows,
    num_experts,
    hidden_size,
    intermediate_size,
    stride_xn,
    stride_xh,
    stride_we,
    stride_wh,
    stride_wf,
    stride_ids,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SMALL_M: tl.constexpr,
    SMALL_STAGES: tl.constexpr,
    LARGE_M: tl.constexpr,
    LARGE_STAGES: tl.constexpr,
):
    """Write silu(x gate) * (x up); rows without an expert stay unwritten. Grid: column blocks, slots."""
    column_block = tl.program_id(0)
    ids, number, num_hit = _hit_experts(ids_ptr, stride_ids, num_rows, num_experts, R)
    for slot in range(tl.program_id(1), num_hit, tl.num_programs(1)):
        expert, count = _expert_of(slot, ids, number)
        expert_ptr = weight_ptr + expert.to(tl.int64) * stride_we
        if count <= SMALL_M:
            rows, row_exists = _rows_of(expert, ids, 0, R, SMALL_M)
            _gate_up_tile(
                x_ptr,
                expert_ptr,
                hidden_ptr,
                rows,
                row_exists,
                column_block,
                hidden_size,
                intermediate_size,
                stride_xn,
                stride_xh,
                stride_wh,
                stride_wf,
                SMALL_M,
                COLUMNS,
                DEPTH,
                SMALL_STAGES,
            )
        elif LARGE_M > SMALL_M:
            for start in range(0, count, LARGE_M):
                rows, row_exists = _rows_of(expert, ids, start, R, LARGE_M)
                _gate_up_tile(
                    x_ptr,
                    expert_ptr,
                    hidden_ptr,
                    rows,
                    row_exists,
                    column_block,
                    hidden_size,
                    intermediate_size,
                    stride_xn,
                    stride_xh,
                    stride_wh,
                    stride_wf,
                    LARGE_M,
                    COLUMNS,
                    DEPTH,
                    LARGE_STAGES,
                )


@triton.jit
def _down_tile(
    hidden_ptr,
    weight_ptr,  # of the expert
    out_ptr,  # of the split
    rows,
    row_exists,
    columns,
    begin,
    end,
    hidden_size,
    intermediate_size,
    stride_wi,
    stride_wh,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    column_exists = columns < hidden_size
    deep = begin + tl.arange(0, DEPTH)
    hidden_ptrs = hidden_ptr + rows[:, None].to(tl.int64) * intermediate_size + deep[None, :]
    weight_ptrs = (
        weight_ptr + deep[:, None].to(tl.int64) * stride_wi + columns[None, :].to(tl.int64) * stride_wh
    )
    out = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for position in tl.range(begin, end, DEPTH, num_stages=STAGES):
        exists = tl.arange(0, DEPTH) < end - position
        hidden = tl.load(hidden_ptrs, mask=row_exists[:, None] & exists[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=exists[:, None] & column_exists[None, :], other=0.0)
        out = _dot(hidden, weight, out)
        hidden_ptrs += DEPTH
        weight_ptrs += DEPTH * tl.cast(stride_wi, tl.int64)
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * hidden_size + columns[None, :]
    mask = row_exists[:, None] & column_exists[None, :]
    tl.store(out_ptrs, _round(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def down_kernel(
    hidden_ptr,  # [N, I], contiguous
    weight_ptr,  # [E, I, H]
    ids_ptr,  # [N]
    out_ptr,  # [S, N, H], contiguous
    num_rows,
    num_experts,
    hidden_size,
    intermediate_size,
    split_size,
    stride_we,
    stride_wi,
    stride_wh,
    stride_ids,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SMALL_M: tl.constexpr,
    SMALL_STAGES: tl.constexpr,
    LARGE_M: tl.constexpr,
    LARGE_STAGES: tl.constexpr,
):
    """Write hidden @ down, or a split's part of it; zeros for rows without an expert. Grid: column blocks, slots, S."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    begin = split * split_size
    end = tl.minimum(begin + split_size, intermediate_size)
    out_ptr += split.to(tl.int64) * num_rows * hidden_size
    ids, number, num_hit = _hit_experts(ids_ptr, stride_ids, num_rows, num_experts, R)
    if tl.program_id(1) == 0:
        rows = tl.arange(0, R)
        passed_over = (rows < num_rows) & (ids == num_experts)
        out_ptrs = out_ptr + rows[:, None].to(tl.int64) * hidden_size + columns[None, :]
        zeros = tl.zeros((R, COLUMNS), out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zeros, mask=passed_over[:, None] & (columns < hidden_size)[None, :])
    for slot in range(tl.program_id(1), num_hit, tl.num_programs(1)):
        expert, count = _expert_of(slot, ids, number)
        expert_ptr = weight_ptr + expert.to(tl.int64) * stride_we
        if count <= SMALL_M:
            rows, row_exists = _rows_of(expert, ids, 0, R, SMALL_M)
            _down_tile(
                hidden_ptr,
                expert_ptr,
                out_ptr,
                rows,
                row_exists,
                columns,
                begin,
                end,
                hidden_size,
                intermediate_size,
                stride_wi,
                stride_wh,
                SMALL_M,
                COLUMNS,
                DEPTH,
                SMALL_STAGES,
            )
        elif LARGE_M > SMALL_M:
            for start in range(0, count, LARGE_M):
                rows, row_exists = _rows_of(expert, ids, start, R, LARGE_M)
                _down_tile(
                    hidden_ptr,
                    expert_ptr,
                    out_ptr,
                    rows,
                    row_exists,
                    columns,
                    begin,
                    end,
                    hidden_size,
                    intermediate_size,
                    stride_wi,
                    stride_wh,
                    LARGE_M,
                    COLUMNS,
                    DEPTH,
                    LARGE_STAGES,
                )


@triton.jit(do_not_specialize=_COUNTS)
def sum_splits_kernel(parts_ptr, out_ptr, num_elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the splits `[S, N H]` in their order, and round once."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * num_elements + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, _round(total, out_ptr.dtype.element_ty), mask=mask)
