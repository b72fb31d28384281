"""What is wanted of the figures, and whether it is reached: never a test, since a busy machine would fail it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import OURS, REFERENCE

PEERS = ("grouped_mm", "batched_mm")
NOISE = 0.03
"""How much slower than equal counts as equal where the quartiles of two contestants are not at hand."""


@dataclass(frozen=True)
class Bar:
    """A wish: a number of the results, and its limit.

    Attributes:
        text: in words.
        value: the number, or None if the results lack it.
        limit: the least, or the most.
        at_most: whether the limit is the most.
        unit: behind the number.
    """

    text: str
    value: Callable[["Results"], float | None]
    limit: float
    at_most: bool = False
    unit: str = "×"

    def reached_by(self, value: float) -> bool:
        """Whether a value is within the limit."""
        return value <= self.limit if self.at_most else value >= self.limit


class Results:
    """Cases of a file of results, found by their facts."""

    def __init__(self, results: dict):
        self.cases = results.get("cases", [])

    def find(self, groups: str | Iterable[str], **facts) -> list[dict]:
        """Cases of some groups; a fact may be a value, or a function that says whether a value will do."""
        groups = [groups] if isinstance(groups, str) else list(groups)
        return [
            case
            for case in self.cases
            if case["group"] in groups
            and all(
                wanted(case[name]) if callable(wanted) else case[name] == wanted
                for name, wanted in facts.items()
                if name in case or not callable(wanted)
            )
        ]

    def ratio(self, groups: str | Iterable[str], **facts) -> float | None:
        """The least of the ratios of ours; of several of ours in a case, the best one counts."""
        return least(best(case, "ratio", OURS) for case in self.find(groups, **facts))

    def upper_ratio(self, groups: str | Iterable[str], **facts) -> float | None:
        """The least of the upper quartiles of the ratios of ours: below one, it is slower by more than noise."""
        rows = [case["contestants"].get(OURS, {}) for case in self.find(groups, **facts)]
        return least(row["ratio_quartiles"][1] for row in rows if "ratio_quartiles" in row)

    def ratio_of_peers(self, groups: str | Iterable[str], **facts) -> float | None:
        """The fastest peer's time over ours, the least over the cases."""
        found = []
        for case in self.find(groups, **facts):
            ours, theirs = best(case, "ratio", OURS), best(case, "ratio", *PEERS)
            if ours and theirs:
                found.append(ours / theirs)
        return least(found)

    def roofline(self, groups: str | Iterable[str], **facts) -> float | None:
        """The least fraction of the roofline."""
        return least(best(case, "roofline", OURS) for case in self.find(groups, **facts))

    def memory(self, groups: str | Iterable[str], others: tuple[str, ...], **facts) -> float | None:
        """Our peak memory over the least of others', the largest over the cases that have both."""
        found = []
        for case in self.find(groups, **facts):
            ours = case["contestants"].get(OURS, {}).get("peak_bytes")
            theirs = [
                row["peak_bytes"]
                for name, row in case["contestants"].items()
                if name in others and row.get("peak_bytes")
            ]
            if ours and theirs:
                found.append(ours / min(theirs))
        return max(found, default=None)

    def loaded(self) -> float | None:
        """Our peak memory of loading over the checkpoint's bytes."""
        return least(
            case["contestants"][OURS]["peak_bytes"] / case["nbytes"] for case in self.find("loading")
        )

    def returned(self) -> float | None:
        """Stock's time until `from_pretrained` returns over ours."""
        return least(case["contestants"][OURS]["returned_ratio"] for case in self.find("loading"))


def best(case: dict, field: str, *who: str) -> float | None:
    """The largest value of a field among contestants whose names begin so."""
    values = (row.get(field) for name, row in case["contestants"].items() if name.startswith(who))
    return max((value for value in values if value is not None), default=None)


def least(values: Iterable[float | None]) -> float | None:
    """The least of those that are there."""
    return min((value for value in values if value is not None), default=None)


def _block_bars(group: str, what: str, one: float, many: float, tokens: int) -> list[Bar]:
    even = dict(routing="uniform")
    return [
        Bar(f"{what}, T = {tokens}", lambda r: r.ratio(group, tokens=tokens, **even), many),
        Bar(
            f"{what}, T = 1, layers in turn", lambda r: r.ratio(group, tokens=1, repeated=False, **even), one
        ),
        Bar(
            f"{what}, T = 1, one layer again and again",
            lambda r: r.ratio(group, tokens=1, repeated=True, **even),
            one,
        ),
    ]


CPU = [
    *_block_bars("block-16", "mixture block, 16 experts", 8, 7.5, 1024),
    *_block_bars("block-128", "mixture block, 128 experts", 40, 35, 1024),
    Bar(
        "mixture block, slowest T of 1 to 1024",
        lambda r: r.ratio(("block-16", "block-128"), tokens=lambda count: count <= 1024),
        1.0,
    ),
    Bar("whole decoder, prefill, T = 1024", lambda r: r.ratio("decoder", phase="prefill", tokens=1024), 5),
    Bar("whole decoder, decode, B = 1", lambda r: r.ratio("decoder", phase="decode", tokens=1), 5),
    Bar("training step, 16 experts, T = 256", lambda r: r.ratio("training-16"), 4),
    Bar("training step, 128 experts, T = 256", lambda r: r.ratio("training-128"), 8),
    Bar(
        "peak memory of the block, 128 experts, T = 1024, over stock's",
        lambda r: r.memory("block-128", (REFERENCE,), tokens=1024),
        1 / 20,
        at_most=True,
    ),
    Bar("dense LLaMA, slowest case, upper quartile", lambda r: r.upper_ratio("dense"), 1.0),
    Bar(
        "loading, peak memory over the checkpoint's bytes",
        lambda r: r.loaded(),
        1.1,
        at_most=True,
    ),
    Bar("loading and reading once, speed, upper quartile", lambda r: r.upper_ratio("loading"), 1.0),
    Bar("`from_pretrained` alone, speed", lambda r: r.returned(), 1.0 - NOISE),
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
    Bar("against the fastest peer, any T", lambda r: r.ratio_of_peers(SHAPED), 1.0 - NOISE),
    Bar(
        "peak memory over the leanest peer's, any T",
        lambda r: r.memory(SHAPED, PEERS),
        1.0,
        at_most=True,
    ),
    Bar("training step, Scout-shaped", lambda r: r.ratio("training-scout"), 4),
    Bar("dense LLaMA, slowest case, upper quartile", lambda r: r.upper_ratio("dense"), 1.0),
]
BARS = {"cpu": CPU, "gpu": GPU}


def table(results: dict, name: str) -> list[str]:
    """The bars as rows of Markdown."""
    found = Results(results)
    lines = ["| | wanted | measured | reached |", "|---|---|---|---|"]
    for bar in BARS[name]:
        value = bar.value(found)
        limit = f"{'at most' if bar.at_most else 'at least'} {bar.limit:.3g}{bar.unit}"
        measured = "not measured" if value is None else f"{value:.3g}{bar.unit}"
        verdict = "" if value is None else "yes" if bar.reached_by(value) else "**no**"
        lines.append(f"| {bar.text} | {limit} | {measured} | {verdict} |")
    return lines
