"""Targets for the figures, and whether they are reached. These are no tests, since a busy machine would fail them.

python -m benchmarks.bars cpu      # a row a target; exit status 1 if one that was measured is missed
python -m benchmarks.bars cpu_avx2 --about "in int4"
"""

import argparse
import itertools
import json
import math
import operator
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

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

    def noise(self, groups: str | Iterable[str], field: str = "ratio") -> float:
        """Distance from one of the ratio of stock against itself, between medians; the largest over the cases."""
        rows = (case["contestants"].get(AGAIN, {}) for case in self.find(groups))
        return max([LEAST_NOISE, *(abs(1 - row[field]) for row in rows if field in row)])

    def ratio_of_peers(self, groups: str | Iterable[str], **facts) -> float | None:
        """The fastest peer's time over ours, each in its fastest mode; the smallest over the cases."""
        medians = [
            [
                [
                    row["median"]
                    for name, row in case["contestants"].items()
                    if "median" in row and is_of(name, *who)
                ]
                for who in ((OURS,), PEERS)
            ]
            for case in self.find(groups, **facts)
        ]
        return least(min(theirs) / min(ours) for ours, theirs in medians if ours and theirs)

    def roofline(self, groups: str | Iterable[str], **facts) -> float | None:
        """The smallest fraction of the roofline."""
        return least(best(case, "roofline", OURS) for case in self.find(groups, **facts))

    def memory(
        self, groups: str | Iterable[str], others: tuple[str, ...] = (REFERENCE,), aside: float = 0, **facts
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

    def gain(self, ours: str, other: str, **facts) -> float | None:
        """What two threads gain one contestant, over what they gain another; fastest rounds, the least of the cases."""
        found = []
        for case in self.find("llama.cpp-threads", phase="threads", **facts):
            names = (ours, f"{ours}, 2 threads", other, f"{other}, 2 threads")
            rows = [case["contestants"].get(name, {}).get("seconds") for name in names]
            if all(rows):
                one, two, its_one, its_two = map(min, rows)
                found.append(one / two / (its_one / its_two))
        return least(found)

    def share_of_reading(self) -> float | None:
        """A plain read's time of the bytes that a token of the large mixture reads, over the token's."""
        return least(best(case, "ratio", OURS) for case in self.find("large"))

    def seconds_a_billion(self, name: str) -> float | None:
        """A contestant's seconds for a billion weights, the largest over the cases that quantize."""
        rows = [
            (case["contestants"].get(name, {}).get("median"), case["weights"])
            for case in self.find("few-bits", phase="quantizing")
        ]
        return max((1e9 * seconds / weights for seconds, weights in rows if seconds), default=None)

    def largest(self, field: str, groups: str = "offload") -> float | None:
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


def at_least(
    text: str, limit: float, number: Callable[..., float | None], *given, unit: str = "×", **named
) -> Bar:
    """A target for a number of the results that is given arguments, at least so large."""
    return Bar(text, lambda found: number(found, *given, **named), limit, unit=unit)


def at_most(
    text: str, limit: float, number: Callable[..., float | None], *given, unit: str = "×", **named
) -> Bar:
    """As `at_least`, for a number that is at most so large."""
    return replace(at_least(text, limit, number, *given, unit=unit, **named), at_most=True)


def _over(found: Results, group: str, other: str, tokens: int) -> float | None:
    """Our time over another's."""
    return least(
        best(case, "ratio", other) / best(case, "ratio", OURS)
        for case in found.find(group, tokens=tokens)
        if best(case, "ratio", other) and best(case, "ratio", OURS)
    )


def _block_bars(
    group: str, what: str, one: float, many: float, tokens: int, in_turn: bool = False
) -> list[Bar]:
    even = dict(routing="uniform")
    ways = {", layers in turn": False, ", one layer again and again": True} if in_turn else {"": False}
    return [at_least(f"{what}, T = {tokens}", many, Results.ratio, group, tokens=tokens, **even)] + [
        at_least(f"{what}, T = 1{how}", one, Results.ratio, group, tokens=1, repeated=repeated, **even)
        for how, repeated in ways.items()
    ]


def _over_frozen(group: str, text: str, counts: Iterable[int], limit: float) -> list[Bar]:
    text += " over one without adapters"
    return [at_most(text.format(tokens), limit, _over, group, "frozen", tokens) for tokens in counts]


def _adapter_bars(group: str, what: str, limits: dict[int, float]) -> list[Bar]:
    """A step with LoRA on the experts, over a step of peft's, and over one without adapters."""
    text = f"LoRA on {what}, T = {{}}, step"
    bars = [
        at_most(f"{text.format(tokens)} over peft's", limit, _over, group, REFERENCE, tokens)
        for tokens, limit in limits.items()
    ]
    return bars + _over_frozen(group, text, limits, 1.25)


def _never_slower(what: str, groups: str | tuple[str, ...]) -> Bar:
    return replace(at_least(what, 1.0, Results.ratio, groups), allowance=lambda r: r.noise(groups))


@dataclass(frozen=True)
class Limits:
    """How much longer than llama.cpp's ours may take in the same type: a token of each of `MODELS`, and a prefill."""

    dense: float
    mixture: float
    prefill: float


OVER_LLAMA_CPP = {
    "cpu": {
        "float32": Limits(1.0, 1.15, 1.0),
        "bfloat16": Limits(1.05, 1.2, 1.15),
        "int8": Limits(1.1, 1.25, 1.15),
        "int4": Limits(1.15, 1.35, 1.15),
    },
    "cpu_avx2": {
        "float32": Limits(1.1, 1.25, 1.0),
        "bfloat16": Limits(1.15, 1.35, 1.15),
        "int8": Limits(1.2, 1.4, 1.15),
        "int4": Limits(1.25, 1.5, 1.15),
    },
}
"""By kind of machine: one with AVX-512 and instructions for bfloat16, and one that is held to AVX2."""


def _of_models(kind: str) -> list[Bar]:
    """Our time over llama.cpp's, stock's time over ours, what two threads gain, and a step of adapters in few bits."""
    bars = []
    for ours, limits in OVER_LLAMA_CPP[kind].items():
        theirs = f"llama.cpp, {PEERS_IN_LLAMA_CPP[ours]}"
        both = {"ours": f"{OURS}, {ours}", "other": theirs}
        for model in MODELS:
            text, facts = (
                f"a token, {model} in {ours}, time over {theirs}",
                {"phase": "decode", "model": model},
            )
            bars.append(
                at_most(text, getattr(limits, model), Results.over, groups="llama.cpp-token", **both, **facts)
            )
        for model, tokens in itertools.product(MODELS, (128, 512)):
            text = f"prefill of {tokens} tokens, {model} in {ours}, time over {theirs}"
            facts = {"phase": "prefill", "model": model, "tokens": tokens}
            bars.append(
                at_most(text, limits.prefill, Results.over, groups="llama.cpp-prefill", **both, **facts)
            )
    for (ours, stock), model in itertools.product(
        {"float32": REFERENCE, "bfloat16": f"{REFERENCE}, bfloat16"}.items(), MODELS
    ):
        text, facts = f"a token, {model} in {ours}, time over stock's", {"phase": "decode", "model": model}
        bars.append(
            at_most(
                text,
                1 + NOISE,
                Results.over,
                ours=f"{OURS}, {ours}",
                other=stock,
                groups="llama.cpp-token",
                **facts,
            )
        )
    for ours, model in itertools.product(("int8", "int4"), MODELS):
        text = f"a token, {model} in {ours}, what two threads gain over llama.cpp's gain"
        names = f"{OURS}, {ours}", f"llama.cpp, {PEERS_IN_LLAMA_CPP[ours]}"
        bars.append(at_least(text, 0.9, Results.gain, *names, model=model))
    # Beside so few weights in int4, factors of float32 are 8 % (dense) and 10 % of the bytes, and an expert's second
    # factor lies between those of 15 others.
    for (ours, limit), model in itertools.product({"bfloat16": 1.25, "int4": 1.5}.items(), MODELS):
        text = f"a token with adapters over one without, {model} in {ours}"
        both = {"ours": f"{OURS}, {ours}, adapters", "other": f"{OURS}, {ours}", "groups": "few-bits"}
        bars.append(at_most(text, limit, Results.over, phase="adapters", model=model, **both))
    text = "a step of adapters of 256 tokens, mixture in int4 over float32"
    both = {"ours": f"{OURS}, int4", "other": f"{OURS}, float32", "groups": "few-bits", "phase": "training"}
    bars.append(at_most(text, 1.5, Results.over, **both))
    text = "a token of Mixtral's layers in int4, share of the memory's reading speed"
    bars.append(at_least(text, 0.6, Results.share_of_reading, unit=""))
    return bars


PEERS_IN_LLAMA_CPP = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""llama.cpp's type beside ours."""
MODELS = ("dense", "mixture")
LOADING = ("loading", "loading-many")
BLOCKS = ("block-16", "block-128")
ON_DISK = "experts on disk"
UP_TO = partial(partial, operator.ge)
CPU = [
    *_block_bars("block-16", "mixture block, 16 experts", 8, 7.5, 1024, in_turn=True),
    *_block_bars("block-128", "mixture block, 128 experts", 40, 35, 1024, in_turn=True),
    at_least("mixture block, slowest T of 1 to 1024", 1.0, Results.ratio, BLOCKS, tokens=UP_TO(1024)),
    at_least("whole decoder, prefill, T = 1024", 5, Results.ratio, "decoder", phase="prefill", tokens=1024),
    at_least("whole decoder, decode, B = 1", 4.5, Results.ratio, "decoder", phase="decode", tokens=1),
    at_least("training step, 16 experts, T = 256", 4, Results.ratio, "training-16"),
    at_least("training step, 128 experts, T = 256", 8, Results.ratio, "training-128"),
    *_adapter_bars("adapters-16", "16 experts", {512: 0.4, 4096: 0.85}),
    *_adapter_bars("adapters-128", "128 experts", {512: 0.15, 4096: 0.4}),
    *_over_frozen("adapters-bfloat16", "LoRA on 16 experts in bfloat16, T = {}, step", (512, 4096), 1.5),
    *_over_frozen("adapters-decode", "decoding B = {} with LoRA on 16 experts", (1, 8, 32), 1.3),
    at_most("LoRA on 128 experts, T = 512, peak memory over peft's", 0.1, Results.memory, "adapters-128", tokens=512),
    at_most(
        "peak memory of the block, 128 experts, T = 1024, over stock's", 0.05, Results.memory, "block-128", tokens=1024
    ),
    _never_slower("dense LLaMA, slowest case", "dense"),
    at_least(
        "sliding window of 1,024, T = 16384, attention alone", 4, Results.ratio, "window", phase="attention"
    ),
    at_most(
        "sliding window of 1,024, T = 16384, peak memory over stock's", 0.25, Results.memory, "window", tokens=16384
    ),
    at_least("Mixtral's block, T = 1", 1.3, Results.ratio, "mixtral", tokens=1),
    at_least("Mixtral's block, slowest case", 0.95, Results.ratio, "mixtral"),
    at_least("Mixtral's block in bfloat16, slowest case", 0.95, Results.ratio, "mixtral-bfloat16"),
    at_most("loading, peak memory over the checkpoint's bytes", 1.1, Results.loaded),
    _never_slower("loading and reading once, speed", LOADING),
    replace(
        at_least("`from_pretrained` alone, speed", 1.0, Results.returned),
        allowance=lambda r: r.noise(LOADING, "returned_ratio"),
    ),
    *_of_models("cpu"),
    at_most("quantizing a billion weights to int4", 20, Results.seconds_a_billion, f"{OURS}, int4", unit=" s"),
    at_most(
        "quantizing a billion weights to int4 without search", 8, Results.seconds_a_billion,
        f"{OURS}, int4 without search", unit=" s",
    ),
    at_most(f"{ON_DISK}, bytes read over those of missed experts", 1.02, Results.largest, "read_over_missed"),
    at_most(f"{ON_DISK}, hit rate, distance from the simulated one", 0.02, Results.largest, "hit_rate_error", unit=""),
    at_most(
        f"{ON_DISK}, peak memory beyond all else, the room for experts and one expert", 200, Results.largest,
        "megabytes_beyond", unit=" MB",
    ),
    at_most(
        f"{ON_DISK}, a token, time over reads through the page cache", 1 + NOISE, Results.largest, "over_page_cache"
    ),
    at_most(f"{ON_DISK}, a token, time over a mapping with advice", 1 + NOISE, Results.largest, "over_mapped"),
    at_most(f"{ON_DISK}, a token, time over accelerate's offload", 0.5, Results.largest, "over_accelerate"),
    at_least(
        f"{ON_DISK}, share of the drive's rate in large reads", 0.8,
        lambda r: least(case.get("share_of_drive") for case in r.find("offload")), unit="",
    ),
]  # fmt: skip
SHAPED = ("block-scout", "block-maverick")
GPU = [
    *_block_bars("block-scout", "Scout-shaped block", 6, 5, 8192),
    *_block_bars("block-maverick", "Maverick-shaped block", 45, 30, 8192),
    at_least(
        "share of the copy bandwidth, T up to 32", 0.7, Results.roofline, SHAPED, tokens=UP_TO(32), unit=""
    ),
    at_least(
        "share of the matmul rate, Scout-shaped, T = 8192",
        0.65,
        Results.roofline,
        "block-scout",
        tokens=8192,
        unit="",
    ),
    at_least(
        "against the fastest peer, any T, both in their fastest mode",
        1.0 - NOISE,
        Results.ratio_of_peers,
        SHAPED,
    ),
    at_most(
        "peak memory over the leanest peer's, any T, 1 MB aside", 1.0, Results.memory, SHAPED, PEERS, ASIDE
    ),
    at_least("training step, Scout-shaped", 4, Results.ratio, "training-scout"),
    _never_slower("dense LLaMA, slowest case", "dense"),
]
BARS = {"cpu": CPU, "cpu_avx2": _of_models("cpu_avx2"), "gpu": GPU}


def judged(results: dict, name: str) -> list[tuple[str, str, str, bool | None]]:
    """Of each target what `Bar.judged` says."""
    found = Results(results)
    return [bar.judged(found) for bar in BARS[name]]


def table(results: dict, name: str) -> list[str]:
    """The targets as rows of Markdown."""
    lines = ["| | wanted | measured | reached |", "|---|---|---|---|"]
    for text, limit, measured, is_reached in judged(results, name):
        verdict = "" if is_reached is None else "yes" if is_reached else "**no**"
        lines.append(f"| {text} | {limit} | {measured} | {verdict} |")
    return lines


def main() -> int:
    """Print the targets as tab-separated rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bars", description=__doc__)
    parser.add_argument("name", choices=BARS, help="whose targets")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder of results"
    )
    parser.add_argument("--about", default="", help="only targets whose description has these words")
    options = parser.parse_args()
    results = json.loads((options.results / f"{options.name}.json").read_text())
    rows = [row for row in judged(results, options.name) if options.about in row[0]]
    for *words, is_reached in rows:
        print({True: "reached", False: "missed", None: "unknown"}[is_reached], *words, sep="\t")
    return int(any(is_reached is False for *_, is_reached in rows))


if __name__ == "__main__":
    sys.exit(main())
