"""The experts' SwiGLU for few rows on a GPU: each hit expert is read once, and the host never asks which are hit.

Decoding is bound by reading weights. Gathering a copy of the weights for each row reads and writes them again, and a
loop over the hit experts must first ask the device for them. These kernels find the hit experts on the device.
Launches and grids depend on shapes only, so that a CUDA graph may hold them. An expert with more than 32 rows is read
once for every 32 of them.

Shapes: N rows, E experts, H hidden size, I intermediate size, F = 2 I, gate in its first half; S splits.
"""

import contextlib
import importlib.util
import os
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .limits import TRITON_MAX_ROWS, TRITON_PREFERRED_MAX_ROWS

_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton reads this variable when it is imported; its interpreter runs kernels in Python, on the CPU too.
_INTERPRETED = _HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# Rows of a tile for an expert with at most that many rows, which is nearly every expert: the size of one matrix
# instruction. All totals of rows up to this number share one compiled kernel.
_SMALL_M = 16
# Rows of a tile for an expert with more rows; beyond this its weights are read once for each tile. Sums of 64 rows
# would not fit into registers: with four warps they spill on all cards, with eight still on those of capability 12.0.
_LARGE_M = 32
# The loop that sums the splits is unrolled.
_MAX_SPLITS = 16
# The beginning of the load pipeline is unrolled.
_MAX_STAGES = 8


class Tile(NamedTuple):
    """How one of the two products is tiled."""

    columns: int
    """Output columns of a program; in the first product as many of gate and of up."""
    depth: int
    """Inner extent of the blocks that are loaded at once."""
    warps: int
    """For up to `_SMALL_M` rows; twice as many for more (`warps_of`)."""


class Plan(NamedTuple):
    """How both products are tiled, for one element size."""

    gate_up: Tile
    down: Tile
    shared_bytes: int
    """Shared memory that a program's pipeline may use; it decides the number of stages."""
    programs: int
    """About how many programs a launch should have. Above it, one program takes several experts."""
    concurrent: int
    """Up to how many programs the second product is split along its inner extent."""


# Estimated for an H200 (132 multiprocessors, each with 228 KB of shared memory and room for two programs). Rows of a
# block are 128 bytes, and a program has about 90 KB in flight: one program per multiprocessor should then hide the
# memory's latency, and the last programs of a launch leave no gap.
PLANS = {
    2: Plan(Tile(64, 64, 4), Tile(64, 128, 4), shared_bytes=110 * 1024, programs=2048, concurrent=264),
    4: Plan(Tile(32, 32, 4), Tile(32, 64, 4), shared_bytes=110 * 1024, programs=2048, concurrent=264),
}


def few_rows_fits(
    num_rows: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    device: torch.device,
    hidden_act: str,
) -> bool:
    """Whether `few_rows_experts` runs as kernels here. They have no gradient, which the caller must check.

    Args:
        num_rows: N, of all experts together.
        dtype: of rows and weights alike.
        hidden_act: transformers' name of the activation.
    """
    if not _HAS_TRITON or num_rows > TRITON_MAX_ROWS or min(hidden_size, intermediate_size) < 1:
        return False
    if dtype not in (torch.bfloat16, torch.float16, torch.float32) or hidden_act not in ("silu", "swish"):
        return False
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and _INTERPRETED


