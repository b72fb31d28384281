"""Measure cases: run contestants on the same weights and inputs, compare their outputs, and time them in turn."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

STOCK = "stock"
"""transformers' contestant: a case's reference, unless the case names another."""
OURS = "llamoe"
ROUNDS = 7
SECONDS = 1.0
"""Seconds, for each contestant, after which no round begins; three rounds are always run."""
SAMPLE = 50e-3
"""Least length of a sample in seconds; a shorter run is repeated until a sample is that long."""


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed difference of outputs from the reference's, in standard deviations of the reference's output.

    Attributes:
        largest: limit for each element.
        mean: limit for the root mean square over all elements.
    """

    largest: float
    mean: float


FLOAT32 = Tolerance(1e-3, 1e-4)
"""Allows another order of sums, by which outputs differed by up to 5e-6 (mean 6e-7), gradients 6e-5 (7e-7)."""
BFLOAT16 = Tolerance(0.25, 0.03)
"""Four times the error of a value of five deviations that is rounded six times, each by 2^-9 of it."""


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """Return the tolerance for outputs in a dtype."""
    return FLOAT32 if dtype == torch.float32 else BFLOAT16


def tolerance_of_gradients(dtype: torch.dtype) -> Tolerance:
    """Return the tolerance for gradients, which is larger, as gradients are sums over many tokens."""
    outputs = tolerance_of(dtype)
    return Tolerance(20 * outputs.largest, 3 * outputs.mean)


@dataclass
class Case:
    """One computation and its contestants.

    Attributes:
        name: unique in its group.
        runs: by contestant, a function that computes once and returns a tensor or a list of tensors to compare.
        tolerance: for the outputs; None if contestants compute different functions, as quantized models do.
        reference: the contestant with which the others are compared.
        at_most: by contestant, the largest allowed time over the reference's.
        memory_at_most: by contestant, the largest allowed peak memory over the reference's. Memory is measured only if
            this has an entry.
        parts: number of equal parts of a run, such as tokens; the recorded times are those of one part.
        before: called before each run whose memory is measured.
    """

    name: str
    runs: dict[str, Callable[[], Any]]
    tolerance: Tolerance | None
    reference: str = STOCK
    at_most: dict[str, float] = field(default_factory=dict)
    memory_at_most: dict[str, float] = field(default_factory=dict)
    parts: int = 1
    before: Callable[[], Any] | None = None


class LeftOut(Exception):
    """Raised if a group of cases cannot run on this machine, with the reason."""


