"""Rows times matrices on a GPU, packed or plain: one matrix, or that of each row's expert, unknown to the host.

Codes are unpacked in registers and multiplied there: of a matrix, only its bytes in memory are read, once for each tile
of rows. Launches and grids depend on shapes alone, so that a CUDA graph may hold them. Of plain matrices few rows come
here: torch's grouped product asks the host for the rows of each expert on most cards, and copies of an expert for each
of its rows are written and read once more.

**Few rows** are bound by memory. Up to `TRITON_UNSORTED_MAX_ROWS` rows come in any order with the number of each
row's expert, and every hit expert is read once. A multiprocessor issues 128 lanes a clock, and gets these bytes of
memory: 15 on an H100, 13 on an A100, 7 on a 3090, 4 on a 5090, 3 on a 4090. For a weight of 4 bits that leaves time for
4, 5, 10, 15 and 20 instructions. int4 takes 3.5 (counted in what the assembler makes for sm_90), int8 4.6 of twice as
many. bitsandbytes' 4 bits take 8.6, since each code is looked up: the memory's speed on consumers' cards, half of it
on an H100.

**Many rows** are sorted, and bound by tensor cores. A tile of 128 rows unpacks its weights for itself, which with
everything else takes 16 (sm_90) to 23 (sm_80) instructions a weight of int4: 0.12 to 0.18 clocks, where the product
alone takes 0.03 on an H100, 0.12 on an A100 and 0.5 on a 3090 or 4090. Unpacking a matrix once into memory, for torch's
product, writes and reads 4.5 bytes a weight: 0.3 clocks on an H100 and an A100, 0.7 on a 3090, 1.4 on a 4090, and for
experts the host must know the numbers of rows. That pays from 430 rows an expert on an H100, 800 on an A100, and more
where tensor cores are the bound anyway: `TRITON_MAX_ROWS_A_MATRIX`.

**Rows of float32** are multiplied without tensor cores, and much of what packed weights need then does not fit into
registers: right, and slow.

No card was timed.

Shapes: N rows, E experts, O outputs, I inputs, C terms of a sum (I, or O if transposed), S splits of the sum.
"""

import contextlib
import importlib.util
import os
from typing import Any, NamedTuple

import torch

from .limits import (
    TRITON_MAX_ROWS,
    TRITON_MAX_ROWS_A_MATRIX,
    TRITON_PREFERRED_MAX_ROWS,
    TRITON_UNSORTED_MAX_ROWS,
)

_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton reads this variable when it is imported; its interpreter runs kernels in Python, on the CPU too.
_INTERPRETED = _HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# Rows of a tile. Matrix instructions take 16; larger ones unpack a weight for more rows.
TILES = (16, 32, 64, 128)
# The loop that sums the splits is unrolled.
_MAX_SPLITS = 16
# Programs, and their warps, that a multiprocessor shall have at least, to hide the memory's latency.
_PROGRAMS, _WARPS = 4, 8
_ONE, _ENDS, _IDS = 0, 1, 2
_KINDS = {"int4": 4, "table": 5, "dense": 16}


class GpuMatrix(NamedTuple):
    """A matrix `[O, I]`, or a stack of them with an axis for experts in front, as these kernels read it.

    Attributes:
        kind: "int4": codes as in `formats.int4_layout`, a scale and an offset for each output and group of inputs.
            "table": bitsandbytes' 4 bits. "dense": a number for each weight, maybe with a scale for each output.
        sizes: O and I.
        codes: contiguous, unless dense.
        scales: int4: int32 with the bits of both bfloat16 numbers. table: float32, or codes of them. dense: any float.
        group: weights that share a scale.
        part: of a scale, that multiplies a code.
        table: the 16 float32 numbers that codes mean.
        nested: double quantization: for 256 scales the scale of their codes; `offset` is added to all of a matrix,
            and `dynamic` has the 256 numbers that the codes mean.
        matrices: that lie upon each other in one of `[O, I]`, with nested scales of their own.
        strides: of dense matrices, by expert, output and input.
    """

    kind: str
    sizes: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    group: int = 1
    part: float = 1.0
    table: torch.Tensor | None = None
    nested: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    dynamic: torch.Tensor | None = None
    matrices: int = 1
    strides: tuple[int, int, int] = (0, 0, 0)


