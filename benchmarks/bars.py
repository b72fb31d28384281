"""Targets for the figures, and whether they are reached. These are no tests, since a busy machine would fail them."""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from . import AGAIN, OURS, REFERENCE, is_of
from .clocks import WallClock

PEERS = ("grouped_mm", "batched_mm")
NOISE = 0.03
"""Slowdown against the fastest peer that still counts as equal."""
LEAST_NOISE = 0.02
"""Slowdown against stock that still counts as equal; more does where stock against itself varies more."""
ASIDE = 1e6
"""Bytes above the leanest peer that still count as equal."""


@dataclass(frozen=True)
class Bar:
    """A target: a number of the results, and its limit.

    Attributes:
        text: description of the number.
        value: the number, or None if the results lack it.
        limit: the least or the largest value.
        at_most: whether the limit is the largest value.
        unit: unit of the number.
        allowance: how far below the least value still counts as reached, from the results.
    """

    text: str
    value: Callable[["Results"], float | None]
    limit: float
    at_most: bool = False
    unit: str = "×"
    allowance: Callable[["Results"], float] | None = None

    def measured(self, found: "Results") -> str:
        """The number with its unit, or "not measured"."""
        value = self.value(found)
        return "not measured" if value is None else f"{value:.3g}{self.unit}"

    def judged(self, found: "Results") -> tuple[str, str, str, bool | None]:
        """Target, limit, measured value, and whether the target is reached: None if it was not measured."""
        text, limit, value = self.text, self.limit, self.value(found)
        if self.allowance:
            noise = self.allowance(found)
            text += f" (median; {noise:.2g} less is noise, since stock measured twice differs by as much)"
            limit -= noise
        bound = f"{'at most' if self.at_most else 'at least'} {limit:.3g}{self.unit}"
        is_reached = None if value is None else value <= limit if self.at_most else value >= limit
        return text, bound, self.measured(found), is_reached


class Results:
    """The cases of a results file, found by their facts."""

    def __init__(self, results: dict):
        self.cases = results.get("cases", [])

    def find(self, groups: str | Iterable[str], **facts) -> list[dict]:
        """Cases of some groups; a fact is a value, or a function that tells whether a value matches."""
        groups = [groups] if isinstance(groups, str) else list(groups)
        return [
            case
            for case in self.cases
            if case["group"] in groups
            and all(
                name in case and (wanted(case[name]) if callable(wanted) else case[name] == wanted)
                for name, wanted in facts.items()
            )
        ]

    def ratio(self, groups: str | Iterable[str], **facts) -> float | None:
        """Time of stock's fastest way over ours; the smallest over the cases."""
        return least(ratio_of_fastest(case) for case in self.find(groups, **facts))

    def noise(self, groups: str | Iterable[str]) -> float:
        """Distance from one of the ratio of stock against itself, between medians; the largest over the cases."""
        rows = (case["contestants"].get(AGAIN, {}) for case in self.find(groups))
        return max([LEAST_NOISE, *(abs(1 - row["ratio"]) for row in rows if "ratio" in row)])

    def ratio_of_peers(self, groups: str | Iterable[str], **facts) -> float | None:
        """The fastest peer's time over ours; the smallest over token counts. "-tuned" groups add ways to theirs."""
        groups = [groups] if isinstance(groups, str) else list(groups)
        ways: dict[tuple, dict[str, list[float]]] = {}
        for case in self.find([*groups, *(f"{group}{TUNED}" for group in groups)], **facts):
            key = tuple(case.get(fact) for fact in ("tokens", "routing", "repeated"))
            times = ways.setdefault((case["group"].removesuffix(TUNED), *key), {"ours": [], "theirs": []})
            for name, row in case["contestants"].items():
                if "median" in row and is_of(name, OURS, *PEERS):
                    times["ours" if is_of(name, OURS) else "theirs"].append(row["median"])
        return least(
            min(times["theirs"]) / min(times["ours"])
            for times in ways.values()
            if times["ours"] and times["theirs"]
        )

    def roofline(self, groups: str | Iterable[str], **facts) -> float | None:
        """The smallest fraction of the roofline."""
        return least(best(case, "roofline", OURS) for case in self.find(groups, **facts))

    def memory(
        self, groups: str | Iterable[str], others: tuple[str, ...], aside: float = 0, **facts
    ) -> float | None:
        """Our peak memory, less `aside` bytes, over the leanest other's; the largest over the cases that have both."""
        found = []
        for case in self.find(groups, **facts):
            ours = case["contestants"].get(OURS, {}).get("peak_bytes")
            theirs = [
                row["peak_bytes"]
                for name, row in case["contestants"].items()
                if name in others and row.get("peak_bytes")
            ]
            if ours is not None and theirs:
                found.append(max(ours - aside, 0) / min(theirs))
        return max(found, default=None)

    def over(self, ours: str, other: str, **facts) -> float | None:
        """One contestant's time over another's, the median of the rounds; the largest over the cases.

        Wall time has other load in it, which two threads that wait for each other feel most. There the fastest round of
        each counts.
        """
        found = []
        for case in self.find(**facts):
            rows = [case["contestants"].get(name, {}).get("seconds") for name in (ours, other)]
            if all(rows) and case.get("clock") == WallClock.unit:
                found.append(min(rows[0]) / min(rows[1]))
            elif all(rows):
                found.append(statistics.median(one / two for one, two in zip(*rows, strict=True)))
        return max(found, default=None)

    def seconds_a_billion(self, name: str) -> float | None:
        """A contestant's seconds for a billion weights, the largest over the cases that quantize."""
        rows = [
            (case["contestants"].get(name, {}).get("median"), case["weights"])
            for case in self.find("few-bits", phase="quantizing")
        ]
        return max((1e9 * seconds / weights for seconds, weights in rows if seconds), default=None)

    def largest(self, field: str, groups: str = "elsewhere") -> float | None:
        """The largest number that cases of a group have under a name."""
        numbers = (case.get(field) for case in self.find(groups))
        return max((number for number in numbers if number is not None), default=None)

    def loaded(self) -> float | None:
        """Our peak memory while loading, over the checkpoint's bytes."""
        return least(
            case["contestants"].get(OURS, {}).get("peak_bytes", math.inf) / case["nbytes"]
            for case in self.find("loading")
            if "nbytes" in case
        )

    def returned(self) -> float | None:
        """Stock's time until `from_pretrained` returns over ours; the smallest over the cases."""
        rows = [case["contestants"].get(OURS, {}) for case in self.find(LOADING)]
        return least(row.get("returned_ratio") for row in rows)

    def returned_noise(self) -> float:
        """As `noise`, for the time until `from_pretrained` returns."""
        rows = [case["contestants"].get(AGAIN, {}) for case in self.find(LOADING)]
        return max(
            [LEAST_NOISE, *(abs(1 - row["returned_ratio"]) for row in rows if "returned_ratio" in row)]
        )


