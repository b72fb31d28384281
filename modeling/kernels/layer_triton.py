"""Triton kernels of `gpu_layer`: what stands between the products of a layer, for few rows.

Numbers are float32 in registers, and rounded where torch's calls would round them.

Shapes: N rows, O outputs, I inputs, r rank, S splits of a sum, E experts, T rows of the tables, D head_dim.
"""

import triton
import triton.language as tl

from .packed_rows_triton import _round

# As in `packed_rows_triton`: one kernel serves all numbers of rows.
_COUNTS = ("num_experts", "num_positions")


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    """Write `x / sqrt(mean(x ** 2) + eps)`, rounded, times the weight. Grid: rows."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    begin = tl.program_id(0).to(tl.int64) * size
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + begin + place, mask=place < size, other=0.0).to(tl.float32)
        squares += x * x
    root = tl.sqrt(tl.sum(squares, axis=0) / size + eps)
    for first in tl.range(0, size, BLOCK):
        place = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + begin + place, mask=place < size, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + place, mask=place < size, other=0.0).to(tl.float32)
        y = _round(x / root, dtype).to(tl.float32) * weight
        tl.store(out_ptr + begin + place, _round(y, dtype), mask=place < size)


@triton.jit
def _expert_of(ids_ptr, row, num_experts, BY_ID: tl.constexpr):
    """The expert of a row, and whether it has one."""
    expert = tl.load(ids_ptr + row) if BY_ID else tl.zeros((), tl.int64)
    exists = (expert >= 0) & (expert < num_experts)
    return tl.where(exists, expert, 0).to(tl.int64), exists


@triton.jit(do_not_specialize=_COUNTS)
def thin_kernel(
    x_ptr,  # [N, I], contiguous
    first_ptr,  # [E, r, I]
    second_ptr,  # likewise, of the same strides
    third_ptr,  # likewise
    ids_ptr,  # [N]
    out_ptr,  # [N, all ranks], contiguous
    num_experts,
    num_in,
    stride_expert,
    stride_rank,
    stride_in,
    BY_ID: tl.constexpr,
    SECOND: tl.constexpr,  # where its ranks begin
    THIRD: tl.constexpr,  # likewise
    BLOCK: tl.constexpr,
):
    """Write `x A^T` for up to three factors, zeros for a row without an expert. Grid: rows, ranks."""
    row, rank = tl.program_id(0), tl.program_id(1)
    expert, exists = _expert_of(ids_ptr, row, num_experts, BY_ID)
    a_ptr = first_ptr + rank.to(tl.int64) * stride_rank
    if rank >= THIRD:
        a_ptr = third_ptr + (rank - THIRD).to(tl.int64) * stride_rank
    elif rank >= SECOND:
        a_ptr = second_ptr + (rank - SECOND).to(tl.int64) * stride_rank
    a_ptr += expert * stride_expert
    x_ptr += row.to(tl.int64) * num_in
    # Rows of no expert may hold anything.
    end = tl.where(exists, num_in, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.range(0, end, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + place, mask=place < num_in, other=0.0)
        a = tl.load(a_ptr + place * stride_in, mask=place < num_in, other=0.0)
        total += _round(x.to(tl.float32), a.dtype).to(tl.float32) * a.to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * tl.num_programs(1) + rank, tl.sum(total, axis=0))


@triton.jit
def _updated(
    parts_ptr,  # [S, N, O], with contiguous outputs
    stride_split,
    stride_row,
    thin_ptr,  # [N, r]
    stride_thin,
    b_ptr,  # [E, O, r]
    stride_expert,
    stride_out,
    stride_rank,
    scale,
    row,
    expert,
    columns,
    exists,
    dtype: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """The sum of the splits, rounded, and, if there is a rank, that with an adapter's update, rounded."""
    parts_ptr += row.to(tl.int64) * stride_row + columns
    total = tl.zeros(columns.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        part = tl.load(parts_ptr + tl.cast(split, tl.int64) * stride_split, mask=exists, other=0.0)
        total += part.to(tl.float32)
    y = _round(total, dtype).to(tl.float32)
    if RANK > 0:
        rank = tl.arange(0, RANKS)
        thin = tl.load(thin_ptr + row.to(tl.int64) * stride_thin + rank, mask=rank < RANK, other=0.0)
        b_ptrs = b_ptr + expert * stride_expert
        b_ptrs = b_ptrs + columns.to(tl.int64)[:, None] * stride_out + rank[None, :] * stride_rank
        b = tl.load(b_ptrs, mask=exists[:, None] & (rank < RANK)[None, :], other=0.0).to(tl.float32)
        update = tl.sum(b * thin[None, :], axis=1) * scale
        y = _round(y + update, dtype).to(tl.float32)
    return y


@triton.jit(do_not_specialize=_COUNTS)
def update_kernel(
    parts_ptr, stride_split, stride_row, thin_ptr, stride_thin, b_ptr, stride_expert, stride_out, stride_rank, scale,
    ids_ptr, out_ptr, num_experts, num_out,
    SPLITS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BY_ID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `_updated`, `[N, O]`. Grid: rows, tiles of outputs."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert, _ = _expert_of(ids_ptr, row, num_experts, BY_ID)
    y = _updated(
        parts_ptr, stride_split, stride_row, thin_ptr, stride_thin, b_ptr, stride_expert, stride_out, stride_rank,
        scale, row, expert, columns, columns < num_out, dtype, SPLITS, RANK, RANKS,
    )  # fmt: skip
    tl.store(out_ptr + row.to(tl.int64) * num_out + columns, _round(y, dtype), mask=columns < num_out)


@triton.jit(do_not_specialize=_COUNTS)
def gate_kernel(
    gate_ptr, gate_split, gate_row, gate_thin_ptr, gate_thin, gate_b_ptr, gate_expert, gate_out, gate_rank, gate_scale,
    up_ptr, up_split, up_row, up_thin_ptr, up_thin, up_b_ptr, up_expert, up_out, up_rank, up_scale,
    ids_ptr, out_ptr, num_experts, num_out,
    GATE_SPLITS: tl.constexpr, GATE_RANK: tl.constexpr, GATE_RANKS: tl.constexpr,
    UP_SPLITS: tl.constexpr, UP_RANK: tl.constexpr, UP_RANKS: tl.constexpr,
    BY_ID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `silu(gate) * up` of both, `[N, O]`. Grid: rows, tiles of outputs."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert, _ = _expert_of(ids_ptr, row, num_experts, BY_ID)
    exists = columns < num_out
    gate = _updated(
        gate_ptr, gate_split, gate_row, gate_thin_ptr, gate_thin, gate_b_ptr, gate_expert, gate_out, gate_rank,
        gate_scale, row, expert, columns, exists, dtype, GATE_SPLITS, GATE_RANK, GATE_RANKS,
    )  # fmt: skip
    up = _updated(
        up_ptr, up_split, up_row, up_thin_ptr, up_thin, up_b_ptr, up_expert, up_out, up_rank,
        up_scale, row, expert, columns, exists, dtype, UP_SPLITS, UP_RANK, UP_RANKS,
    )  # fmt: skip
    activated = _round(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * num_out + columns, _round(activated * up, dtype), mask=exists)


@triton.jit(do_not_specialize=_COUNTS)
def rotate_kernel(
    query_ptr,  # [N, heads, D], contiguous
    key_ptr,  # likewise
    cos_ptr,  # [T, …]
    sin_ptr,  # likewise
    positions_ptr,  # [T]
    out_ptr,  # [N, heads of both, D], contiguous
    num_positions,  # T
    stride_table,
    stride_angle,
    eps,
    floor_scale,
    attn_scale,
    HEADS: tl.constexpr,  # of queries
    HALF: tl.constexpr,
    ROTATES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMALIZES: tl.constexpr,
    TUNES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write queries and keys behind rotation, norm and temperature, as far as a layer has them. Grid: rows, heads."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1)
    if head < HEADS:
        x_ptr = query_ptr + (row * HEADS + head) * (2 * HALF)
    else:
        x_ptr = key_ptr + (row * (num_heads - HEADS) + head - HEADS) * (2 * HALF)
    pair = tl.arange(0, BLOCK)
    exists = pair < HALF
    first_place = pair * 2 if INTERLEAVED else pair
    second_place = first_place + 1 if INTERLEAVED else pair + HALF
    first = tl.load(x_ptr + first_place, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + second_place, mask=exists, other=0.0).to(tl.float32)
    position = row % num_positions
    if ROTATES:
        angle = position * stride_table + pair * stride_angle
        cos = tl.load(cos_ptr + angle, mask=exists, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=exists, other=0.0)
        turned = first * cos - second * sin
        second = _round(second * cos + first * sin, dtype).to(tl.float32)
        first = _round(turned, dtype).to(tl.float32)
    if NORMALIZES:
        squares = tl.sum(first * first + second * second, axis=0)
        root = tl.sqrt(squares / (2 * HALF) + eps)
        first = _round(first / root, dtype).to(tl.float32)
        second = _round(second / root, dtype).to(tl.float32)
    if TUNES:
        # A quotient that is not rounded may fall below the whole number that it is.
        steps = tl.floor(tl.div_rn(tl.load(positions_ptr + position).to(tl.float32) + 1.0, floor_scale))
        factor = tl.log(1.0 + tl.maximum(steps, 0.0)) * attn_scale + 1.0
        factor = tl.where(head < HEADS, factor, 1.0)
        first = first * factor
        second = second * factor
    out_ptr += (row * num_heads + head) * (2 * HALF)
    tl.store(out_ptr + first_place, _round(first, dtype), mask=exists)
    tl.store(out_ptr + second_place, _round(second, dtype), mask=exists)
