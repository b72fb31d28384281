"""Products of rows with packed matrices on a GPU: with one matrix, or with the matrix of each row's expert.

Codes are unpacked in registers, so only the packed bytes are read, once for each tile of rows. Launches depend only on
shapes, and the host does not read which rows are whose, so a CUDA graph can capture them. Up to
`TRITON_UNSORTED_MAX_ROWS` rows may be in any order, each with the number of its expert, and each expert with rows is
read once; more rows are sorted by expert. Plain matrices are multiplied in the same way if rows are few.

The kernels have not been tested on every device. Before the first use on a device, `is_right` runs a kernel there and
compares the result with the product of unpacked weights. A kernel that fails or differs is not used in this process.

Shapes: N rows, E experts, O outputs, I inputs, C terms of a sum (I, or O if transposed), S splits of the sum.
"""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from .limits import (
    TRITON_MAX_ROWS,
    TRITON_MAX_ROWS_A_MATRIX,
    TRITON_PREFERRED_MAX_ROWS,
    TRITON_UNSORTED_MAX_ROWS,
)
from .waiting import log_if_slow

logger = logging.getLogger("llamoe")

_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton reads this variable when it is imported. Its interpreter runs kernels in Python, also on the CPU.
_INTERPRETED = _HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# Possible numbers of rows of a tile. Matrix instructions need 16; a larger tile unpacks each weight for more rows.
TILES = (16, 32, 64, 128)
# Most splits of a sum: the loop that adds them is unrolled.
_MAX_SPLITS = 16
# Least numbers of programs and of warps per multiprocessor that hide the latency of memory.
_PROGRAMS, _WARPS = 4, 8
# How rows are assigned to matrices: a single matrix, the end of each expert's rows, the expert of each row.
_ONE, _ENDS, _IDS = 0, 1, 2
# Numbers of rows that a check of unsorted rows tries: one for each tile size.
_UNSORTED_ROWS = (13, 29)
# Number of columns of a weight that a check casts to float32 at once.
_COLUMNS = 512


class GpuMatrix(NamedTuple):
    """A matrix `[O, I]`, or a stack of matrices with an axis for experts in front, as these kernels read it.

    Attributes:
        kind: "int4": codes as in `formats.int4_layout`, with a scale and an offset for each output and group of inputs.
            "dense": a number for each weight, which may be a code of 8 bits with a scale for each output.
        sizes: O and I.
        codes: the codes or weights; contiguous if the kind is "int4".
        scales: int4: int32, each with the bits of the scale and the offset in bfloat16. dense: floats, or None.
        group: int4: number of inputs that share a scale.
        strides: dense: numbers between neighbouring experts, outputs and inputs.
    """

    kind: str
    sizes: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    group: int = 1
    strides: tuple[int, int, int] = (0, 0, 0)


class Tile(NamedTuple):
    """The part of a product that one program computes, and how."""

    rows: int
    columns: int
    depth: int
    """Number of terms of the sums that an iteration of the loop adds."""
    stages: int
    """Number of iterations whose loads are in flight."""
    warps: int


class Launch(NamedTuple):
    """The launch parameters of a product, which depend only on shapes."""

    tile: Tile
    row_tiles: int
    column_tiles: int
    split_size: int
    """Number of terms of the sums that one program adds."""


def why_no_gpu_kernel(device: torch.device) -> str | None:
    """Return the reason why no Triton kernel runs on a device, as a sentence; None if kernels run there."""
    if device.type != "cuda":
        is_interpreted = device.type == "cpu" and _INTERPRETED
        return None if is_interpreted else f"llamoe's Triton kernels are for CUDA devices, not for {device}."
    if torch.version.hip is not None:
        return "llamoe's Triton kernels are for NVIDIA's GPUs."
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return (
            f"A GPU of compute capability {capability[0]}.{capability[1]} has no kernel for packed experts: they need "
            "8.0 (Ampere). Use bitsandbytes' NF4 with bnb_4bit_compute_dtype=torch.float16."
        )
    return None if _HAS_TRITON else "Triton is not installed: pip install triton."