def best(case: dict, field: str, *who: str) -> float | None:
    """The largest value of a field among some contestants, in any mode."""
    values = (row.get(field) for name, row in case["contestants"].items() if is_of(name, *who))
    return max((value for value in values if value is not None), default=None)


def ratio_of_fastest(case: dict) -> float | None:
    """Time of stock's fastest way, eager or compiled, over the time of our fastest way."""
    ours, stock = best(case, "ratio", OURS), best(case, "ratio", REFERENCE)
    return ours / stock if ours and stock else None


def least(values: Iterable[float | None]) -> float | None:
    """The smallest of the values that are not None."""
    return min((value for value in values if value is not None), default=None)


def _block_bars(
    group: str, what: str, one: float, many: float, tokens: int, in_turn: bool = False
) -> list[Bar]:
    even = dict(routing="uniform")
    bars = [Bar(f"{what}, T = {tokens}", lambda r: r.ratio(group, tokens=tokens, **even), many)]
    for repeated, how in ((False, ", layers in turn"), (True, ", one layer again and again")):
        if in_turn or not repeated:
            bars.append(
                Bar(
                    f"{what}, T = 1" + (how if in_turn else ""),
                    lambda r, repeated=repeated: r.ratio(group, tokens=1, repeated=repeated, **even),
                    one,
                )
            )
    return bars


def _adapter_bars(group: str, what: str, limits: dict[int, float]) -> list[Bar]:
    """A step with LoRA on the experts, over a step of peft's, and over one without adapters."""
    text = f"LoRA on {what}, T = {{}}, step over peft's"
    bars = [
        Bar(text.format(tokens), partial(_over, group, REFERENCE, tokens), limit, at_most=True)
        for tokens, limit in limits.items()
    ]
    return bars + _over_frozen(group, f"LoRA on {what}, T = {{}}, step", tuple(limits), 1.25)


