"""Which matrices the Triton kernels multiply: what has none, and a check of the rest before the first use.

A kernel cannot be known to be right on a device on which it never ran. So it is launched there, on the model's own
matrices, with every number of rows at which something else is compiled or launched, and with each tile of more rows.
Each number is compared with the plain product. One that fails or is wrong is not used for this format, these sizes and
strides as long as this process lives.

A check compiles for some seconds and waits for the device, so it cannot run in a compiled graph, a trace, or a CUDA
graph's capture: there the kernel serves what was checked before.

Shapes: N rows, E experts, O outputs, I inputs, C terms of a sum.
"""

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..kernels import (
    TILES,
    TRITON_UNSORTED_MAX_ROWS,
    GpuMatrix,
    max_rows_of_matrix,
    packed_outer_product,
    packed_product,
    row_counts_of_launches,
    why_no_gpu_kernel,
)
from ..kernels.waiting import log_if_slow
from .format import Format, Parts, Sizes, format_of

logger = logging.getLogger("llamoe")

# Experts that get rows in a check.
_EXPERTS = 4
# Columns of a weight that are cast to float32 at once.
_COLUMNS = 512


class _Kind(NamedTuple):
    """What shares a check.

    Attributes:
        key: of the format.
        dtype: of the rows.
        numbers: O, I, E (0 for one matrix), 1 for an adapter's factor, and the strides of the first part.
        transposed: whether for gradients.
    """

    device: torch.device
    key: str
    dtype: torch.dtype
    numbers: tuple[int, ...]
    transposed: bool

    @property
    def is_of_few_rows(self) -> bool:
        """Whether for experts of 16 or 32 bits, of which the kernels multiply few rows alone."""
        return self.key.startswith("plain") and not self.numbers[3]


# What is wrong with the kernels; empty if nothing is.
_FAILURES: dict[_Kind, str] = {}


def failures() -> list[str]:
    """What is wrong with kernels that this process has checked."""
    return [failure for failure in _FAILURES.values() if failure]


