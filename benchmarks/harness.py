"""Runs a case: contestants on the same weights and inputs are compared, then timed in turn in one process."""

import gc
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import OURS, REFERENCE, is_of
from .clocks import Clock
from .hardware import Rates
from .memory import peak_of
from .roofline import Work


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed distance of outputs from the reference's.

    Attributes:
        largest: largest difference, in standard deviations of the reference's output.
        mean: root mean square of the differences, in the same unit.
        why: reason for the numbers.
    """

    largest: float
    mean: float
    why: str


# Measured on the CPU: at most 5e-6 and 6e-7 for outputs, 6e-5 and 7e-7 for gradients.
IN_FLOAT32 = Tolerance(1e-3, 1e-4, "the same sums in another order, in float32")
# A rounding is 2^-9 of a value; a value of 5 standard deviations is rounded about six times.
IN_BFLOAT16 = Tolerance(0.25, 0.03, "the same sums in another order, rounded to bfloat16 at each step")


def tolerance_of(dtype: torch.dtype, layers: int = 1) -> Tolerance:
    """The tolerance for outputs in a dtype; differences of layers add up like a random walk."""
    one = IN_FLOAT32 if dtype == torch.float32 else IN_BFLOAT16
    return Tolerance(one.largest * layers**0.5, one.mean * layers**0.5, one.why)


def tolerance_of_gradients(dtype: torch.dtype, layers: int | None = None) -> Tolerance:
    """The tolerance for gradients of a block, or of a decoder with this many layers.

    Measured in bfloat16 on a CPU: at most 0.22 and 0.006 for a block, 0.31 and 0.026 for a decoder.
    """
    own = tolerance_of(dtype, layers or 1)
    if layers is None:
        why = "gradients are sums over many tokens; " + own.why
        limits = (10 * own.largest, own.mean) if dtype == torch.float32 else (0.5, 0.02)
    else:
        why = "gradients through all layers; " + own.why
        limits = (20 * own.largest, 3 * own.mean) if dtype == torch.float32 else (2.0, 0.08)
    return Tolerance(*limits, why)


ROUNDS = 3
"""Least number of rounds of a case that sets no other."""
SURE_ROUNDS = 7
"""Least number of rounds of cases whose target is to be never slower."""


@dataclass
class Contestant:
    """One way to compute a case.

    Attributes:
        run: computes it once.
        outputs: takes the result of `run` and returns the tensors to compare; None where it computes another function.
        warm_up: number of runs before measuring, for contestants that compile.
        has_own_pool: whether its memory is where no counter sees a single run: in a CUDA graph's pool, in another
            library, from several threads.
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], list[torch.Tensor]] | None = lambda result: [result]
    warm_up: int = 0
    has_own_pool: bool = False


@dataclass
class Case:
    """One computation and its contestants.

    Attributes:
        name: unique in its group.
        contestants: by name; a ratio is the time of `reference` over theirs. Another mode of one is "name, mode".
        work: the least that has to be read and computed.
        tolerance: for the outputs.
        facts: keys for tables and figures: phase, tokens, experts and so on.
        skipped: contestants that are not run, with the reason.
        before: called before each run whose memory is measured.
        least: least number of rounds.
        reference: the contestant that the others are compared with.
        parts: number of equal parts of each run, such as tokens; times are those of one.
        clock: measures in place of the session's clock.
    """

    name: str
    contestants: dict[str, Contestant]
    work: Work | None
    tolerance: Tolerance
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    before: Callable[[], Any] | None = None
    least: int = ROUNDS
    reference: str = REFERENCE
    parts: int = 1
    clock: Clock | None = None


class LeftOut(Exception):
    """A group cannot be run here; says why in a part of a sentence."""


@dataclass(frozen=True)
class Budget:
    """Length of a case's measurement: at least `least` rounds, then until `seconds` have passed or `most` rounds.

    Without `least`, each case sets its own.
    """

    seconds: float = 1.0
    least: int | None = None
    most: int = 15


# A group yields its cases one after another, receives each result, and frees what it built when it ends. A case that
# cannot be measured in this process is yielded as a function that measures it.
Cases = Generator[Case | Callable[[Budget], dict], dict, None]
Group = Callable[[], Cases]