def _over_frozen(group: str, text: str, counts: tuple[int, ...], limit: float) -> list[Bar]:
    return [
        Bar(
            f"{text.format(tokens)} over one without adapters",
            partial(_over, group, "frozen", tokens),
            limit,
            at_most=True,
        )
        for tokens in counts
    ]


def _over(group: str, other: str, tokens: int, found: Results) -> float | None:
    """Our time over another's."""
    return least(
        best(case, "ratio", other) / best(case, "ratio", OURS)
        for case in found.find(group, tokens=tokens)
        if best(case, "ratio", other) and best(case, "ratio", OURS)
    )


def _never_slower(what: str, groups: str | tuple[str, ...]) -> Bar:
    return Bar(what, lambda r: r.ratio(groups), 1.0, allowance=lambda r: r.noise(groups))


def _token_bars() -> list[Bar]:
    """Our time for a token over llama.cpp's, 16 bit against 32, and two threads against one."""
    bars = []
    for ours, theirs, *limits in (
        ("float32", "f32", 1.2, 1.3),
        ("int8", "q8_0", 1.5, 1.8),
        ("int4", "q4_0", 1.4, 1.7),
    ):
        for model, limit in zip(SAVED_MODELS, limits, strict=True):
            text = f"a token, {model} in {ours}, time over llama.cpp's {theirs}"
            value = _over_in("llama.cpp", ours, f"llama.cpp, {theirs}", phase="decode", model=model)
            bars.append(Bar(text, value, limit, at_most=True))
    for model in SAVED_MODELS:
        value = _over_in("llama.cpp", "float32", f"{OURS}, bfloat16", phase="decode", model=model)
        bars.append(Bar(f"a token, {model}, float32 over bfloat16", value, 1.0 - NOISE))
    for ours in ("int8", "int4"):
        for model in SAVED_MODELS:
            value = _over_in("llama.cpp", ours, f"{OURS}, {ours}, 2 threads", phase="threads", model=model)
            bars.append(Bar(f"a token, {model} in {ours}, wall time of one thread over two", value, 1.6))
    return bars


def _few_bits_bars() -> list[Bar]:
    """Prefill in int4 over 16 bit, and the seconds that quantizing takes."""
    bars = []
    for model, limit in zip(SAVED_MODELS, (1.4, 2.2), strict=True):
        value = _over_in("few-bits", "int4", f"{OURS}, bfloat16", phase="prefill", model=model)
        bars.append(Bar(f"prefill of 512 tokens, {model} in int4 over bfloat16", value, limit, at_most=True))
    for how, limit in (("", 20), (" without search", 8)):
        name = f"{OURS}, int4{how}"
        value = partial(Results.seconds_a_billion, name=name)
        bars.append(Bar(f"quantizing a billion weights to int4{how}", value, limit, at_most=True, unit=" s"))
    return bars


def _elsewhere_bars() -> list[Bar]:
    """What experts on disk cost: bytes, hits, memory, and time beside other ways to the same."""
    text = "experts on disk"
    rows = [
        ("bytes read over those of missed experts", "read_over_missed", 1.02, "×"),
        ("hit rate, distance from the simulated one", "hit_rate_error", 0.02, ""),
        ("peak memory beyond all else, the room for experts and one expert", "megabytes_beyond", 200, " MB"),
        ("a token, time over reads through the page cache", "over_page_cache", 1.0 + NOISE, "×"),
        ("a token, time over a mapping with advice", "over_mapped", 1.0 + NOISE, "×"),
        ("a token, time over accelerate's offload", "over_accelerate", 0.5, "×"),
    ]
    return [
        *(
            Bar(f"{text}, {what}", partial(Results.largest, field=field), limit, at_most=True, unit=unit)
            for what, field, limit, unit in rows
        ),
        Bar(
            f"{text}, share of the drive's rate in large reads",
            lambda r: least(case.get("share_of_drive") for case in r.find("elsewhere")),
            0.8,
            unit="",
        ),
    ]


def _over_in(group: str, ours: str, other: str, **facts) -> Callable[[Results], float | None]:
    return partial(Results.over, groups=group, ours=f"{OURS}, {ours}", other=other, **facts)


