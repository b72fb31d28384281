"""The verdict on two checkpoints: what was compared, the differences, and sentences about them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...configuration.checks import listed

TOLERANCE = 1e-4
"""Largest difference of two outputs that counts as the same, in standard deviations of the output.

Formats with the same weights differ only by float32's order of summation, about 1e-6; bfloat16 files are computed in
float32, too. Weights that were rounded to another dtype differ by more and need a larger tolerance.
"""
# Names listed in a sentence.
_SHOWN = 8


@dataclass(frozen=True)
class OutputDifference:
    """Difference of two outputs.

    Attributes:
        name: output `logits`, `last_hidden_state` or `pooler_output`, or a layer.
        max_abs: largest absolute difference; nan where one of the two is not finite.
        mean_abs: mean absolute difference.
        std: standard deviation of the first output.
        top1: fraction of positions at which both have the same largest logit; None for other outputs.
    """

    name: str
    max_abs: float
    mean_abs: float
    std: float
    top1: float | None = None


@dataclass
class Verification:
    """What was compared, and the verdict.

    Attributes:
        a, b: both paths.
        kinds: source formats of both.
        compared: number of tensors compared.
        only_in_a, only_in_b: keys that the other lacks.
        shapes: key to both shapes where they differ; of embedding and head the common rows are still compared.
        dtypes: both dtypes to the number of tensors, where they differ.
        tensors: key to largest absolute difference, for tensors that differ; nan if only one of two elements is nan.
        not_finite: keys of tensors with infinities or nan, prefixed with `a: ` or `b: `.
        structure: configuration fields that differ but may describe the same function (experts, heads, pairing of
            rotated channels, the routing rule); the outputs decide.
        function: configuration fields that change the function of the same weights, even if few tokens show it.
        outputs: the outputs' differences; empty if they were not computed.
        other_outputs: outputs of another shape, or of one side only (None), with both shapes.
        not_run: why outputs that were asked for could not be computed; None if they were, or were not asked for.
        unreached: on weights that differ and that the run did not reach: whether the function is the same, None if that
            is unknown, and a sentence.
        layers: the hidden states' differences, in order of computation.
        first_layer: the first layer beyond the tolerance.
        tokens: random tokens in a row, rows, and the seed of the run.
        by_layer: whether weights were read one matrix at a time.
        tolerance: largest `max_abs / std` that counts as the same output.
        same_weights: whether keys, shapes and all elements are equal; dtypes may differ.
        reasons: the verdict in sentences.
        seconds: duration.
    """

    a: str
    b: str
    kinds: tuple[str, str]
    compared: int = 0
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, float] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)
    structure: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    function: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    same_weights: bool = False
    outputs: list[OutputDifference] = field(default_factory=list)
    other_outputs: dict[str, tuple[list[int] | None, list[int] | None]] = field(default_factory=dict)
    not_run: str | None = None
    unreached: list[tuple[bool | None, str]] = field(default_factory=list)
    layers: list[OutputDifference] = field(default_factory=list)
    first_layer: str | None = None
    tokens: tuple[int, int, int] | None = None
    by_layer: bool | None = None
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def same_function(self) -> bool | None:
        """The verdict: True if the findings show one function, False if they show two, None if they show neither.

        Outputs decide where they were computed, unless `function` names a field, or something that no token reached
        differs. Without outputs one function is shown only by equal, finite weights under equal configurations.
        """
        if self.function or self.other_outputs:
            return False
        if not self.outputs:
            is_shown = self.same_weights and not (self.not_run or self.not_finite or self.undecided)
            return True if is_shown else None
        if not agree(self) or any(same is False for same, _ in self.unreached):
            return False
        return None if self.unreached else True

    @property
    def verdict(self) -> str:
        """`same_function` as a word: "same", "different" or "unknown"."""
        return {True: "same", False: "different", None: "unknown"}[self.same_function]

    @property
    def undecided(self) -> dict[str, tuple[Any, Any]]:
        """The fields of `structure` that leave the function of equal weights open."""
        # A tied head is compared as a copy of the embedding.
        return {
            name: both for name, both in self.structure.items() if not name.endswith("tie_word_embeddings")
        }

    def as_dict(self) -> dict[str, Any]:
        """All fields and the verdict for JSON; nan and infinity, which JSON lacks, become text."""
        return _plain(asdict(self) | {"same_function": self.same_function, "verdict": self.verdict})

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Titles with rows of a label and a text, for printing."""
        words = {True: "yes", False: "no", None: "cannot be told"}
        verdict = [("same weights", words[self.same_weights]), ("same function", words[self.same_function])]
        sections = [("verdict", verdict + [("", reason) for reason in self.reasons])]
        tensors = [("compared", f"{self.compared:,}, of which {len(self.tensors):,} differ")]
        tensors += [(key, f"max |a - b| = {value:.3g}") for key, value in largest(self.tensors)]
        for label, keys in (("only in a", self.only_in_a), ("only in b", self.only_in_b)):
            tensors += [(label, listed(keys, _SHOWN))] if keys else []
        tensors += [(key, f"{a} and {b}") for key, (a, b) in list(self.shapes.items())[:_SHOWN]]
        tensors += [(pair, f"{count:,} tensors") for pair, count in self.dtypes.items()]
        tensors += [("not finite", listed(self.not_finite, _SHOWN))] if self.not_finite else []
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
    """The difference of two outputs of one shape."""
    apart = (a - b).abs()
    top1 = (a.argmax(-1) == b.argmax(-1)).float().mean().item() if name == "logits" else None
    return OutputDifference(name, apart.max().item(), apart.mean().item(), a.std(correction=0).item(), top1)