def run_group(group: Group, clock: Clock, rates: Rates, budget: Budget) -> Iterator[dict]:
    """Measure each case of a group; yield the results as plain data."""
    cases = group()
    result = None
    while True:
        try:
            # None starts the generator.
            case = cases.send(result)
        except StopIteration:
            break
        if isinstance(case, Case):
            result = measure(case, case.clock or clock, rates, budget)
        else:
            result = case(budget)
        del case
        free(clock.device)
        yield result
    free(clock.device)


def free(device: torch.device) -> None:
    """Free unreferenced memory, and the device's cached blocks."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def measure(case: Case, clock: Clock, rates: Rates, budget: Budget) -> dict:
    """Compare, weigh and time the contestants of a case.

    A contestant that runs out of memory is skipped with a note, and so is another's contestant that fails. `failures`
    gets our contestants that fail, all whose outputs differ, and errors outside the contestants.
    """
    try:
        return _measure(case, clock, rates, budget)
    except Exception as error:
        skipped = {name: {"skipped": reason} for name, reason in case.skipped.items()}
        failures = [f"the case failed: {reason_of(error)}"]
        return {"case": case.name, **case.facts, "contestants": skipped, "failures": failures}


def _measure(case: Case, clock: Clock, rates: Rates, budget: Budget) -> dict:
    rows: dict[str, dict] = {name: {"skipped": reason} for name, reason in case.skipped.items()}
    failures: list[str] = []
    expected: list[torch.Tensor] | None = None
    running = {}
    for name, contestant in case.contestants.items():
        if name in case.skipped:
            continue
        row = rows[name] = {}
        try:
            outputs, row["peak_bytes"], taken = _first_run(contestant, clock, case.before)
            if outputs is not None and expected is not None:
                row["difference"] = difference(outputs, expected)
                if problem := beyond(row["difference"], case.tolerance):
                    failures.append(f"{name} differs from {case.reference}: {problem}")
            if name == case.reference and outputs is not None:
                expected = [tensor.detach().clone() for tensor in outputs]
            del outputs
            running[name] = (contestant, taken)
        except Exception as error:
            _give_up(name, row, error, failures)
        free(clock.device)
    del expected
    free(clock.device)
    if case.before:
        case.before()
    least = case.least if budget.least is None else budget.least
    samples, errors = _time_in_turn(running, clock, least, budget)
    for name in samples:
        rows[name]["seconds"] = [seconds / case.parts for seconds in samples[name]]
    for name, error in errors.items():
        _give_up(name, rows[name], error, failures)
    result = {"case": case.name, **case.facts, "contestants": {name: rows[name] for name in rows}}
    result["tolerance"] = vars(case.tolerance)
    if case.work:
        seconds, bound = rates.ideal_seconds(case.work.nbytes, case.work.flops)
        result["work"] = {**vars(case.work), "ideal_seconds": seconds, "bound": bound}
    if case.clock:
        result["clock"] = case.clock.unit
    summarize(result, case.reference)
    return {**result, "failures": failures}


def _give_up(name: str, row: dict, error: Exception, failures: list[str]) -> None:
    row["skipped"] = reason_of(error)
    if is_of(name, OURS) and not isinstance(error, torch.OutOfMemoryError):
        failures.append(f"{name} failed: {row['skipped']}")


def _first_run(
    contestant: Contestant, clock: Clock, before: Callable[[], Any] | None
) -> tuple[list[torch.Tensor] | None, int | None, float]:
    """Outputs, peak memory and seconds after the warm-up runs; a device's first run allocates workspaces."""
    least = 1 if clock.device.type == "cuda" else 0
    for _ in range(max(contestant.warm_up, least)):
        contestant.run()
    if before:
        before()
    begun = time.perf_counter()
    if contestant.has_own_pool:
        result, peak = contestant.run(), None
    else:
        result, peak = peak_of(contestant.run, clock.device)
    taken = time.perf_counter() - begun
    return (None if contestant.outputs is None else contestant.outputs(result)), peak, taken