def max_rows_of_matrix(device: torch.device) -> int:
    """Return the most rows per matrix, on average, that the kernels multiply by packed weights; more are unpacked."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return TRITON_MAX_ROWS_A_MATRIX.get(major, min(TRITON_MAX_ROWS_A_MATRIX.values()))


def few_rows_limit(device: torch.device) -> int:
    """Return the most rows of all experts that the kernels multiply by plain weights; more rows are torch's."""
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
        matrix: a matrix or a stack. Plain weights have the rows' dtype.
        groups: None for one matrix. Without `by_id`, `[E]` integers: rows are sorted by expert, and this is the index
            after each expert's last row. With `by_id`, `[N]` integers: the expert of each row; numbers outside of
            `0 … E - 1` stand for no expert.
        num_experts: E.
        by_id: the rows are in any order, at most `TRITON_UNSORTED_MAX_ROWS`.
        transposed: for the gradient of the rows.
        tile_rows: one of `TILES`; default: chosen by the average number of rows of an expert.

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
    on_device = torch.cuda.device(x_NC.device) if x_NC.is_cuda else contextlib.nullcontext()
    with on_device:
        packed_rows_triton.product_kernel[launch.row_tiles, launch.column_tiles, splits](
            x_NC,
            matrix.codes,
            # If the kernel does not use scales or groups, any tensor takes their place.
            matrix.codes if matrix.scales is None else matrix.scales,
            matrix.codes if groups is None else groups,
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


def constants(
    matrix: GpuMatrix, tile: Tile, by: int, num_experts: int, transposed: bool
) -> dict[str, int | float]:
    """Return the compile-time constants of the kernel."""
    return dict(
        IS_INT4=int(matrix.kind == "int4"),
        TRANSPOSED=int(transposed),
        BY=by,
        GROUPS=1 << num_experts.bit_length(),
        M=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        GROUP=matrix.group,
        REST=matrix.sizes[0] % 64,
        SCALED=int(matrix.scales is not None),
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
    """Return the launch parameters of a product.

    Args:
        itemsize: of the rows' numbers, in bytes.
        by: how rows are assigned to matrices: `_ONE`, `_ENDS` or `_IDS`.
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


def rows_of_tile(num_rows: int, num_experts: int, by: int) -> int:
    """Return the number of rows of a tile: for sorted rows twice an expert's average, since some have more rows."""
    wanted = num_rows if by != _ENDS else 2 * num_rows // num_experts
    return next((rows for rows in TILES if rows >= wanted), TILES[-1])


def tile_of(matrix: GpuMatrix, itemsize: int, transposed: bool, rows: int) -> Tile:
    """Return the tile for a number of rows; `itemsize` as in `launch_of`."""
    is_large = rows >= 64
    columns, depth = (128, 64) if is_large and itemsize == 2 else (64, 64)
    if matrix.kind == "int4":
        # The inputs of an iteration, or of a tile of a transposed product, must be in one group.
        if transposed:
            columns, depth = min(matrix.group, 64), 64
        else:
            # Few rows need many loads of codes in flight; with many rows these would not fit into registers.
            columns = 128 if rows <= 16 else columns
            depth = min(matrix.group, 32 if rows >= 128 else 64)
    else:
        num_out, num_in = matrix.sizes
        if not is_large:
            depth = max(128 // matrix.codes.element_size(), 32)
        # LoRA factors are narrower than a tile.
        columns = min(columns, _power_of_two(num_in if transposed else num_out))
        depth = min(depth, _power_of_two(num_out if transposed else num_in))
    if itemsize == 4 and not (matrix.kind == "int4" and transposed):
        depth = min(depth, 32)
    # With four warps the sums of 64 rows would not fit into registers on capability 8.0 and 12.0.
    warps = 8 if is_large else 4
    return Tile(rows, columns, depth, 4 if warps == 4 else 3, warps)


def _split_size(terms: int, programs: int, tile: Tile, device: torch.device) -> int:
    """Return how many terms of a sum one program adds.

    Few rows start too few programs to keep the device busy, so several programs share each sum.
    """
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


# By name, dtype and device of each checked kernel, a description of its failure; empty if the kernel is right.
_FAILURES: dict[tuple[str, torch.dtype, torch.device], str] = {}


def kernel_failures() -> list[str]:
    """Return the failures of the kernels that this process has checked."""
    return [failure for failure in _FAILURES.values() if failure]


def is_right(
    matrix: GpuMatrix,
    unpacked: Callable[[torch.Tensor, int], torch.Tensor],
    dtype: torch.dtype,
    num_experts: int,
    transposed: bool,
    may_check: bool,
) -> bool:
    """Return True if the kernel for a matrix is right on the matrix's device. The first call compiles and checks it.

    Args:
        matrix: a matrix or a stack; the result holds for all of the same kind, sizes and strides.
        unpacked: unpacks the matrix of an expert, from all codes and the expert's number, into `[O, I]` in `dtype`.
        dtype: of the rows.
        num_experts: E; 0 for one matrix.
        transposed: check the product for the gradient of the rows.
        may_check: check the kernel if that was not done before. Otherwise, and while a CUDA graph is captured, return
            False for a kernel that was not checked.
    """
    device = matrix.codes.device
    # Formatting a symbolic size would make a compiler specialise it.
    numbers = " ".join(f"{number}" for number in (*matrix.sizes, num_experts, *matrix.strides))
    name = (
        f"{matrix.kind}:{matrix.group} {matrix.codes.dtype} [{numbers}]{' transposed' if transposed else ''}"
    )
    if not may_check or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return _is_known(name, dtype, device)
    if (name, dtype, device) not in _FAILURES:
        with log_if_slow("llamoe: checking a kernel for packed weights, once in this process"):
            failure = _find_difference(matrix, unpacked, dtype, num_experts, transposed)
            _FAILURES[name, dtype, device] = failure
        if failure:
            logger.warning(
                "llamoe does not use its Triton kernel for %s in %s on %s: %s. torch's slower products take its place.",
                name,
                dtype,
                device,
                failure,
            )
    return not _FAILURES[name, dtype, device]


# A compiler calls this function while it traces, and takes the result as a constant.
@torch.compiler.assume_constant_result
def _is_known(name: str, dtype: torch.dtype, device: torch.device) -> bool:
    return _FAILURES.get((name, dtype, device)) == ""


@torch.no_grad()
def _find_difference(
    matrix: GpuMatrix,
    unpacked: Callable[[torch.Tensor, int], torch.Tensor],
    dtype: torch.dtype,
    num_experts: int,
    transposed: bool,
) -> str:
    """Describe how the kernels fail, or differ from the product of unpacked weights; empty if they are right.

    Rows are random, but the same each time, and the caller's random state does not change. Half of the rows belong to
    the last expert, the others to the first few, and every seventh to none. All tiles are tried. Arguments are as in
    `is_right`.
    """
    device, terms = matrix.codes.device, matrix.sizes[not transposed]
    if matrix.scales is None and not matrix.codes.any():
        # LoRA factors of a new adapter are zeros, with which every product would be right.
        zeros, generator = matrix.codes, torch.Generator(device).manual_seed(2)
        numbers = torch.empty_strided(zeros.shape, zeros.stride(), dtype=zeros.dtype, device=device)
        matrix = matrix._replace(codes=numbers.normal_(generator=generator))
    launches = [(2 * tile + 5, tile, False) for tile in TILES]
    if num_experts and not transposed:
        launches += [(rows, None, True) for rows in _UNSORTED_ROWS]
    rows = 0
    try:
        for rows, tile, by_id in launches:
            x_NC = torch.randn(rows, terms, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            place_N = torch.arange(rows, device=device)
            ids_N = torch.where(place_N % 2 == 0, num_experts - 1, place_N % min(max(num_experts, 1), 4))
            ids_N = torch.where(place_N % 7 == 3, num_experts, ids_N)
            groups = ids_N
            if not num_experts:
                groups, ids_N = None, torch.zeros_like(ids_N)
            elif not by_id:
                ids_N = ids_N.sort()[0]
                experts = torch.arange(num_experts, device=device)
                groups = torch.searchsorted(ids_N, experts, right=True, out_int32=True)
            y_NO = packed_product(x_NC, matrix, groups, max(num_experts, 1), by_id, transposed, tile)
            of_expert = partial(unpacked, matrix.codes)
            expected_NO, allowed_NO = _expected(x_NC, ids_N, of_expert, max(num_experts, 1), transposed)
            # Results that overflow cannot be compared.
            is_comparable_NO = expected_NO.abs() < torch.finfo(dtype).max / 2
            error_NO = (y_NO.to(expected_NO.dtype) - expected_NO).abs()
            is_wrong_NO = ~(error_NO <= allowed_NO) & is_comparable_NO
            if is_wrong_NO.any():
                row, column = is_wrong_NO.nonzero()[0].tolist()
                return (
                    f"with {rows} rows {int(is_wrong_NO.sum())} of {y_NO.numel()} numbers are wrong: in row {row}, "
                    f"column {column} is {y_NO[row, column]:.6g} in place of {expected_NO[row, column]:.6g}"
                )
    except torch.OutOfMemoryError:
        # This says nothing about the kernel: the next call checks it again.
        raise
    # Compilers, assemblers and drivers raise errors of any class, and a model must run without the kernel.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"with {rows} rows {type(error).__name__}: {lines[0][:300]}"
    return ""


def _expected(
    x_NC: torch.Tensor,
    ids_N: torch.Tensor,
    unpacked: Callable[[int], torch.Tensor],
    num_experts: int,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product with unpacked weights and its tolerance, each `[N, O]`, in float32 (float64 for float32 rows).

    The tolerance allows for three errors. e is the epsilon of the rows' dtype, e32 that of float32, and s the root of
    the sum of the terms' squares. A kernel may not round a weight that the other product rounds, a relative difference
    of e / 5 on average; these differences are independent, so 2 e s is ten standard deviations. Rounding the result
    adds e |y|. Adding n terms in another order adds 4 e32 sqrt(n) s.
    """
    dtype = x_NC.dtype
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    step, step32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    of_spread = 2 * step + 4 * step32 * x_NC.shape[1] ** 0.5
    sums, allowed = [], []
    for expert in ids_N.unique().tolist():
        # Rows without an expert are zero.
        matrix = unpacked(expert) if expert < num_experts else torch.zeros_like(unpacked(0))
        x = x_NC[ids_N == expert].to(wide)
        columns = (matrix if transposed else matrix.T).split(_COLUMNS, dim=1)
        sums.append(torch.cat([x @ block.to(wide) for block in columns], 1))
        spread = torch.cat([x.square() @ block.to(wide).square() for block in columns], 1).sqrt()
        allowed.append(step * sums[-1].abs() + of_spread * spread)
    place_N = ids_N.sort(stable=True)[1].argsort()
    return torch.cat(sums)[place_N], torch.cat(allowed)[place_N]
