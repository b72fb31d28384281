"""Which matrices the Triton kernels multiply: what has none, and a check of the rest before the first use.

A kernel cannot be known to be right on a device on which it never ran. So it is launched there, on the model's own
matrices, with each tile of rows that it is compiled for, and each number is compared with the matrix unpacked. One that
fails or is wrong is not used for this format and these sizes as long as this process lives.

A check compiles for some seconds and waits for the device, so it cannot run in a compiled graph, a trace, or a CUDA
graph's capture: there the kernel serves what was checked before.

Shapes: N rows, E experts, O outputs, I inputs, C terms of a sum.
"""

import functools
import logging
from collections.abc import Iterable, Sequence

import torch

from ..kernels import (
    TILES,
    TRITON_UNSORTED_MAX_ROWS,
    difference,
    max_rows_of_matrix,
    packed_outer_product,
    packed_product,
    why_no_gpu_kernel,
)
from ..kernels.waiting import log_if_slow
from .format import Format, Parts, Sizes, format_of

logger = logging.getLogger("llamoe")

# By device, key of the format, dtype of the rows, sizes, experts (0 for one matrix), and whether for gradients: what is
# wrong with the kernels; empty if nothing is.
_FAILURES: dict[tuple, str] = {}
# Experts that get rows in a check.
_EXPERTS = 4
# Columns of a weight that are cast to float32 at once.
_COLUMNS = 512


def why_no_kernel(form: Format, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no Triton kernel multiplies rows of a dtype by matrices of these sizes, as a sentence; None if one can."""
    return _why_no_kernel(form.key, f"{sizes[0]} {sizes[1]}", dtype, device)


# A compiler runs this function while it traces, and takes its result as a constant; so with `_is_known`.
@torch.compiler.assume_constant_result
def _why_no_kernel(key: str, sizes: str, dtype: torch.dtype, device: torch.device) -> str | None:
    num_out, num_in = map(int, sizes.split())
    return why_no_gpu_kernel(device) or format_of(key).gpu_kernel_refusal((num_out, num_in), dtype)


def product_by_gpu_kernel(
    form: Format, x_NC: torch.Tensor, parts: Parts, sizes: Sizes, transposed: bool = False
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
) -> bool:
    """Whether the kernels give the numbers of the unpacked matrices, for parts like these on their device.

    Args:
        form: for which `why_no_kernel` has no reason.
        parts: of one matrix, or of a stack.
        dtype: of the rows.
        num_experts: E; 0 for one matrix.
        directions: which products: False for the product, True for the transposed one of gradients.
        may_check: whether kernels may be launched and waited for; otherwise only earlier checks count.
    """
    device = parts[0].device
    if not may_check or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        # Making a text turns sizes that a compiler leaves open into numbers.
        text = f"{sizes[0]} {sizes[1]} {num_experts} {' '.join(str(int(each)) for each in directions)}"
        return _is_known(form.key, text, dtype, device)
    for transposed in directions:
        kind = (device, form.key, dtype, *sizes, num_experts, transposed)
        if kind not in _FAILURES:
            with log_if_slow("llamoe: checking a kernel for packed weights, once in this process"):
                failure = _FAILURES[kind] = find_difference(
                    form, parts, sizes, dtype, num_experts, transposed
                )
            if failure:
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
def _is_known(key: str, text: str, dtype: torch.dtype, device: torch.device) -> bool:
    num_out, num_in, num_experts, *directions = map(int, text.split())
    for transposed in directions:
        kind = (device, key, dtype, num_out, num_in, num_experts, bool(transposed))
        if kind not in _FAILURES:
            _tell_of_graph(kind)
        if _FAILURES.get(kind) != "":
            return False
    return True


@functools.cache
def _tell_of_graph(kind: tuple) -> None:
    logger.info(
        "llamoe: a graph is made before the kernel for %s was checked on %s (%s), so it is not used in it. One pass of "
        "few tokens before compiling or capturing has it checked; for training, one step.",
        kind[1],
        kind[0],
        kind[2],
    )


@torch.no_grad()
def find_difference(
    form: Format, parts: Parts, sizes: Sizes, dtype: torch.dtype, num_experts: int, transposed: bool
) -> str:
    """Description of how the kernels differ from the unpacked matrices, or fail; empty if they are right.

    Rows are random, the same each time; the caller's random state is kept. They go to a few experts, the first and the
    last among them, and every seventh to none. Arguments as in `kernels_are_right`.

    Raises:
        torch.OutOfMemoryError: the device has no room for the check.
    """
    device = parts[0].device
    rows = 0
    try:
        with torch.autocast(device.type, enabled=False):
            if not form.is_packed and num_experts:
                # An adapter's new factor is all zeros, and with those anything would be right.
                generator = torch.Generator(device).manual_seed(2)
                parts = [torch.randn(parts[0].shape, device=device, generator=generator).to(dtype)]
            matrix = form.for_gpu_kernel(parts, sizes)
            assert matrix is not None
            for rows, tile, by_id in _launches(num_experts, transposed):
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
        size = sizes[0] * sizes[1] * dtype.itemsize + 4 * _COLUMNS * sum(sizes)
        raise torch.OutOfMemoryError(
            f"llamoe: {device} has no room to check the kernel for {form.key} before its first use, which takes about "
            f"{size:,} bytes beside the model for one unpacked matrix of {list(sizes)}: leave more memory free."
        ) from error
    # Compilers, assemblers and drivers raise errors of their own kinds, and a model must run without them.
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"with {rows} rows {type(error).__name__}: {lines[0][:300] if lines else ''}"
    return ""


def _launches(num_experts: int, transposed: bool) -> Iterable[tuple[int, int | None, bool]]:
    """Rows, rows of a tile, and whether rows are unsorted, of launches that together compile all that ever is."""
    if num_experts and not transposed:
        yield from ((rows, None, True) for rows in (1, 7, TRITON_UNSORTED_MAX_ROWS - 3))
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
    return difference(given_NO, y_NO, allowed_NO)


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
    found = difference(given_EIO.flatten(1), y_EIO.flatten(1), allowed_EIO.flatten(1))
    return f"in the gradient of a factor {found}" if found else ""
