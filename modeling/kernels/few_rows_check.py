"""Checks the kernels for few rows against the plain formula, before they first serve experts of some kind.

A kernel cannot be known to be right on a device on which it never ran. So it is launched there, on the model's own
experts, with every number of rows at which something else is compiled or launched, and each number is compared. One
that fails or is wrong is not used for experts of this dtype, size and layout, as long as this process lives.

A check compiles, for tens of seconds by estimate, and waits for the device, so it cannot run in a compiled graph, a
trace, or a CUDA graph's capture: there the kernel serves what was checked before. `check_kernels` in `moe.dispatch`
does that.

Shapes: N rows, E experts, H hidden size, I intermediate size, F = 2 I.
"""

import functools
import logging

import torch
from torch.nn import functional as F

from .few_rows import TRITON_MAX_ROWS, few_rows_experts, row_counts_of_launches
from .waiting import log_if_slow

logger = logging.getLogger("llamoe")

# By device, and dtype, sizes and strides of both stacks: what is wrong with the kernels; empty if nothing is.
_FAILURES: dict[tuple, str] = {}
# Columns of a weight that are cast to a wider dtype at once.
_COLUMNS = 512


def kernel_is_right(gate_up_EHF: torch.Tensor, down_EIH: torch.Tensor, may_check: bool) -> bool:
    """Whether `few_rows_experts` gives the plain formula's numbers for experts like these on their device.

    Args:
        gate_up_EHF: `[E, H, F]`.
        down_EIH: `[E, I, H]`.
        may_check: whether kernels may be launched and waited for; otherwise only earlier checks count.
    """
    device, dtype = gate_up_EHF.device, gate_up_EHF.dtype
    sizes = (*gate_up_EHF.shape, *gate_up_EHF.stride(), *down_EIH.shape, *down_EIH.stride())
    if not may_check or (gate_up_EHF.is_cuda and torch.cuda.is_current_stream_capturing()):
        # Making a text turns sizes that a compiler leaves open into numbers.
        return _is_known(device, dtype, " ".join(f"{size}" for size in sizes))
    kind = (device, dtype, *sizes)
    if kind not in _FAILURES:
        with log_if_slow("llamoe: checking the kernel for few rows, once in this process"):
            failure = _FAILURES[kind] = find_difference(gate_up_EHF, down_EIH)
        if failure:
            logger.warning(
                "llamoe does not use its kernel for few rows on %s, %s, experts %s: %s. torch's grouped product takes "
                "its place, or a loop where that does not fit. LLAMOE_EXPERTS=llamoe_kernel uses the kernel all the "
                "same.",
                device,
                dtype,
                list(down_EIH.shape),
                failure,
            )
    return not _FAILURES[kind]


# A compiler runs this function while it traces, and takes its result as a constant.
@torch.compiler.assume_constant_result
def _is_known(device: torch.device, dtype: torch.dtype, sizes: str) -> bool:
    kind = (device, dtype, *map(int, sizes.split()))
    if kind not in _FAILURES:
        _tell_of_graph(kind)
    return _FAILURES.get(kind) == ""


@functools.cache
def _tell_of_graph(kind: tuple) -> None:
    logger.info(
        "llamoe: a graph is made before the kernel for few rows was checked on %s (%s), so it is not used in it. One "
        "pass of few tokens without gradients before compiling or capturing has it checked.",
        *kind[:2],
    )


