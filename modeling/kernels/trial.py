"""Trial of the kernels for few rows: whether they are right on this device, and up to how many rows they are faster.

They are launched with every number of rows at which something else is compiled or launched, and compared with the same
mathematics in torch. A kernel may do worse than return wrong numbers: an aborting compiler ends the process, and an
illegal access destroys all of the process's data on the device. So a separate process goes first, with made-up experts
in the sizes, strides and dtype of the real ones. It costs a few seconds, a second context on the device, and the memory
of one expert. Where no second process is possible (no memory for its context, a device in exclusive mode) this process
tries the made-up experts.

Both made-up and real experts are tried. Real weights that are zero or not finite make every kernel look right; only
real ones have addresses far inside large stacks. The trial allocates on the device, beside the made-up expert:
`TRITON_MAX_ROWS` rows a few times over, and two pieces of a weight of 32 MiB.

Shapes: N rows, E experts, H hidden size, I intermediate size, F = 2 I; of a single product I columns in, O out.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from .few_rows import TRITON_MAX_ROWS, few_rows_experts, row_counts_of_launches

Way = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes experts: rows `[N, H]` and expert ids `[N, 1]` to `[N, H]`."""

# Elements of a weight that are cast to a wider dtype at once.
_PIECE = 1 << 22
# Seconds after which a process that launches kernels counts as hung.
_PATIENCE = 600.0
# What that process prints before the first launch, and before its answer.
_READY, _ANSWER = "llamoe: ready", "llamoe: answer "
_MAIN = """
import json, sys
task = json.loads(sys.argv[1])
sys.path[:] = task["path"]
from llamoe.modeling.kernels.trial import run_task
run_task(task)
"""


def device_facts(device: torch.device) -> dict[str, str]:
    """What compiles and runs kernels: the device and its driver."""
    if device.type != "cuda":
        return {"device": "Triton's interpreter", "capability": "", "shared_memory": "", "driver": ""}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "shared_memory": str(properties.shared_memory_per_block_optin),
        "driver": _driver(),
    }


def _driver() -> str:
    """The driver's release from its module, else (under WSL) its CUDA version."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        pass
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return str(number.value)


def describe(gate_up_EHF: torch.Tensor, down_EIH: torch.Tensor) -> str:
    """What decides how kernels are compiled and launched for these experts, as text: dtype, sizes and strides.

    Making a text turns sizes that a compiler leaves open into numbers.
    """
    num_experts, intermediate_size, hidden_size = down_EIH.shape
    e, h, f = gate_up_EHF.stride()
    e2, i2, h2 = down_EIH.stride()
    sizes = f"{num_experts} {hidden_size} {intermediate_size}"
    return f"{down_EIH.dtype} {sizes} {e} {h} {f} {e2} {i2} {h2}"


def made_up_experts(description: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random experts for a description, in little more memory than one expert.

    Each begins a few elements after the previous one and shares the rest with it. No two are equal.

    Returns:
        `[E, H, F]` and `[E, I, H]`, scaled so that rows of deviation one have results of deviation about one.
    """
    name, *numbers = description.split()
    dtype = getattr(torch, name.removeprefix("torch."))
    num_experts, hidden, intermediate, *strides = map(int, numbers)
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int, stride: list[int]) -> torch.Tensor:
        # A multiple of 16 where the real stride is: kernels are compiled for that.
        step = 17 if stride[0] % 16 else 16
        size = 1 + (num_experts - 1) * step + (rows - 1) * stride[1] + (columns - 1) * stride[2]
        values = torch.randn(size, dtype=dtype, device=device, generator=generator)
        return values.as_strided((num_experts, rows, columns), (step, *stride[1:]))

    gate_up_EHF = draw(hidden, 2 * intermediate, strides[:3])
    down_EIH = draw(intermediate, hidden, strides[3:])
    # In place, and only once for each element that experts share.
    gate_up_EHF.as_strided(_flat(gate_up_EHF), (1,)).mul_(2 / hidden**0.5)
    down_EIH.as_strided(_flat(down_EIH), (1,)).mul_(intermediate**-0.5)
    return gate_up_EHF, down_EIH