def within(part: OutputDifference, tolerance: float) -> bool:
    """Whether a difference is within the tolerance."""
    # False for nan.
    return part.max_abs <= tolerance * part.std


def agree(result: Verification) -> bool:
    """Whether outputs were computed and all of them agree."""
    return bool(result.outputs) and all(within(part, result.tolerance) for part in result.outputs)


def reasons_of_fields(result: Verification) -> list[str]:
    """Sentences on what the configurations leave open, or decide."""
    if result.function:
        although = " (although the outputs on these tokens agree)" if agree(result) else ""
        return [f"the configurations describe other functions{although}: {_both(result.function)}"]
    if result.outputs or result.same_function:
        return []
    if result.same_weights and result.undecided:
        return [f"only outputs could tell what differs in the configurations: {_both(result.undecided)}"]
    return [] if result.not_run else ["only outputs could tell whether this is another function"]


def _both(fields: dict[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name}: {a} and {b}" for name, (a, b) in fields.items())


def reasons_of_weights(result: Verification) -> list[str]:
    """Sentences on how the weights differ."""
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
            reasons.append(f"only {label} has {listed(keys, _SHOWN)}")
    if result.shapes:
        key, (a, b) = next(iter(result.shapes.items()))
        more = f", and {len(result.shapes) - 1} other shapes differ" if len(result.shapes) > 1 else ""
        reasons.append(f"{key} has shape {a} in a and {b} in b{more}")
    return reasons


def sentence(part: OutputDifference, tolerance: float) -> str:
    """A sentence on the difference of two outputs, and whether it is too large."""
    verdict = "within" if within(part, tolerance) else "beyond"
    return f"{described(part, part.name + ' differ by')}, {verdict} the tolerance of {tolerance:.3g}"


def described(part: OutputDifference, begin: str = "max") -> str:
    """The difference of two outputs in words."""
    share = f", {part.max_abs / part.std:.2g} of the standard deviation" if part.std > 0 else ""
    top1 = "" if part.top1 is None else f"; top-1 agrees at {part.top1:.1%}"
    return f"{begin} {part.max_abs:.3g} (mean {part.mean_abs:.3g}){share}{top1}"


def largest(tensors: dict[str, float]) -> list[tuple[str, float]]:
    """The tensors that differ most; nan first."""
    return sorted(tensors.items(), key=lambda pair: (pair[1] == pair[1], -pair[1]))[:_SHOWN]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