@torch.no_grad()
def find_difference(gate_up_EHF: torch.Tensor, down_EIH: torch.Tensor) -> str:
    """Description of how the kernels differ from the plain formula, or fail; empty if they are right.

    Rows are random, the same each time, and large enough for gates of about one; the caller's random state is kept.
    Ids are spread over all experts, with every seventh row without one, and then all the last expert's.

    The experts have 16 or 32 bits and any strides, on a device where `few_rows_fits`.

    Raises:
        torch.OutOfMemoryError: the device has no room for the check.
    """
    device, dtype = down_EIH.device, down_EIH.dtype
    num_experts, intermediate, hidden = down_EIH.shape
    num_rows = 0
    try:
        with torch.autocast(device.type, enabled=False):
            generator = torch.Generator(device).manual_seed(1)
            deviation = gate_up_EHF[-1, :, :64].float().square().mean().sqrt().item() * hidden**0.5
            scale = min(2 / deviation, 100.0) if 0 < deviation < float("inf") else 1.0
            x_NH = (
                torch.randn(TRITON_MAX_ROWS, hidden, device=device, generator=generator).mul_(scale).to(dtype)
            )
            place_N = torch.arange(TRITON_MAX_ROWS, device=device)
            last_N = torch.full_like(place_N, num_experts - 1)
            # The last expert is the row's that follows the first, which has none.
            spread_N = torch.where(
                place_N % 7 == 0, num_experts + place_N % 3, (last_N + 1 - place_N) % num_experts
            )
            for ids_N in (spread_N, last_N):
                y_NH, allowed_NH = _plain_formula(x_NH, gate_up_EHF, down_EIH, ids_N)
                for num_rows in row_counts_of_launches(num_experts, hidden, intermediate, dtype.itemsize):
                    given_NH = few_rows_experts(x_NH[:num_rows], gate_up_EHF, down_EIH, ids_N[:num_rows])
                    if wrong := difference(given_NH, y_NH[:num_rows], allowed_NH[:num_rows]):
                        return f"with {num_rows} rows {wrong}"
    except torch.OutOfMemoryError as error:
        # It says nothing of the kernel, and later there may be room.
        size = 4 * _COLUMNS * (hidden + intermediate)
        raise torch.OutOfMemoryError(
            f"llamoe: {device} has no room to check the kernel for few rows before its first use, which takes about "
            f"{size:,} bytes beside the model: leave more memory free."
        ) from error
    # Compilers, assemblers and drivers raise errors of their own kinds, and a model must run without them.
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"with {num_rows} rows {type(error).__name__}: {lines[0][:300] if lines else ''}"
    return ""


def _plain_formula(
    x_NH: torch.Tensor, gate_up_EHF: torch.Tensor, down_EIH: torch.Tensor, expert_ids_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of `few_rows_experts` in wider numbers, and the difference that a right kernel may have from it.

    Sums are float32 for 16 bits and float64 for float32; values are rounded where the kernels round them, so only the
    order of sums remains. With e the spacing of the dtype's numbers at one, an intermediate value that falls on the
    other side of a rounding border differs by e of itself. It is rounded four times (gate, up, activated, product),
    and the result once. The I such values behind an element of the result differ independently, so the root of the
    sum of their squares, s, bounds their effect: e (|y| + 4 s). The order of float32 sums of n numbers adds e32 sqrt(n)
    of s; four times that is allowed.

    Returns:
        `[N, H]` and the allowed differences `[N, H]`; zeros for rows without an expert.
    """
    dtype = x_NH.dtype
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    num_experts, intermediate, hidden = down_EIH.shape
    y_NH = x_NH.new_zeros(x_NH.shape, dtype=wide)
    allowed_NH = torch.zeros_like(y_NH)
    step, step32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    of_spread = 4 * step + 4 * step32 * (hidden + intermediate) ** 0.5

    def multiply(x_NI: torch.Tensor, weight_IO: torch.Tensor, power: int = 1) -> torch.Tensor:
        return torch.cat([x_NI @ part.to(wide) ** power for part in weight_IO.split(_COLUMNS, dim=1)], dim=1)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values.to(dtype).to(wide)

    for expert in expert_ids_N.unique().tolist():
        if expert < num_experts:
            rows = (expert_ids_N == expert).nonzero().squeeze(1)
            gate, up = rounded(multiply(x_NH[rows].to(wide), gate_up_EHF[expert])).chunk(2, dim=-1)
            hidden_NI = rounded(rounded(F.silu(gate)) * up)
            y_NH[rows] = multiply(hidden_NI, down_EIH[expert])
            spread_NH = multiply(hidden_NI.square(), down_EIH[expert], power=2).sqrt()
            allowed_NH[rows] = step * y_NH[rows].abs() + of_spread * spread_NH
    return y_NH, allowed_NH


def difference(given_NH: torch.Tensor, y_NH: torch.Tensor, allowed_NH: torch.Tensor) -> str:
    """Description of which numbers differ by more than is allowed, with the worst of them; empty if none does."""
    # Where weights overflow, no result is right or wrong.
    comparable_NH = y_NH.abs() < torch.finfo(given_NH.dtype).max / 2
    error_NH = (given_NH.to(y_NH.dtype) - y_NH).abs()
    wrong_NH = ~(error_NH <= allowed_NH) & comparable_NH
    if not wrong_NH.any():
        return ""
    # A value that is not finite counts as the largest difference.
    excess_NH = torch.where(wrong_NH, (error_NH - allowed_NH).nan_to_num(torch.inf), -1)
    row, column = divmod(int(excess_NH.argmax()), y_NH.shape[1])
    given, right, allowed = (float(t[row, column]) for t in (given_NH, y_NH, allowed_NH))
    return (
        f"{int(wrong_NH.sum())} of {y_NH.numel()} numbers are wrong: at worst (row {row}, column {column}) {given:.6g} "
        f"in place of {right:.6g}, where {allowed:.2g} may be rounding"
    )