class Tile(NamedTuple):
    """How a product is tiled."""

    rows: int
    columns: int
    depth: int
    """Terms of the sums that are loaded at once."""
    stages: int
    warps: int


class Launch(NamedTuple):
    """What the host decides of a product, from shapes alone."""

    tile: Tile
    row_tiles: int
    column_tiles: int
    split_size: int
    """Terms of one split of the sums."""


def has_gpu() -> bool:
    """Whether this machine has a CUDA device."""
    return torch.cuda.is_available()


def why_no_gpu_kernel(device: torch.device) -> str | None:
    """Why no Triton kernel runs on a device, as a sentence; None if one can."""
    if device.type != "cuda":
        is_interpreted = device.type == "cpu" and _INTERPRETED
        return None if is_interpreted else f"Triton's kernels are for CUDA devices, not for {device}."
    if torch.version.hip is not None:
        return "Triton's kernels were written for NVIDIA's GPUs."
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return (
            f"A GPU of compute capability {capability[0]}.{capability[1]} has no kernel for packed experts: they need "
            "8.0 (Ampere). Each hit matrix is unpacked first, and these cards do not multiply bfloat16: use "
            "bitsandbytes' NF4 with bnb_4bit_compute_dtype=torch.float16."
        )
    return None if _HAS_TRITON else "Triton is not installed: pip install triton."


def max_rows_of_matrix(device: torch.device) -> int:
    """Up to how many rows of a matrix, on average, its packed weights are multiplied, rather than unpacked once."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return TRITON_MAX_ROWS_A_MATRIX.get(major, min(TRITON_MAX_ROWS_A_MATRIX.values()))


def few_rows_limit(device: torch.device) -> int:
    """Up to how many rows of all experts plain weights are multiplied here, rather than by torch's products."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    return TRITON_PREFERRED_MAX_ROWS.get(major, TRITON_MAX_ROWS)


