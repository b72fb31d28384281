"""Compare two checkpoints by tensors, configurations and outputs for random tokens.

Both are opened under Hugging Face's keys, whatever their format, and run by llamoe's model classes in float32. So the
comparison shows differences between the files. It does not show errors of llamoe's that affect both sides alike; for
such errors, the tests compare readers and models with other implementations.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...configuration import LlamoeConfig, LlamoeVisionConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.sizes import count_of
from ..checkpoint import Checkpoint, tied_head
from ..io import Progress
from ..open import open_checkpoint
from .compare_stored import compare_configs, compare_tensors, shared_parts
from .run_streamed import Weights, random_inputs, run

TOLERANCE = 1e-4
"""Largest difference between two outputs that agree, in standard deviations of the output.

The same weights with sums in another order give outputs that differ by about 1e-6, since all models run in float32.
"""
# Largest number of differing tensors in the printed report.
_SHOWN = 8


@dataclass
class Verification:
    """The result of a comparison.

    Attributes:
        a, b: paths of the checkpoints.
        kinds: `Checkpoint.kind` of both checkpoints.
        compared: number of tensors that were compared.
        differences: key of each tensor that differs to a description, in the order of a's model.
        is_rounded: whether all tensors are equal after rounding the wider of two dtypes to the narrower.
        structure: configuration fields that differ, but may give the same outputs with other weights (experts, heads,
            pairing of rotated channels, the routing rule), to both values. The outputs decide.
        function: configuration fields that differ and change what the same weights compute, even if few tokens show
            it, to both values.
        outputs: name of each computed output to the largest difference in standard deviations: nan if an output is not
            finite, infinite if only one model has it or the shapes differ. Empty if none was computed.
        tokens: number of random tokens for which outputs were computed.
        notes: sentences for the user about what was compared.
        seconds: duration of the comparison.
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
        """True if keys, shapes and elements are equal; dtypes may differ."""
        return not self.differences

    @property
    def verdict(self) -> str:
        """The verdict, one of four words.

        "equal": every number is equal. "rounded": numbers differ only by rounding. "agree": weights or structure
        differ, but the outputs agree on `tokens` tokens. "different": none of these.
        """
        if self.function:
            return "different"
        if self.outputs:
            return "agree" if all(apart <= TOLERANCE for apart in self.outputs.values()) else "different"
        if self.structure:
            return "different"
        return "equal" if self.same_weights else "rounded" if self.is_rounded else "different"

    @property
    def same_function(self) -> bool:
        """True unless the verdict is "different"."""
        return self.verdict != "different"

    @property
    def first_difference(self) -> str | None:
        """The key of the first tensor that differs, has another shape, or is only in one model."""
        return next(iter(self.differences), None)

    @property
    def reasons(self) -> list[str]:
        """Sentences that explain the verdict."""
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
        fields = self.function or (self.structure if not self.outputs else {})
        if fields:
            both = "; ".join(f"{name}: {a} and {b}" for name, (a, b) in fields.items())
            reasons.append(f"the configurations differ in {both}")
        return reasons + self.notes

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and properties for JSON; nan and infinity, which JSON lacks, become text."""
        names = ("verdict", "same_function", "same_weights", "first_difference", "reasons")
        outputs = {
            name: apart if math.isfinite(apart) else str(apart) for name, apart in self.outputs.items()
        }
        return asdict(self) | {name: getattr(self, name) for name in names} | {"outputs": outputs}

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return the result for printing: titles, each with rows of a label and a text."""
        tensors = [("compared", f"{self.compared:,}"), ("differ", f"{len(self.differences):,}")]
        fields = {**self.function, **self.structure}
        sections = [
            ("verdict", [("", reason) for reason in self.reasons]),
            ("tensors", tensors + list(self.differences.items())[:_SHOWN]),
            ("configuration", [(key, f"{a} and {b}") for key, (a, b) in fields.items()]),
            ("outputs", [(name, f"{apart:.2g} standard deviations") for name, apart in self.outputs.items()]),
        ]
        return [(title, rows) for title, rows in sections if rows]


