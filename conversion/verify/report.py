"""The verdict on two checkpoints: what was compared, how far it is apart, and the words for it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

TOLERANCE = 1e-4
"""Largest difference of two outputs that counts as the same, as a part of their standard deviation.

Formats that hold the same numbers differ by the order in which float32 adds them up, about 1e-6; two bfloat16 files
are computed in float32 too. Weights that were rounded to another dtype on the way differ by more: give a tolerance.
"""
_SHOWN = 8


@dataclass(frozen=True)
class OutputDifference:
    """How far two outputs are apart.

    Attributes:
        name: of the output: `logits`, `last_hidden_state`, `pooler_output`, or of a layer.
        max_abs: largest absolute difference; nan where one of the two is not finite.
        mean_abs: mean absolute difference.
        std: standard deviation of the first one.
        top1: part of the positions at which both have the same largest logit; None for what is no logits.
    """

    name: str
    max_abs: float
    mean_abs: float
    std: float
    top1: float | None = None


@dataclass(frozen=True)
class Verification:
    """What was compared, and the verdict.

    Attributes:
        a: the first path.
        b: the second.
        kinds: source formats of both.
        compared: tensors compared, by number.
        only_in_a: keys that `b` lacks.
        only_in_b: keys that `a` lacks.
        shapes: key to both shapes where they differ; of embedding and head the rows that both have are compared all
            the same.
        dtypes: both dtypes to the number of tensors, where they differ.
        tensors: key to the largest absolute difference, for the tensors that differ; nan where only one of the two
            numbers is one.
        not_finite: keys of tensors with infinities or nan, with an `a: ` or `b: ` before them.
        structure: fields of the configurations that differ, but may describe the same function (experts, heads,
            pairing of rotated channels): whether they do is for the outputs to say.
        function: fields that make another function of the same weights, whether or not a few tokens show it.
        outputs: the outputs' differences; empty if they were not computed.
        layers: the hidden states' differences, in the order in which they are computed.
        first_layer: the first of them beyond the tolerance.
        tokens: random tokens of a row that were run, rows, and the seed.
        by_layer: whether weights were read one matrix at a time.
        tolerance: largest `max_abs / std` that counts as the same output.
        same_weights: the same keys and shapes, and every number equal; dtypes may differ.
        same_function: the outputs agree within the tolerance, no field stands in `function`, and nothing that the run
            did not reach differs (see `unreached.py`). None where that cannot be told, or outputs were not asked for
            and the weights do not decide.
        reasons: the verdict in sentences.
        seconds: it took.
    """

    a: str
    b: str
    kinds: tuple[str, str]
    compared: int
    only_in_a: list[str]
    only_in_b: list[str]
    shapes: dict[str, tuple[list[int], list[int]]]
    dtypes: dict[str, int]
    tensors: dict[str, float]
    not_finite: list[str]
    structure: dict[str, tuple[Any, Any]]
    function: dict[str, tuple[Any, Any]]
    tolerance: float
    same_weights: bool
    same_function: bool | None = None
    outputs: list[OutputDifference] = field(default_factory=list)
    layers: list[OutputDifference] = field(default_factory=list)
    first_layer: str | None = None
    tokens: tuple[int, int, int] | None = None
    by_layer: bool | None = None
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Give all of it for JSON, which has no word for nan and infinity: those become text."""
        return _plain(asdict(self))

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Give titles with rows of a label and a text, for people."""
        words = {True: "yes", False: "no", None: "cannot be told" if self.outputs else "not computed"}
        sections = [
            (
                "verdict",
                [
                    ("same weights", words[self.same_weights]),
                    ("same function", words[self.same_function]),
                    *(("", reason) for reason in self.reasons),
                ],
            )
        ]
        tensors = [("compared", f"{self.compared:,}, of which {len(self.tensors):,} differ")]
        tensors += [(key, f"max |a - b| = {value:.3g}") for key, value in largest(self.tensors)]
        for label, keys in (("only in a", self.only_in_a), ("only in b", self.only_in_b)):
            tensors += [(label, listed(keys))] if keys else []
        tensors += [(key, f"{a} and {b}") for key, (a, b) in list(self.shapes.items())[:_SHOWN]]
        tensors += [(pair, f"{count:,} tensors") for pair, count in self.dtypes.items()]
        tensors += [("not finite", listed(self.not_finite))] if self.not_finite else []
        sections.append(("tensors", tensors))
        fields = {**self.function, **self.structure}
        if fields:
            sections.append(("configuration", [(key, f"{a} and {b}") for key, (a, b) in fields.items()]))
        if self.outputs:
            sections.append(("outputs", [(part.name, described(part)) for part in self.outputs]))
        if self.first_layer is not None:
            parted = [part for part in self.layers if part.max_abs != 0][:_SHOWN]
            sections.append(("layers", [(part.name, described(part)) for part in parted]))
        return sections


def difference(name: str, a: torch.Tensor, b: torch.Tensor) -> OutputDifference:
    """Measure how far two outputs of one shape are apart."""
    apart = (a - b).abs()
    top1 = (a.argmax(-1) == b.argmax(-1)).float().mean().item() if name == "logits" else None
    return OutputDifference(name, apart.max().item(), apart.mean().item(), a.std(correction=0).item(), top1)


def within(part: OutputDifference, tolerance: float) -> bool:
    """Say whether a difference counts as none."""
    return part.max_abs <= tolerance * part.std  # nan is not


def agree(result: Verification) -> bool:
    """Say whether outputs were computed and all of them agree."""
    return bool(result.outputs) and all(within(part, result.tolerance) for part in result.outputs)


def reasons_of_weights(result: Verification) -> list[str]:
    """Say in sentences how the weights differ."""
    if result.same_weights:
        return [f"every number of {result.compared:,} tensors is equal"]
    reasons = []
    if result.tensors:
        (key, value), *_ = largest(result.tensors)
        reasons.append(
            f"{len(result.tensors):,} of {result.compared:,} tensors differ, {key} by as much as {value:.3g}"
        )
    for label, keys in (("a", result.only_in_a), ("b", result.only_in_b)):
        if keys:
            reasons.append(f"only {label} has {listed(keys)}")
    if result.shapes:
        key, (a, b) = next(iter(result.shapes.items()))
        more = f", and {len(result.shapes) - 1} other shapes differ" if len(result.shapes) > 1 else ""
        reasons.append(f"{key} has shape {a} in a and {b} in b{more}")
    return reasons


def sentence(part: OutputDifference, tolerance: float) -> str:
    """Say how far two outputs are apart, and whether that is too far."""
    verdict = "within" if within(part, tolerance) else "beyond"
    return f"{described(part, part.name + ' differ by')}, {verdict} the tolerance of {tolerance:.3g}"


def described(part: OutputDifference, begin: str = "max") -> str:
    """Say how far two outputs are apart."""
    share = f", {part.max_abs / part.std:.2g} of the standard deviation" if part.std > 0 else ""
    top1 = "" if part.top1 is None else f"; top-1 agrees at {part.top1:.1%}"
    return f"{begin} {part.max_abs:.3g} (mean {part.mean_abs:.3g}){share}{top1}"


def largest(tensors: dict[str, float]) -> list[tuple[str, float]]:
    """The tensors that differ most; nan before all."""
    return sorted(tensors.items(), key=lambda pair: (pair[1] == pair[1], -pair[1]))[:_SHOWN]


def listed(keys: list[str]) -> str:
    """Join names, not more than a few."""
    more = f" and {len(keys) - _SHOWN:,} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