class ProcessorClock:
    """A clock of processor time that fills the caches with other data before each sample.

    In a model, a layer's weights have left the caches before the layer runs again. Without the other data, they would
    stay in the caches between runs, and runs would be faster than in a model. Processor time excludes other load on
    the machine.
    """

    def __init__(self, cache_bytes: int | None = None):
        self.device = torch.device("cpu")
        self._elsewhere = torch.zeros(2 * (cache_bytes or last_cache_bytes()) // 8, dtype=torch.int64)

    def sample(self, run: Callable[[], Any], repeats: int) -> float:
        """Return the seconds of one run, as the mean of `repeats` runs."""
        # Fill the caches by reading: data that was written would be flushed during the runs.
        self._elsewhere.sum()
        begun = time.process_time()
        for _ in range(repeats):
            run()
        return (time.process_time() - begun) / repeats


class DeviceClock:
    """A clock of the time between two CUDA events around consecutive runs."""

    def __init__(self, device: torch.device):
        self.device = device

    def sample(self, run: Callable[[], Any], repeats: int) -> float:
        """Return the seconds of one run, as the mean of `repeats` runs."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1e3 / repeats


Clock = ProcessorClock | DeviceClock


def last_cache_bytes() -> int:
    """Return the size of the processor's last cache; 64 MiB where the system does not report it."""
    units = {"K": 2**10, "M": 2**20}
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    texts = [path.read_text().strip() for path in sizes]
    return max((int(text[:-1]) * units[text[-1]] for text in texts if text[-1:] in units), default=2**26)


def measure(case: Case, clock: Clock, rounds: int = ROUNDS) -> dict:
    """Compare outputs, memory and time of a case's contestants.

    Returns:
        the case's name and limits; for each contestant the seconds of all rounds with their median, the median over
        rounds of the ratio to the reference in the same round (the machine may slow down for a round), and the peak
        memory; and `failures`, which lists contestants that raised an error and outputs that differ.
    """
    rows: dict[str, dict] = {}
    failures: list[str] = []
    expected: list[torch.Tensor] = []
    for name, run in case.runs.items():
        row: dict[str, Any] = {}
        try:
            # Do not time this first run: it includes one-time work.
            outputs = tensors_of(run())
            if case.memory_at_most:
                if case.before:
                    case.before()
                row["peak_bytes"] = peak_of(run, clock.device)[1]
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
            continue
        rows[name] = row
        if case.tolerance and expected:
            largest, mean = difference(outputs, expected)
            # This comparison is false for NaN, so that NaN fails.
            if not (largest <= case.tolerance.largest and mean <= case.tolerance.mean):
                failures.append(
                    f"{name} differs from {case.reference} by {largest:.3g}, {mean:.3g} deviations"
                )
        if name == case.reference:
            expected = [tensor.detach().clone() for tensor in outputs]
        del outputs
        free(clock.device)
    del expected
    _time_in_turn({name: case.runs[name] for name in rows}, rows, clock, rounds)
    reference = rows.get(case.reference)
    for row in rows.values():
        row["seconds"] = [seconds / case.parts for seconds in row["seconds"]]
        row["median"] = statistics.median(row["seconds"])
    for row in rows.values():
        if reference is not None:
            pairs = zip(row["seconds"], reference["seconds"], strict=True)
            row["ratio"] = statistics.median(seconds / other for seconds, other in pairs)
            if "peak_bytes" in row:
                row["memory_ratio"] = row["peak_bytes"] / max(1, reference["peak_bytes"])
    limits = {"at_most": case.at_most, "memory_at_most": case.memory_at_most}
    return {"case": case.name, "reference": case.reference, "rows": rows, **limits, "failures": failures}


def _time_in_turn(runs: dict[str, Callable], rows: dict[str, dict], clock: Clock, rounds: int) -> None:
    repeats = {name: max(1, round(SAMPLE / max(clock.sample(run, 1), 1e-7))) for name, run in runs.items()}
    for row in rows.values():
        row["seconds"] = []
    spent = 0.0
    for number in range(rounds):
        if number >= 3 and spent > SECONDS * len(runs):
            break
        # The order alternates, so that no contestant is always first.
        for name in list(runs)[:: 1 if number % 2 == 0 else -1]:
            seconds = clock.sample(runs[name], repeats[name])
            rows[name]["seconds"].append(seconds)
            spent += seconds * repeats[name]


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Return a run's result as a list of tensors."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [value for value in result or () if isinstance(value, torch.Tensor)]


def difference(given: list[torch.Tensor], expected: list[torch.Tensor]) -> tuple[float, float]:
    """Return the largest and the root mean square difference, in standard deviations of each expected tensor.

    A deviation counts as at least a hundredth of the largest one of any tensor.
    """
    floor = max(tensor.float().std().item() for tensor in expected) / 100
    largest, mean = [], []
    for one, other in zip(given, expected, strict=True):
        apart = one.detach().float() - other.float()
        scale = max(other.float().std().item(), floor) or 1.0
        largest.append(apart.abs().max().item() / scale)
        mean.append(apart.square().mean().sqrt().item() / scale)
    return max(largest), max(mean)


def peak_of(run: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """Run once; return the result, and the bytes by which memory was larger at its peak than before.

    On a CPU, torch's profiler records what torch's allocator hands out, scratch space of operators included, but not
    mapped files. On CUDA, the allocator itself counts.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - base
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as recorded:
        result = run()
    events = recorded.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = peak = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        held += nbytes
        peak = max(peak, held)
    # Add memory that torch's allocator did not hand out, such as mapped gradients of experts.
    storages = [tensor.untyped_storage() for tensor in tensors_of(result)]
    foreign = {storage.data_ptr(): storage.nbytes() for storage in storages if not storage.resizable()}
    return result, peak + sum(foreign.values())


def free(device: torch.device) -> None:
    """Free unreferenced memory, and the device's cached blocks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measured(group: Iterator[Case | dict], clock: Clock, rounds: int = ROUNDS) -> Iterator[dict]:
    """Yield the results of a group, measuring its cases; its dicts are results of other processes already."""
    for case in group:
        yield case if isinstance(case, dict) else measure(case, clock, rounds)
        del case
        free(clock.device)
