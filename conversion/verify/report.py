"""The verdict on two checkpoints: what was compared, the differences, and sentences about them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

TOLERANCE = 1e-4
"""Largest difference of two outputs that counts as the same, in standard deviations of the output.

Formats with the same weights differ only by float32's order of summation, about 1e-6; bfloat16 files are computed in
float32, too.
"""
# Tensors listed for printing.
_SHOWN = 8


@dataclass
class Verification:
    """What was compared, and the verdict.

    Attributes:
        a, b: both paths.
        kinds: source formats of both.
        compared: number of tensors compared.
        differences: key of each tensor that differs to how it does, in the order of a's model.
        is_rounded: whether all are equal once the wider of both dtypes is rounded to the narrower.
        structure: configuration fields that differ but may describe the same function (experts, heads, pairing of
            rotated channels, the routing rule); the outputs decide.
        function: configuration fields that change the function of the same weights, even if few tokens show it.
        outputs: each output that was computed to its largest difference in standard deviations; nan where one is not
            finite, infinite where only one model has it, or in another shape. Empty if none was computed.
        tokens: number of random tokens that outputs were computed for.
        notes: what else a user should know about what was compared.
        seconds: duration.
    """

    a: str
    b: str
    kinds: tuple[str, str]
    compared: int = 0
    differences: dict[str, str] = field(default_factory=dict)
    is_rounded: bool = False
    structure: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    function: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    outputs: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def same_weights(self) -> bool:
        """Whether keys, shapes and all elements are equal; dtypes may differ."""
        return not self.differences

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
        if self.function:
            return "different"
        if self.outputs:
            return "agree" if all(apart <= TOLERANCE for apart in self.outputs.values()) else "different"
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
        return next(iter(self.differences), None)

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
        if self.first_difference is not None and not self.is_rounded:
            reasons.append(f"the first tensor that differs is {self.first_difference}")
        fields = self.function or (self.undecided if not self.outputs else {})
        if fields:
            both = "; ".join(f"{name}: {a} and {b}" for name, (a, b) in fields.items())
            reasons.append(f"the configurations differ in {both}")
        return reasons + self.notes

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and the verdict for JSON; nan and infinity, which JSON lacks, become text."""
        names = ("verdict", "same_function", "same_weights", "first_difference", "reasons")
        outputs = {
            name: apart if math.isfinite(apart) else str(apart) for name, apart in self.outputs.items()
        }
        return asdict(self) | {name: getattr(self, name) for name in names} | {"outputs": outputs}

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """List titles with rows of a label and a text, for printing."""
        tensors = [("compared", f"{self.compared:,}"), ("differ", f"{len(self.differences):,}")]
        fields = {**self.function, **self.structure}
        sections = [
            ("verdict", [("", reason) for reason in self.reasons]),
            ("tensors", tensors + list(self.differences.items())[:_SHOWN]),
            ("configuration", [(key, f"{a} and {b}") for key, (a, b) in fields.items()]),
            ("outputs", [(name, f"{apart:.2g} standard deviations") for name, apart in self.outputs.items()]),
        ]
        return [(title, rows) for title, rows in sections if rows]