def packed_product(
    x_NC: torch.Tensor,
    matrix: GpuMatrix,
    groups: torch.Tensor | None = None,
    num_experts: int = 1,
    by_id: bool = False,
    transposed: bool = False,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """Multiply rows by the transpose of their matrices, or, if `transposed`, by the matrices.

    Args:
        x_NC: `[N, I]`, or `[N, O]` if `transposed`.
        matrix: one, or a stack. Rows of a table's matrix are whole blocks; plain weights have the rows' dtype.
        groups: None for one matrix. `[E]` integers: the rows are sorted by expert, and an expert's end at its number.
            `[N]` integers if `by_id`: the expert of each row; those outside of `0 … E - 1` stand for none.
        num_experts: E.
        by_id: only for up to `TRITON_UNSORTED_MAX_ROWS` rows.
        transposed: as for gradients.
        tile_rows: one of `TILES`; default: by the average rows of an expert.

    Returns:
        `[N, O]`, or `[N, I]` if `transposed`; rows without an expert are zero.
    """
    # Imported late: importing Triton takes long, and it is not installed everywhere.
    from . import packed_rows_triton

    num_rows = len(x_NC)
    num_out, num_in = matrix.sizes
    num_columns = num_in if transposed else num_out
    assert x_NC.shape[1] == (num_out if transposed else num_in), (x_NC.shape, matrix.sizes, transposed)
    assert not by_id or num_rows <= TRITON_UNSORTED_MAX_ROWS, num_rows
    out_NO = x_NC.new_empty(num_rows, num_columns)
    if out_NO.numel() == 0:
        return out_NO
    x_NC = x_NC.contiguous()
    by = _ONE if groups is None else _IDS if by_id else _ENDS
    launch = launch_of(matrix, num_rows, x_NC.itemsize, x_NC.device, num_experts, by, transposed, tile_rows)
    tile, splits = launch.tile, -(-x_NC.shape[1] // launch.split_size)
    parts_SNO = out_NO
    if splits > 1:
        parts_SNO = x_NC.new_empty(splits, num_rows, num_columns, dtype=torch.float32)
    unused = matrix.codes
    optional: list[Any] = [matrix.scales, matrix.table, matrix.nested, matrix.offset, matrix.dynamic]
    on_device = torch.cuda.device(x_NC.device) if x_NC.is_cuda else contextlib.nullcontext()
    with on_device:
        packed_rows_triton.product_kernel[launch.row_tiles, launch.column_tiles, splits](
            x_NC,
            matrix.codes,
            *(unused if each is None else each for each in optional),
            unused if groups is None else groups,
            parts_SNO,
            num_rows,
            num_experts,
            num_out,
            num_in,
            -(-num_in // matrix.group) * matrix.group,
            launch.split_size,
            *matrix.strides,
            **constants(matrix, tile, by, num_experts, transposed),
            num_warps=tile.warps,
            enable_fp_fusion=True,
        )
        if splits > 1:
            size = out_NO.numel()
            packed_rows_triton.sum_splits_kernel[(-(-size // 512),)](
                parts_SNO, out_NO, size, SPLITS=splits, BLOCK=512, num_warps=4, enable_fp_fusion=True
            )
    return out_NO


def packed_outer_product(x_NI: torch.Tensor, grad_NO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """`[E, I, O]`: for each expert, its rows of `x_NI`, transposed, times its rows of `grad_NO`, sorted by expert."""
    from . import packed_rows_triton

    (_, num_in), num_out = x_NI.shape, grad_NO.shape[1]
    out_EIO = x_NI.new_empty(len(ends_E), num_in, num_out)
    rows, columns = (min(64, _power_of_two(size)) for size in (num_in, num_out))
    on_device = torch.cuda.device(x_NI.device) if x_NI.is_cuda else contextlib.nullcontext()
    with on_device:
        packed_rows_triton.outer_kernel[len(ends_E), -(-num_in // rows), -(-num_out // columns)](
            x_NI.contiguous(),
            grad_NO.contiguous(),
            ends_E,
            out_EIO,
            num_in,
            num_out,
            M=32 if x_NI.itemsize == 4 else 64,
            ROWS=rows,
            COLUMNS=columns,
            STAGES=3,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out_EIO


def constants(
    matrix: GpuMatrix, tile: Tile, by: int, num_experts: int, transposed: bool
) -> dict[str, int | float]:
    """Compile-time constants of the kernel."""
    return dict(
        KIND=_KINDS[matrix.kind],
        TRANSPOSED=int(transposed),
        BY=by,
        GROUPS=1 << num_experts.bit_length(),
        M=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        GROUP=matrix.group,
        REST=matrix.sizes[0] % 64,
        MATRICES=matrix.matrices,
        NESTED=int(matrix.nested is not None),
        SCALED=int(matrix.scales is not None),
        PART=matrix.part,
    )


def launch_of(
    matrix: GpuMatrix,
    num_rows: int,
    itemsize: int,
    device: torch.device,
    num_experts: int = 1,
    by: int = _ONE,
    transposed: bool = False,
    tile_rows: int | None = None,
) -> Launch:
    """How a product is launched.

    Args:
        itemsize: of the rows' numbers, in bytes.
        by: what says whose rows are which: nothing, as there is one matrix, the experts' ends, or each row's expert.
        matrix, num_rows, device, num_experts, transposed, tile_rows: as in `packed_product`.
    """
    num_out, num_in = matrix.sizes
    terms, columns = (num_out, num_in) if transposed else (num_in, num_out)
    tile = tile_of(matrix, itemsize, transposed, tile_rows or rows_of_tile(num_rows, num_experts, by))
    row_tiles = {_ONE: -(-num_rows // tile.rows), _IDS: num_rows}.get(
        by, num_rows // tile.rows + min(num_rows, num_experts + 1)
    )
    column_tiles = -(-columns // tile.columns)
    split_size = _split_size(terms, row_tiles * column_tiles, tile, device)
    return Launch(tile, row_tiles, column_tiles, split_size)


def row_counts_of_launches(
    matrix: GpuMatrix, itemsize: int, device: torch.device, num_experts: int
) -> list[int]:
    """Numbers of rows that together launch every kernel which any number up to `TRITON_MAX_ROWS` launches.

    They are the first and last of each range of numbers that shares compiled code and the split of the sums. Arguments
    as in `launch_of`.
    """

    def launch(num_rows: int) -> tuple[int, Tile, int]:
        by = _IDS if num_rows <= TRITON_UNSORTED_MAX_ROWS else _ENDS
        found = launch_of(matrix, num_rows, itemsize, device, num_experts, by)
        return by, found.tile, found.split_size

    borders = [n for n in range(2, TRITON_MAX_ROWS + 1) if launch(n) != launch(n - 1)]
    return sorted({1, *(n - 1 for n in borders), *borders, TRITON_MAX_ROWS})


def rows_of_tile(num_rows: int, num_experts: int, by: int) -> int:
    """Rows of a tile: those of one expert, where they are sorted twice the average, since routing is uneven."""
    wanted = num_rows if by != _ENDS else 2 * num_rows // num_experts
    return next((rows for rows in TILES if rows >= wanted), TILES[-1])


def tile_of(matrix: GpuMatrix, itemsize: int, transposed: bool, rows: int) -> Tile:
    """The tile for a number of rows; `itemsize` as in `launch_of`."""
    is_large = rows >= 64
    columns, depth = (128, 64) if is_large and itemsize == 2 else (64, 64)
    if matrix.kind == "int4":
        # A step, or a tile of a transposed product, has inputs of one group.
        if transposed:
            columns, depth = min(matrix.group, 64), 64
        elif is_large:
            # More would not fit into registers.
            depth = min(matrix.group, 32 if rows >= 128 else 64)
        else:
            # Eight sums of 16 columns are as many as one warp computes without another doing the same; with 32 rows
            # their registers suffice for half of it.
            columns, depth = (128, 64) if rows <= 16 else (64, 64)
    elif matrix.kind == "table":
        if transposed:
            columns = min(matrix.group, columns)
        else:
            columns, depth = (128 if rows <= 16 and itemsize == 2 else columns), min(matrix.group, depth)
    else:
        num_out, num_in = matrix.sizes
        if not is_large:
            depth = max(128 // matrix.codes.element_size(), 32)
        # Adapters' factors are thin.
        columns = min(columns, _power_of_two(num_in if transposed else num_out))
        depth = min(depth, _power_of_two(num_out if transposed else num_in))
    if itemsize == 4 and not (matrix.kind == "int4" and transposed):
        depth = min(depth, 32)
    # With four warps the sums of 64 rows spill from registers on capability 8.0 and 12.0.
    warps = 8 if is_large else 1 if matrix.kind == "int4" and not transposed and not is_large else 4
    return Tile(rows, columns, depth, 4 if warps == 4 else 3, warps)


def _split_size(terms: int, programs: int, tile: Tile, device: torch.device) -> int:
    """Terms of one split of the sums: few rows have too few programs to keep the whole device busy."""
    steps = -(-terms // tile.depth)
    splits = 1
    if tile.rows <= 32:
        wanted = max(_PROGRAMS, _WARPS // tile.warps) * _multiprocessors(device)
        while splits < _MAX_SPLITS and 2 * splits * programs <= wanted and steps >= 8 * splits:
            splits *= 2
    return tile.depth * -(-steps // splits)


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