def reason_of(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _time_in_turn(
    running: Mapping[str, tuple[Contestant, float]], clock: Clock, least: int, budget: Budget
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Samples of the contestants that finished all rounds, and the errors of the others."""
    repeats: dict[str, int] = {}
    samples: dict[str, list[float]] = {}
    errors: dict[str, Exception] = {}
    for name, (contestant, taken) in running.items():
        try:
            # A first run includes one-time work. A long run is measured once, so its first run must do.
            if taken < 1:
                taken = clock.sample(contestant.run, 1)
        except Exception as error:
            # A traceback would hold tensors.
            errors[name] = error.with_traceback(None)
            continue
        repeats[name] = max(1, round(clock.shortest / max(taken, 1e-7)))
        samples[name] = []
    spent = 0.0
    for round_ in range(max(least, budget.most)):
        if not samples or (round_ >= least and spent >= budget.seconds):
            break
        # The order alternates, so that no contestant is always first.
        for name in list(samples)[:: 1 if round_ % 2 == 0 else -1]:
            try:
                seconds = clock.sample(running[name][0].run, repeats[name])
            except Exception as error:
                errors[name] = error.with_traceback(None)
                del samples[name]
                continue
            samples[name].append(seconds)
            spent += seconds * repeats[name]
    return samples, errors


def difference(given: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, float]:
    """Largest and root mean square difference over all tensors, each in its own standard deviations.

    A tensor that varies less than a hundredth of the most varying one is measured in units of that hundredth.
    """
    if len(given) != len(expected):
        raise ValueError(f"{len(given)} outputs, and {len(expected)} of the reference")
    deviations = [_deviation(tensor) for tensor in expected]
    floor = max(deviations) / 100
    largest = mean = 0.0
    for one, other, deviation in zip(given, expected, deviations, strict=True):
        if one.shape != other.shape:
            raise ValueError(
                f"an output of shape {list(one.shape)}, and {list(other.shape)} of the reference"
            )
        scale = max(deviation, floor) or 1.0
        squares = count = 0.0
        for piece, its in zip(_pieces(one.detach()), _pieces(other), strict=True):
            delta = piece - its
            highest = delta.abs().max().item()
            # Written so that NaN is kept.
            largest = highest / scale if not highest / scale <= largest else largest
            squares += delta.square().sum().item()
            count += delta.numel()
        one_mean = (squares / count) ** 0.5 / scale
        mean = one_mean if not one_mean <= mean else mean
    return {"largest": largest, "mean": mean}


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    # A float copy of everything at once would need more memory than the case itself.
    return (piece.float() for piece in tensor.reshape(-1).split(2**26))


def _deviation(tensor: torch.Tensor) -> float:
    mean = sum(piece.sum().item() for piece in _pieces(tensor)) / tensor.numel()
    squares = sum((piece - mean).square().sum().item() for piece in _pieces(tensor))
    return (squares / tensor.numel()) ** 0.5


def beyond(found: Mapping[str, float], tolerance: Tolerance) -> str:
    """The parts of a difference that exceed the tolerance, in words; empty if none do."""
    limits = {"largest": tolerance.largest, "mean": tolerance.mean}
    return ", ".join(
        f"{kind} difference of {found[kind]:.3g} deviations, at most {limit:g} allowed ({tolerance.why})"
        for kind, limit in limits.items()
        if not found[kind] <= limit
    )


def summarize(result: dict, reference_name: str) -> None:
    """Add medians, quartiles, ratios and fractions of the roofline to the rows."""
    rows = result["contestants"]
    reference = rows.get(reference_name, {}).get("seconds")
    for row in rows.values():
        if not row.get("seconds"):
            continue
        row["median"] = statistics.median(row["seconds"])
        row["quartiles"] = quartiles(row["seconds"])
        if reference:
            # Ratios within a round, since a slow phase of the machine slows both.
            ratios = [theirs / own for theirs, own in zip(reference, row["seconds"], strict=True)]
            row["ratio"] = statistics.median(ratios)
            row["ratio_quartiles"] = quartiles(ratios)
        if "work" in result:
            row["roofline"] = result["work"]["ideal_seconds"] / row["median"]


def quartiles(values: list[float]) -> list[float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]
