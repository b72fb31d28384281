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
float32, too.
"""
# Names listed in a sentence.
_SHOWN = 8


@dataclass(frozen=True)
class OutputDifference:
    """Difference of two outputs.

    Attributes:
        name: `logits`, `last_hidden_state` or `pooler_output`.
        max_abs: largest absolute difference; nan where one of the two is not finite.
        std: standard deviation of the first output.
    """

    name: str
    max_abs: float
    std: float


@dataclass
class Verification:
    """What was compared, and the verdict.

    Attributes:
        a, b: both paths.
        kinds: source formats of both.
        compared: number of tensors compared.
        only_in_a, only_in_b: keys that the other lacks.
        shapes: key to both shapes where they differ.
        dtypes: both dtypes to the number of tensors, where they differ.
        tensors: key to largest absolute difference, for tensors that differ, in the model's order; nan if only one of
            two elements is nan.
        is_rounded: whether all are equal once the wider of both dtypes is rounded to the narrower.
        structure: configuration fields that differ but may describe the same function (experts, heads, pairing of
            rotated channels, the routing rule); the outputs decide.
        function: configuration fields that change the function of the same weights, even if few tokens show it.
        outputs: the outputs' differences; empty if they were not computed.
        other_outputs: outputs of another shape, or of one side only (None), with both shapes.
        tokens: number of random tokens that outputs were computed for.
        notes: what else a user should know about what was compared.
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
    is_rounded: bool = False
    structure: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    function: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    outputs: list[OutputDifference] = field(default_factory=list)
    other_outputs: dict[str, tuple[list[int] | None, list[int] | None]] = field(default_factory=dict)
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def same_weights(self) -> bool:
        """Whether keys, shapes and all elements are equal; dtypes may differ."""
        return not (self.only_in_a or self.only_in_b or self.shapes or self.tensors)

    @property
    def undecided(self) -> dict[str, tuple[Any, Any]]:
        """The fields of `structure` that leave the function of equal weights open."""
        # A tied head is compared as a copy of the embedding.
        return {
            name: both for name, both in self.structure.items() if not name.endswith("tie_word_embeddings")
        }

    @property
    def verdict(self) -> str:
        """The verdict, which is one of four words.

        "equal": every number is equal. "rounded": numbers differ by rounding alone. "agree": weights differ, or are
        used in another way, and the outputs agree on `tokens` tokens. "different": none of these.
        """
        if self.function or self.other_outputs:
            return "different"
        if self.outputs:
            agree = all(part.max_abs <= TOLERANCE * part.std for part in self.outputs)
            return "agree" if agree else "different"
        if self.undecided:
            return "different"
        return "equal" if self.same_weights else "rounded" if self.is_rounded else "different"

    @property
    def same_function(self) -> bool:
        """Whether the verdict is any but "different"."""
        return self.verdict != "different"

    @property
    def first_difference(self) -> str | None:
        """Key of the first tensor that differs, has another shape, or is on one side only."""
        return next(iter([*self.tensors, *self.shapes, *self.only_in_a, *self.only_in_b]), None)

    @property
    def reasons(self) -> list[str]:
        """The verdict in sentences."""
        weights = "are equal" if self.same_weights else "differ"
        words = {
            "equal": f"every number of {self.compared:,} tensors is equal",
            "rounded": "the weights are equal within rounding",
            "agree": f"weights {weights}, outputs agree on {self.tokens:,} tokens",
            "different": "the checkpoints hold different models",
        }
        reasons = [words[self.verdict]]
        if (key := self.first_difference) is not None and not self.is_rounded:
            reasons.append(f"the first tensor that differs is {key}")
        fields = self.function or (self.undecided if not self.outputs else {})
        if fields:
            both = "; ".join(f"{name}: {a} and {b}" for name, (a, b) in fields.items())
            reasons.append(f"the configurations differ in {both}")
        reasons += [f"{name}: {a or 'none'} and {b or 'none'}" for name, (a, b) in self.other_outputs.items()]
        return reasons + self.notes

    def as_dict(self) -> dict[str, Any]:
        """All fields and the verdict for JSON; nan and infinity, which JSON lacks, become text."""
        names = ("verdict", "same_function", "same_weights", "first_difference", "reasons")
        return _plain(asdict(self) | {name: getattr(self, name) for name in names})

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Titles with rows of a label and a text, for printing."""
        sections = [("verdict", [("", reason) for reason in self.reasons])]
        tensors = [("compared", f"{self.compared:,}, of which {len(self.tensors):,} differ")]
        tensors += [(key, f"max |a - b| = {value:.3g}") for key, value in list(self.tensors.items())[:_SHOWN]]
        for label, keys in (("only in a", self.only_in_a), ("only in b", self.only_in_b)):
            tensors += [(label, listed(keys, _SHOWN))] if keys else []
        tensors += [(key, f"{a} and {b}") for key, (a, b) in list(self.shapes.items())[:_SHOWN]]
        tensors += [(pair, f"{count:,} tensors") for pair, count in self.dtypes.items()]
        sections.append(("tensors", tensors))
        fields = {**self.function, **self.structure}
        if fields:
            sections.append(("configuration", [(key, f"{a} and {b}") for key, (a, b) in fields.items()]))
        if self.outputs:
            outputs = [
                (part.name, f"max |a - b| = {part.max_abs:.3g}, deviation {part.std:.3g}")
                for part in self.outputs
            ]
            sections.append(("outputs", outputs))
        return sections


def difference(name: str, a: torch.Tensor, b: torch.Tensor) -> OutputDifference:
    """Return the difference of two outputs of one shape."""
    return OutputDifference(name, (a - b).abs().max().item(), a.std(correction=0).item())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