SAVED_MODELS = ("dense", "mixture")
LOADING = ("loading", "loading-many")
TUNED = "-tuned"
CPU = [
    *_block_bars("block-16", "mixture block, 16 experts", 8, 7.5, 1024, in_turn=True),
    *_block_bars("block-128", "mixture block, 128 experts", 40, 35, 1024, in_turn=True),
    Bar(
        "mixture block, slowest T of 1 to 1024",
        lambda r: r.ratio(("block-16", "block-128"), tokens=lambda count: count <= 1024),
        1.0,
    ),
    Bar("whole decoder, prefill, T = 1024", lambda r: r.ratio("decoder", phase="prefill", tokens=1024), 5),
    Bar("whole decoder, decode, B = 1", lambda r: r.ratio("decoder", phase="decode", tokens=1), 4.5),
    Bar("training step, 16 experts, T = 256", lambda r: r.ratio("training-16"), 4),
    Bar("training step, 128 experts, T = 256", lambda r: r.ratio("training-128"), 8),
    *_adapter_bars("adapters-16", "16 experts", {512: 0.4, 4096: 0.85}),
    *_adapter_bars("adapters-128", "128 experts", {512: 0.15, 4096: 0.4}),
    *_over_frozen("adapters-bfloat16", "LoRA on 16 experts in bfloat16, T = {}, step", (512, 4096), 1.5),
    *_over_frozen("adapters-decode", "decoding B = {} with LoRA on 16 experts", (1, 8, 32), 1.3),
    Bar(
        "LoRA on 128 experts, T = 512, peak memory over peft's",
        lambda r: r.memory("adapters-128", (REFERENCE,), tokens=512),
        0.1,
        at_most=True,
    ),
    Bar(
        "peak memory of the block, 128 experts, T = 1024, over stock's",
        lambda r: r.memory("block-128", (REFERENCE,), tokens=1024),
        1 / 20,
        at_most=True,
    ),
    _never_slower("dense LLaMA, slowest case", "dense"),
    Bar(
        "sliding window of 1,024, T = 16384, attention alone",
        lambda r: r.ratio("window", phase="attention"),
        4,
    ),
    Bar(
        "sliding window of 1,024, T = 16384, peak memory over stock's",
        lambda r: r.memory("window", (REFERENCE,), tokens=16384),
        0.25,
        at_most=True,
    ),
    Bar("Mixtral's block, T = 1", lambda r: r.ratio("mixtral", tokens=1), 1.3),
    Bar("Mixtral's block, slowest case", lambda r: r.ratio("mixtral"), 0.95),
    Bar("Mixtral's block in bfloat16, slowest case", lambda r: r.ratio("mixtral-bfloat16"), 0.95),
    Bar(
        "loading, peak memory over the checkpoint's bytes",
        lambda r: r.loaded(),
        1.1,
        at_most=True,
    ),
    _never_slower("loading and reading once, speed", LOADING),
    Bar(
        "`from_pretrained` alone, speed",
        lambda r: r.returned(),
        1.0,
        allowance=lambda r: r.returned_noise(),
    ),
    *_token_bars(),
    *_few_bits_bars(),
    *_elsewhere_bars(),
]
SHAPED = ("block-scout", "block-maverick")
GPU = [
    *_block_bars("block-scout", "Scout-shaped block", 6, 5, 8192),
    *_block_bars("block-maverick", "Maverick-shaped block", 45, 30, 8192),
    Bar(
        "share of the copy bandwidth, T up to 32",
        lambda r: r.roofline(SHAPED, tokens=lambda count: count <= 32),
        0.7,
        unit="",
    ),
    Bar(
        "share of the matmul rate, Scout-shaped, T = 8192",
        lambda r: r.roofline("block-scout", tokens=8192),
        0.65,
        unit="",
    ),
    Bar(
        "against the fastest peer, any T, both in their fastest mode",
        lambda r: r.ratio_of_peers(SHAPED),
        1.0 - NOISE,
    ),
    Bar(
        "peak memory over the leanest peer's, any T, 1 MB aside",
        lambda r: r.memory(SHAPED, PEERS, ASIDE),
        1.0,
        at_most=True,
    ),
    Bar("training step, Scout-shaped", lambda r: r.ratio("training-scout"), 4),
    _never_slower("dense LLaMA, slowest case", "dense"),
]
BARS = {"cpu": CPU, "gpu": GPU}


def table(results: dict, name: str) -> list[str]:
    """The targets as rows of Markdown."""
    found = Results(results)
    lines = ["| | wanted | measured | reached |", "|---|---|---|---|"]
    for bar in BARS[name]:
        text, limit, measured, is_reached = bar.judged(found)
        verdict = "" if is_reached is None else "yes" if is_reached else "**no**"
        lines.append(f"| {text} | {limit} | {measured} | {verdict} |")
    return lines