def few_rows_limit(device: torch.device) -> int:
    """Up to how many rows, of all experts together, the kernels are preferred to torch's products on a device."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    return TRITON_PREFERRED_MAX_ROWS.get(major, TRITON_MAX_ROWS)


# An opaque operator, not a `triton_op`: the same code then runs inside and outside of a graph, on every torch release.
# Inductor could fuse nothing into these kernels, and a CUDA graph can hold an opaque operator too. The operator's
# arguments keep their layout, so the weights' strides reach the kernels unchanged.
@torch.library.custom_op("llamoe::few_rows_experts", mutates_args=())
def few_rows_experts(
    x_NH: torch.Tensor, gate_up_EHF: torch.Tensor, down_EIH: torch.Tensor, expert_ids_N: torch.Tensor
) -> torch.Tensor:
    """Send each row through its expert: `(silu(x gate) * (x up)) down`.

    Runs kernels where `few_rows_fits`, the plain version elsewhere. Sums are float32, and float32 is never rounded to
    TF32. Rounding happens at the same places as in the plain version: results differ by the order of sums alone.

    Args:
        x_NH: `[N, H]`.
        gate_up_EHF: `[E, H, F]` in the dtype of `x_NH`, with any strides; a last stride of 1 is fast.
        down_EIH: `[E, I, H]`, likewise.
        expert_ids_N: `[N]` integers; rows with an id outside of `0 … E - 1` are skipped.

    Returns:
        `[N, H]`; skipped rows are zero.

    Raises:
        RuntimeError: a gradient of the result is requested.
    """
    num_experts, hidden_size, intermediate_size = *gate_up_EHF.shape[:2], down_EIH.shape[1]
    assert x_NH.ndim == 2, x_NH.shape
    assert expert_ids_N.shape == x_NH.shape[:1], (x_NH.shape, expert_ids_N.shape)
    assert gate_up_EHF.shape == (num_experts, x_NH.shape[1], 2 * intermediate_size), gate_up_EHF.shape
    assert down_EIH.shape == (num_experts, intermediate_size, hidden_size), down_EIH.shape
    assert x_NH.dtype == gate_up_EHF.dtype == down_EIH.dtype, (x_NH.dtype, gate_up_EHF.dtype, down_EIH.dtype)
    if few_rows_fits(len(x_NH), hidden_size, intermediate_size, x_NH.dtype, x_NH.device, "silu"):
        return run_kernels(x_NH, gate_up_EHF, down_EIH, expert_ids_N, PLANS[x_NH.element_size()])
    return few_rows_experts_reference(x_NH, gate_up_EHF, down_EIH, expert_ids_N)


@few_rows_experts.register_fake
def _(x_NH, gate_up_EHF, down_EIH, expert_ids_N):
    return x_NH.new_empty(x_NH.shape)


def few_rows_experts_reference(
    x_NH: torch.Tensor, gate_up_EHF: torch.Tensor, down_EIH: torch.Tensor, expert_ids_N: torch.Tensor
) -> torch.Tensor:
    """`few_rows_experts` in PyTorch's own operations, in a loop on the host."""
    out_NH = x_NH.new_zeros(x_NH.shape)
    for expert in expert_ids_N.unique().tolist():
        if 0 <= expert < len(down_EIH):
            rows = (expert_ids_N == expert).nonzero().squeeze(1)
            gate, up = (x_NH[rows] @ gate_up_EHF[expert]).chunk(2, dim=-1)
            out_NH[rows] = (F.silu(gate) * up) @ down_EIH[expert]
    return out_NH


def run_kernels(
    x_NH: torch.Tensor,
    gate_up_EHF: torch.Tensor,
    down_EIH: torch.Tensor,
    expert_ids_N: torch.Tensor,
    plan: Plan,
) -> torch.Tensor:
    """Launch the kernels, tiled by a plan; `few_rows_experts` picks the plan."""
    # Imported late: importing Triton takes long, and it is not installed everywhere.
    from . import few_rows_triton as kernels

    (num_rows, hidden_size), (num_experts, intermediate_size) = x_NH.shape, down_EIH.shape[:2]
    if num_rows == 0:
        return x_NH.new_empty(x_NH.shape)
    hidden_NI = x_NH.new_empty(num_rows, intermediate_size)
    slots = min(num_rows, num_experts)
    element_size, shared_bytes = x_NH.element_size(), min(plan.shared_bytes, _shared_memory(x_NH.device))
    on_device = torch.cuda.device(x_NH.device) if x_NH.is_cuda else contextlib.nullcontext()
    with on_device:
        blocks = _ceil_div(intermediate_size, plan.gate_up.columns)
        kernels.gate_up_kernel[blocks, min(slots, _ceil_div(plan.programs, blocks))](
            x_NH,
            gate_up_EHF,
            expert_ids_N,
            hidden_NI,
            num_rows,
            num_experts,
            hidden_size,
            intermediate_size,
            *x_NH.stride(),
            *gate_up_EHF.stride(),
            *expert_ids_N.stride(),
            **constants(plan.gate_up, 2, num_rows, element_size, shared_bytes),
            num_warps=warps_of(plan.gate_up, num_rows),
            enable_fp_fusion=True,
        )
        blocks = _ceil_div(hidden_size, plan.down.columns)
        split_size = _split_size(slots, hidden_size, intermediate_size, plan)
        splits = _ceil_div(intermediate_size, split_size)
        out_NH = x_NH.new_empty(num_rows, hidden_size)
        parts_SNH = out_NH
        if splits > 1:
            parts_SNH = x_NH.new_empty(splits, num_rows, hidden_size, dtype=torch.float32)
        kernels.down_kernel[blocks, min(slots, _ceil_div(plan.programs, blocks)), splits](
            hidden_NI,
            down_EIH,
            expert_ids_N,
            parts_SNH,
            num_rows,
            num_experts,
            hidden_size,
            intermediate_size,
            split_size,
            *down_EIH.stride(),
            *expert_ids_N.stride(),
            **constants(plan.down, 1, num_rows, element_size, shared_bytes),
            num_warps=warps_of(plan.down, num_rows),
            enable_fp_fusion=True,
        )
        if splits > 1:
            sum_splits(parts_SNH, out_NH)
    return out_NH