def why_no_kernel(form: Format, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no Triton kernel multiplies rows of a dtype by matrices of these sizes, as a sentence; None if one can."""
    return _why_no_kernel(form.key, f"{sizes[0]} {sizes[1]}", dtype, device)


# A compiler runs this function while it traces, and takes its result as a constant; so with `_is_known`.
@torch.compiler.assume_constant_result
def _why_no_kernel(key: str, sizes: str, dtype: torch.dtype, device: torch.device) -> str | None:
    num_out, num_in = map(int, sizes.split())
    return why_no_gpu_kernel(device) or format_of(key).gpu_kernel_refusal((num_out, num_in), dtype)


def product_by_gpu_kernel(
    form: Format,
    x_NC: torch.Tensor,
    parts: Parts,
    sizes: Sizes,
    transposed: bool = False,
) -> torch.Tensor | None:
    """The product of few rows with one matrix, or the transposed one; None where unpacking the matrix is better."""
    device = parts[0].device
    if not may_have_gpu_kernel(device) or len(x_NC) > max_rows_of_matrix(device):
        return None
    if not check_one(form, parts, sizes, x_NC.dtype, transposed):
        return None
    matrix = form.for_gpu_kernel(parts, sizes)
    return None if matrix is None else packed_product(x_NC, matrix, transposed=transposed)


def check_one(
    form: Format, parts: Parts, sizes: Sizes, dtype: torch.dtype | None = None, transposed: bool = False
) -> bool:
    """Whether a kernel multiplies rows of a dtype, by default the format's, by this matrix, and is right."""
    device, dtype = parts[0].device, dtype or form.compute_dtype
    if not may_have_gpu_kernel(device) or why_no_kernel(form, sizes, dtype, device):
        return False
    return kernels_are_right(form.exact, parts, sizes, dtype, 0, (transposed,), may_check=True)


def may_have_gpu_kernel(device: torch.device) -> bool:
    """Whether packed matrices on a device may have kernels there: asked for each product, so of the type alone."""
    return device.type == "cuda"


def kernels_are_right(
    form: Format,
    parts: Parts,
    sizes: Sizes,
    dtype: torch.dtype,
    num_experts: int,
    directions: Sequence[bool],
    may_check: bool,
    is_factor: bool = False,
) -> bool:
    """Whether the kernels give the numbers of the plain product, for parts like these on their device.

    Args:
        form: for which `why_no_kernel` has no reason.
        parts: of one matrix, or of a stack.
        dtype: of the rows.
        num_experts: E; 0 for one matrix.
        directions: which products: False for the product, True for the transposed one of gradients.
        may_check: whether kernels may be launched and waited for; otherwise only earlier checks count.
        is_factor: whether the parts are an adapter's.
    """
    device = parts[0].device
    may_check = may_check and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    numbers = (*sizes, num_experts, int(is_factor), *parts[0].stride())
    for transposed in directions:
        if not may_check:
            # Making a text turns sizes that a compiler leaves open into numbers.
            if not _is_known(form.key, " ".join(f"{each}" for each in numbers), dtype, device, transposed):
                return False
            continue
        kind = _Kind(device, form.key, dtype, numbers, transposed)
        if kind not in _FAILURES:
            what = "the kernel for few rows" if kind.is_of_few_rows else "a kernel for packed weights"
            with log_if_slow(f"llamoe: checking {what}, once in this process"):
                failure = find_difference(form, parts, sizes, dtype, num_experts, transposed, is_factor)
            _FAILURES[kind] = failure
            if failure and kind.is_of_few_rows:
                logger.warning(
                    "llamoe does not use its kernel for few rows on %s, %s, experts %s: %s. torch's grouped product "
                    "takes its place, or a loop where that does not fit.",
                    device,
                    dtype,
                    [num_experts, *sizes],
                    failure,
                )
            elif failure:
                logger.warning(
                    "llamoe does not use its kernel for %s on %s, matrices %s: %s. Each matrix is unpacked in its "
                    "place, which is slower.",
                    form.key,
                    device,
                    list(sizes),
                    failure,
                )
        if _FAILURES[kind]:
            return False
    return True


@torch.compiler.assume_constant_result
def _is_known(key: str, text: str, dtype: torch.dtype, device: torch.device, transposed: bool) -> bool:
    kind = _Kind(device, key, dtype, tuple(map(int, text.split())), transposed)
    if kind not in _FAILURES:
        _tell_of_graph(kind)
    return _FAILURES.get(kind) == ""


@functools.cache
def _tell_of_graph(kind: _Kind) -> None:
    is_of_few_rows = kind.is_of_few_rows
    logger.info(
        "llamoe: a graph is made before the kernel for %s was checked on %s (%s), so it is not used in it. One pass of "
        "few tokens %s.",
        "few rows" if is_of_few_rows else kind.key,
        kind.device,
        kind.dtype,
        "without gradients before compiling or capturing has it checked"
        if is_of_few_rows
        else "before compiling or capturing has it checked; for training, one step",
    )


@torch.no_grad()
def find_difference(
    form: Format,
    parts: Parts,
    sizes: Sizes,
    dtype: torch.dtype,
    num_experts: int,
    transposed: bool,
    is_factor: bool = False,
) -> str:
    """Description of how the kernels differ from the plain product, or fail; empty if they are right.

    Rows are random, the same each time; the caller's random state is kept. They go to a few experts, the first and the
    last among them, and every seventh to none. Arguments as in `kernels_are_right`.

    Raises:
        torch.OutOfMemoryError: the device has no room for the check.
    """
    device = parts[0].device
    rows = 0
    try:
        with torch.autocast(device.type, enabled=False):
            if is_factor:
                # A new one is all zeros, and with those anything would be right.
                generator = torch.Generator(device).manual_seed(2)
                parts = [torch.randn(parts[0].shape, device=device, generator=generator).to(dtype)]
            matrix = form.for_gpu_kernel(parts, sizes)
            assert matrix is not None
            for rows, tile, by_id in _launches(matrix, dtype, device, num_experts, transposed):
                generator = torch.Generator(device).manual_seed(1)
                x_NC = torch.randn(rows, sizes[not transposed], device=device, generator=generator).to(dtype)
                ids_N = _ids(rows, num_experts, device)
                groups = None if not num_experts else ids_N
                if num_experts and not by_id:
                    ids_N = ids_N.sort()[0]
                    experts = torch.arange(num_experts, device=device)
                    groups = torch.searchsorted(ids_N, experts, right=True, out_int32=True)
                given = packed_product(x_NC, matrix, groups, max(num_experts, 1), by_id, transposed, tile)
                if wrong := _compare(form, parts, sizes, x_NC, ids_N, num_experts, transposed, given):
                    return f"with {rows} rows {wrong}"
            if transposed and not form.is_packed:
                return _compare_outer(sizes, dtype, num_experts, device)
    except torch.OutOfMemoryError as error:
        # It says nothing of the kernel, and later there may be room.
        size, of_matrix = 4 * _COLUMNS * sum(sizes), ""
        what = form.key if form.is_packed or is_factor else "few rows"
        if form.is_packed:
            size += sizes[0] * sizes[1] * dtype.itemsize
            of_matrix = f" for one unpacked matrix of {list(sizes)}"
        raise torch.OutOfMemoryError(
            f"llamoe: {device} has no room to check the kernel for {what} before its first use, which takes about "
            f"{size:,} bytes beside the model{of_matrix}: leave more memory free."
        ) from error
    # Compilers, assemblers and drivers raise errors of their own kinds, and a model must run without them.
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"with {rows} rows {type(error).__name__}: {lines[0][:300] if lines else ''}"
    return ""


def _launches(
    matrix: GpuMatrix, dtype: torch.dtype, device: torch.device, num_experts: int, transposed: bool
) -> Iterable[tuple[int, int | None, bool]]:
    """Rows, rows of a tile, and whether rows are unsorted, of launches that together compile all that ever is."""
    if num_experts and not transposed:
        for rows in row_counts_of_launches(matrix, dtype.itemsize, device, num_experts):
            yield rows, None, rows <= TRITON_UNSORTED_MAX_ROWS
    # Several tiles of an expert.
    for tile in TILES:
        yield 2 * tile + 5, tile, False


def _ids(num_rows: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """`[N]`: half of the rows are the last expert's, the others those of the first few; every seventh has none."""
    place_N = torch.arange(num_rows, device=device)
    ids_N = torch.where(place_N % 2 == 0, num_experts - 1, place_N % min(max(num_experts, 1), _EXPERTS))
    # A single row has an expert.
    return torch.where(place_N % 7 == 3, num_experts + place_N % 3, ids_N)


def _compare(
    form: Format,
    parts: Parts,
    sizes: Sizes,
    x_NC: torch.Tensor,
    ids_N: torch.Tensor,
    num_experts: int,
    transposed: bool,
    given_NO: torch.Tensor,
) -> str:
    """How products differ from float32 sums (float64 for float32 rows) over the weights in the rows' dtype.

    With e the spacing of the dtype's numbers at one, the kernels may leave a weight unrounded, which differs by up to
    e / 2 of it, by a fifth of e on average. That happens independently, so the root of the sum of squares, s, bounds
    the effect: 2 e s are ten deviations. The result is rounded once, e |y|, and the order of float32 sums of n numbers
    adds e32 sqrt(n) of s, four times.
    """
    dtype = x_NC.dtype
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    step, step32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    of_spread = 2 * step + 4 * step32 * x_NC.shape[1] ** 0.5
    y_NO = given_NO.new_zeros(given_NO.shape, dtype=wide)
    allowed_NO = torch.zeros_like(y_NO)
    for expert in ids_N.unique().tolist() if num_experts else (0,):
        rows = ids_N == expert if num_experts else torch.ones_like(ids_N, dtype=torch.bool)
        if num_experts and not 0 <= expert < num_experts:
            continue
        matrix = form.matrix([part[expert] for part in parts] if num_experts else parts, sizes, dtype)
        x = x_NC[rows].to(wide)
        # Columns of the result, and with them of the weights, in turn.
        some = (matrix if transposed else matrix.T).to(dtype).split(_COLUMNS, dim=1)
        y_NO[rows] = torch.cat([x @ part.to(wide) for part in some], 1)
        spread_NO = torch.cat([x.square() @ part.to(wide).square() for part in some], 1).sqrt()
        allowed_NO[rows] = step * y_NO[rows].abs() + of_spread * spread_NO
    return _difference(given_NO, y_NO, allowed_NO)


def _compare_outer(sizes: Sizes, dtype: torch.dtype, num_experts: int, device: torch.device) -> str:
    """How the gradient of adapters' factors differs from float32 (float64) sums; likewise."""
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    num_rows = 77
    generator = torch.Generator(device).manual_seed(3)
    grad_NO, x_NI = (
        torch.randn(num_rows, size, device=device, generator=generator).to(dtype) for size in sizes
    )
    ids_N = _ids(num_rows, num_experts, device).sort()[0]
    ends_E = torch.searchsorted(ids_N, torch.arange(num_experts, device=device), right=True, out_int32=True)
    given_EIO = packed_outer_product(x_NI, grad_NO, ends_E)
    step, step32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    y_EIO = torch.zeros(given_EIO.shape, dtype=wide, device=device)
    allowed_EIO = torch.zeros_like(y_EIO)
    for expert in range(num_experts):
        x, grad = (rows[ids_N == expert].to(wide) for rows in (x_NI, grad_NO))
        y_EIO[expert] = x.T @ grad
        spread = (x.square().T @ grad.square()).sqrt()
        allowed_EIO[expert] = step * y_EIO[expert].abs() + 4 * step32 * num_rows**0.5 * spread
    found = _difference(given_EIO.flatten(1), y_EIO.flatten(1), allowed_EIO.flatten(1))
    return f"in the gradient of a factor {found}" if found else ""


def _difference(given_NO: torch.Tensor, y_NO: torch.Tensor, allowed_NO: torch.Tensor) -> str:
    """Description of which numbers differ by more than is allowed, with the worst of them; empty if none does."""
    # Where weights overflow, no result is right or wrong.
    comparable_NO = y_NO.abs() < torch.finfo(given_NO.dtype).max / 2
    error_NO = (given_NO.to(y_NO.dtype) - y_NO).abs()
    wrong_NO = ~(error_NO <= allowed_NO) & comparable_NO
    if not wrong_NO.any():
        return ""
    # A value that is not finite counts as the largest difference.
    excess_NO = torch.where(wrong_NO, (error_NO - allowed_NO).nan_to_num(torch.inf), -1)
    row, column = divmod(int(excess_NO.argmax()), y_NO.shape[1])
    given, right, allowed = (float(t[row, column]) for t in (given_NO, y_NO, allowed_NO))
    return (
        f"{int(wrong_NO.sum())} of {y_NO.numel()} numbers are wrong: at worst (row {row}, column {column}) {given:.6g} "
        f"in place of {right:.6g}, where {allowed:.2g} may be rounding"
    )