def verify(
    a: str | os.PathLike | Checkpoint,
    b: str | os.PathLike | Checkpoint,
    *,
    tokens: int = 32,
    rows: int = 2,
    seed: int = 0,
    logits: bool = True,
    progress: Progress | None = None,
) -> Verification:
    """Compare two checkpoints of any formats: keys, shapes, weights, configurations and, if these differ, outputs.

    Weights are compared block by block, with two blocks in memory at a time. If weights differ by more than rounding,
    or a field of `Verification.structure` differs, both models run one after the other on the same random tokens (and
    pictures), in float32, with one matrix in memory at a time. Outputs that agree prove nothing for other tokens, nor
    for experts to which no token was sent.

    If a multimodal model is compared with a decoder, its decoder is taken. If it is compared with a tower, its tower is
    taken; both towers are compared without adapter and projection unless these are equal. Models whose vocabularies
    have different sizes are compared on the tokens that both have.

    Args:
        a: a folder or file that `open_checkpoint` reads, or its result.
        b: the checkpoint to compare it with.
        tokens: number of random tokens in a row; no more than both models accept are drawn.
        rows: number of rows.
        seed: random seed of tokens and pictures.
        logits: compute outputs if weights or structure differ; False compares only weights and configurations.
        progress: an object with `start(total_bytes)` and `advance(nbytes, file)`, for the comparison of weights.

    Raises:
        CheckpointError: a path is not a checkpoint, or a file is damaged.
        ValueError: a count is below 1, the seed is negative, or a decoder is compared with a tower.
    """
    begin = time.perf_counter()
    count_of("tokens", tokens)
    count_of("rows", rows)
    count_of("seed", seed, 0)
    opened = [
        path if isinstance(path, Checkpoint) else open_checkpoint(path, companions=False) for path in (a, b)
    ]
    parts, notes = shared_parts(*opened)
    configs = parts[0].config, parts[1].config
    structure, function = compare_configs(*configs)
    result = Verification(
        str(opened[0].path),
        str(opened[1].path),
        (opened[0].kind, opened[1].kind),
        structure=structure,
        function=function,
        notes=notes,
    )
    if progress:
        progress.start(sum(tensor.nbytes for part in parts for tensor in part.tensors.values()))
    _compare_tensors(result, parts, progress)
    is_open = bool(structure) or not (result.same_weights or result.is_rounded)
    if logits and is_open and not function:
        if not isinstance(configs[0], LlamoeVisionConfig):
            tokens = min(tokens, *map(_longest, configs))
        result.tokens = tokens * rows
        inputs = random_inputs(configs, tokens, rows, seed)
        outputs = [
            run(Weights(part.config, part.tensors), arguments)
            for part, arguments in zip(parts, inputs, strict=True)
        ]
        _compare_outputs(result, *outputs)
    result.seconds = time.perf_counter() - begin
    return result


def _compare_tensors(result: Verification, parts: list[Checkpoint], progress: Progress | None) -> None:
    # A tied head is compared as a copy of the embedding.
    a, b = (
        part.tensors | {head: part.tensors[key] for head, key in tied_head(part.config).items()}
        for part in parts
    )
    result.is_rounded = True
    for key in a | b:
        if key not in a or key not in b:
            problem, is_close = f"only in {'a' if key in a else 'b'}", False
        elif a[key].shape != b[key].shape:
            problem, is_close = f"{list(a[key].shape)} and {list(b[key].shape)}", False
        else:
            apart, is_close = compare_tensors(a[key], b[key])
            problem = f"max |a - b| = {apart:.3g}" if apart != 0 else None
            if progress:
                progress.advance(a[key].nbytes + b[key].nbytes, a[key].origin.partition(": ")[0])
        result.compared += key in a and key in b
        result.is_rounded &= is_close
        if problem:
            result.differences[key] = problem


def _compare_outputs(
    result: Verification, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> None:
    if "logits" in first and first["logits"].shape != second["logits"].shape:
        sizes = [output["logits"].shape[-1] for output in (first, second)]
        common = min(sizes)
        result.notes.append(
            f"vocabularies of {sizes[0]:,} and {sizes[1]:,} tokens: compared on the first {common:,}"
        )
        first, second = ({"logits": output["logits"][..., :common]} for output in (first, second))
    for name in sorted(first.keys() | second.keys()):
        result.outputs[name] = math.inf
        if name in first and name in second and first[name].shape == second[name].shape:
            apart = (first[name] - second[name]).abs().max() / first[name].std(correction=0)
            result.outputs[name] = apart.item()


def _longest(config: LlamoeBaseConfig) -> int:
    """Return the largest number of tokens in a row, besides the tokens of its picture."""
    picture = config.vision_config.tokens_per_tile if isinstance(config, LlamoeConfig) else 0
    return max(config.get_text_config().max_position_embeddings - picture, 1)