def _flat(tensor: torch.Tensor) -> tuple[int]:
    return (tensor.untyped_storage().nbytes() // tensor.itemsize,)


@torch.no_grad()
def find_difference(
    gate_up_EHF: torch.Tensor, down_EIH: torch.Tensor, before_launch: Callable[[], None] = lambda: None
) -> str | None:
    """Description of how the kernels differ from their plain twin, or fail; None if they are right.

    Rows are random, the same each time, and large enough for gates of about one; the caller's random state is kept.
    Three kinds of ids are tried: spread over all experts (as far as `TRITON_MAX_ROWS` rows reach, the first and the
    last among them) with every seventh row without an expert; all the last expert's; all without an expert.

    The experts have 16 or 32 bits and any strides, on a device where `few_rows_fits`.

    Raises:
        torch.OutOfMemoryError: no memory for the comparison.
    """
    device, dtype = down_EIH.device, down_EIH.dtype
    num_experts, intermediate, hidden = down_EIH.shape
    generator = torch.Generator(device).manual_seed(1)
    deviation = gate_up_EHF[-1, :, :64].float().square().mean().sqrt().item() * hidden**0.5
    scale = min(2 / deviation, 100.0) if 0 < deviation < float("inf") else 1.0
    x_NH = torch.randn(TRITON_MAX_ROWS, hidden, device=device, generator=generator).mul_(scale).to(dtype)

    place_N = torch.arange(TRITON_MAX_ROWS, device=device)
    spread_N = num_experts - 1 - place_N % num_experts
    if num_experts > TRITON_MAX_ROWS:
        spread_N = torch.randint(num_experts, (TRITON_MAX_ROWS,), device=device, generator=generator)
        spread_N[1], spread_N[2] = 0, num_experts - 1
    none_N = num_experts + place_N % 3
    spread_N = torch.where(place_N % 7 == 0, none_N, spread_N)
    ids = spread_N, torch.full_like(spread_N, num_experts - 1), none_N
    twins = [_plain_twin(x_NH, gate_up_EHF, down_EIH, ids_N) for ids_N in ids]

    before_launch()
    for num_rows in row_counts_of_launches(num_experts, hidden, intermediate, dtype.itemsize):
        try:
            for ids_N, (y_NH, allowed_NH) in zip(ids, twins, strict=True):
                given_NH = few_rows_experts(x_NH[:num_rows], gate_up_EHF, down_EIH, ids_N[:num_rows])
                difference = _difference(given_NH, y_NH[:num_rows], allowed_NH[:num_rows])
                if difference:
                    return f"with {num_rows} rows {difference}"
        except Exception as error:
            if is_lack_of_memory(error):
                raise torch.OutOfMemoryError(*error.args) from error
            return f"with {num_rows} rows it fails: {first_line(error)}"
    return None


def is_lack_of_memory(error: Exception) -> bool:
    """Whether an error only says that the device is full: from torch's allocator, Triton's loader or cuBLAS."""
    text = str(error).lower()
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text
        or "cublas_status_alloc_failed" in text
    )