def sum_splits(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of `[S, …]` parts, in float32, into `out`; both are contiguous, on the current device."""
    from . import few_rows_triton as kernels

    kernels.sum_splits_kernel[(_ceil_div(out.numel(), 512),)](
        parts, out, out.numel(), SPLITS=len(parts), BLOCK=512, num_warps=4, enable_fp_fusion=True
    )


def constants(
    tile: Tile, matrices: int, num_rows: int, element_size: int, shared_bytes: int
) -> dict[str, int]:
    """Compile-time constants of the kernels.

    Args:
        matrices: number of weights that a program streams side by side.
        element_size: bytes.
        shared_bytes: shared memory for the blocks in flight.
    """
    padded_rows = _padded(num_rows)
    small_m, large_m = _SMALL_M, min(_LARGE_M, padded_rows)
    blocks = [
        shared_bytes // (element_size * tile.depth * (m + matrices * tile.columns))
        for m in (small_m, large_m)
    ]
    return dict(
        R=padded_rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SMALL_M=small_m,
        # One stage more than blocks: the last one computes. Instructions for large tiles read a block while the
        # next one arrives in its place, and so need one stage more.
        SMALL_STAGES=max(2, min(_MAX_STAGES, blocks[0] + 1)),
        LARGE_M=large_m,
        LARGE_STAGES=max(2, min(_MAX_STAGES, blocks[1])),
    )


def warps_of(tile: Tile, num_rows: int) -> int:
    """Warps of a program: twice as many where it may have a large tile, whose sums else spill from registers."""
    return tile.warps if _padded(num_rows) <= _SMALL_M else 2 * tile.warps


def row_counts_of_launches(
    num_experts: int, hidden_size: int, intermediate_size: int, element_size: int
) -> list[int]:
    """Numbers of rows that together launch every kernel which any number of rows up to `TRITON_MAX_ROWS` launches.

    They are the first and last of each range of row counts that shares compiled code and the split of the second
    product.

    Args:
        num_experts: E.
        element_size: bytes.
    """

    def launch(num_rows: int) -> tuple[int, int]:
        slots = min(num_rows, num_experts)
        return _padded(num_rows), _split_size(slots, hidden_size, intermediate_size, PLANS[element_size])

    borders = [n for n in range(2, TRITON_MAX_ROWS + 1) if launch(n) != launch(n - 1)]
    return sorted({1, *(n - 1 for n in borders), *borders, TRITON_MAX_ROWS})


def _padded(num_rows: int) -> int:
    return max(_SMALL_M, 1 << (num_rows - 1).bit_length())


def _split_size(slots: int, hidden_size: int, intermediate_size: int, plan: Plan) -> int:
    """Inner extent of one split of the second product."""
    # A single expert has too few column blocks to keep the whole device busy.
    programs = _ceil_div(hidden_size, plan.down.columns) * slots
    splits = min(_MAX_SPLITS, max(1, plan.concurrent // programs))
    return plan.down.depth * _ceil_div(intermediate_size, plan.down.depth * splits)


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory for a program's pipeline, on devices with less than the plans assume."""
    if device.type != "cuda":
        return PLANS[2].shared_bytes
    # Reductions before the pipeline starts need little, and their room is reused.
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 2048


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