def _plain_twin(
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

    def round_(values: torch.Tensor) -> torch.Tensor:
        return values.to(dtype).to(wide)

    for expert in expert_ids_N.unique().tolist():
        if expert < num_experts:
            rows = (expert_ids_N == expert).nonzero().squeeze(1)
            gate, up = round_(_multiply(x_NH[rows].to(wide), gate_up_EHF[expert])).chunk(2, dim=-1)
            hidden_NI = round_(round_(F.silu(gate)) * up)
            y_NH[rows] = _multiply(hidden_NI, down_EIH[expert])
            spread = _multiply(hidden_NI.square(), down_EIH[expert], torch.square).sqrt()
            allowed_NH[rows] = step * y_NH[rows].abs() + of_spread * spread
    return y_NH, allowed_NH


def _multiply(
    x_NI: torch.Tensor,
    weight_IO: torch.Tensor,
    function: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Multiply by a weight, or a function of it, cast to the dtype of `x_NI` piece by piece."""
    pieces = []
    for piece in weight_IO.split(max(1, _PIECE // len(weight_IO)), dim=1):
        piece = piece.to(x_NI.dtype)
        pieces.append(x_NI @ (piece if function is None else function(piece)))
    return torch.cat(pieces, dim=1)


def _difference(given_NH: torch.Tensor, y_NH: torch.Tensor, allowed_NH: torch.Tensor) -> str | None:
    # Where weights overflow, no result is right or wrong.
    comparable_NH = y_NH.abs() < torch.finfo(given_NH.dtype).max / 2
    error_NH = (given_NH.to(y_NH.dtype) - y_NH).abs()
    wrong_NH = ~(error_NH <= allowed_NH) & comparable_NH
    num_wrong = int(wrong_NH.sum())
    if num_wrong == 0:
        return None
    # A value that is not finite counts as the largest difference.
    excess_NH = torch.where(wrong_NH, (error_NH - allowed_NH).nan_to_num(torch.inf), -1)
    row, column = divmod(int(excess_NH.argmax()), y_NH.shape[1])
    given, right, allowed = (float(t[row, column]) for t in (given_NH, y_NH, allowed_NH))
    return (
        f"{num_wrong} of {y_NH.numel()} numbers are wrong: at worst (row {row}, column {column}) {given:.6g} in "
        f"place of {right:.6g}, where {allowed:.2g} may be rounding"
    )


def first_line(error: Exception) -> str:
    """Type of an error, and the beginning of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def find_difference_apart(description: str, device: torch.device) -> str | None:
    """`find_difference` with made-up experts, in a separate process; in this one if none can be started.

    Raises:
        torch.OutOfMemoryError: neither process has enough memory.
    """
    task = {"path": sys.path, "device": str(device), "facts": device_facts(device), "experts": description}
    # In a frozen program, or one that embeds Python, `sys.executable` would start that program again.
    is_python = "python" in Path(sys.executable or "").name.lower() and not getattr(sys, "frozen", False)
    answer = _run_apart(task) if is_python else None
    if answer is not None:
        return answer or None
    return find_difference(*made_up_experts(description, device))


def _run_apart(task: dict) -> str | None:
    """Run a task in a separate process: what it found, empty if nothing; None if the outcome is unknown."""
    try:
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            try:
                done = subprocess.run(
                    [sys.executable, "-c", _MAIN, json.dumps(task)],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=_PATIENCE,
                    check=False,
                )
                ending = f"the process that launched it ended with {done.returncode}"
            except subprocess.TimeoutExpired:
                ending = f"the process that launched it had not ended after {_PATIENCE:.0f} s"
            file.seek(0)
            lines = [line for line in file.read().splitlines() if line.strip()]
    except OSError:
        return None
    if _READY not in lines:
        return None
    said = lines[lines.index(_READY) + 1 :]
    for line in said:
        if line.startswith(_ANSWER):
            return json.loads(line.removeprefix(_ANSWER))
    return f"{ending}{': ' + said[-1][:300] if said else ''}"


def run_task(task: dict) -> None:
    """Entry of the separate process: compare, and print the answer."""
    device = torch.device(task["device"])
    if device_facts(device) != task["facts"]:
        sys.exit(f"{device} is another device here.")
    experts = made_up_experts(task["experts"], device)
    try:
        answer = find_difference(*experts, before_launch=partial(print, _READY, flush=True)) or ""
    except torch.OutOfMemoryError:
        answer = None
    print(_ANSWER + json.dumps(answer), flush=True)


@torch.no_grad()
def find_fastest_rows(kernel: Way, other: Way, down_EIH: torch.Tensor) -> tuple[int, str]:
    """Up to how many rows the kernel is no slower than the way it would replace, 0 for never; the times in words.

    Rows and ids are random, the same each time. Powers of two are tried up to `TRITON_MAX_ROWS`, until the kernel is
    slower. `down_EIH` are the experts' second weights.
    """
    num_experts, _, hidden = down_EIH.shape
    generator = torch.Generator(down_EIH.device).manual_seed(2)
    fastest, times = 0, []
    for num_rows in (1 << power for power in range(TRITON_MAX_ROWS.bit_length())):
        x_NH = torch.randn(num_rows, hidden, device=down_EIH.device, generator=generator).to(down_EIH.dtype)
        ids_N1 = torch.randint(num_experts, (num_rows, 1), device=down_EIH.device, generator=generator)
        of_kernel, of_other = (
            _milliseconds(partial(way, x_NH, ids_N1), x_NH.device) for way in (kernel, other)
        )
        times.append(f"{num_rows}: {of_kernel:.3g} and {of_other:.3g} ms")
        if of_kernel > of_other:
            break
        fastest = num_rows
    return fastest, ", ".join(times)


def _milliseconds(
    run: Callable[[], object], device: torch.device, rounds: int = 5, repeats: int = 10
) -> float:
    """Time of a call in milliseconds: the best of some rounds, the first of which only warms up."""
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / repeats)
        else:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1000)
    return min(times[1:])
