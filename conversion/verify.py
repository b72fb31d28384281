"""Are two checkpoints the same function? Answered by their tensors, their configurations and what they compute.

Both are read as stock keys, whatever their format, and run by this package's own model classes in float32. So what
is compared is the two readings: an error that our reader makes on both sides alike cannot show here. That the reader
and the models are right is what this project's tests compare with other implementations.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..configuration import LlamoeConfig, LlamoeVisionConfig
from ..configuration._base import LlamoeBaseConfig
from ..modeling.weights import CheckpointError
from .checkpoint import Checkpoint
from .comparing import compare_configs, compare_tensors
from .convert import open_checkpoint
from .running import Weights, random_inputs, run, tied_head
from .writing import Progress

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
        same_function: the outputs agree within the tolerance, and no field stands in `function`. None where
            outputs were not asked for and the weights do not decide.
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
        words = {True: "yes", False: "no", None: "not computed"}
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
        tensors += [(key, f"max |a - b| = {value:.3g}") for key, value in _largest(self.tensors)]
        for label, keys in (("only in a", self.only_in_a), ("only in b", self.only_in_b)):
            tensors += [(label, _listed(keys))] if keys else []
        tensors += [(key, f"{a} and {b}") for key, (a, b) in list(self.shapes.items())[:_SHOWN]]
        tensors += [(pair, f"{count:,} tensors") for pair, count in self.dtypes.items()]
        tensors += [("not finite", _listed(self.not_finite))] if self.not_finite else []
        sections.append(("tensors", tensors))
        fields = {**self.function, **self.structure}
        if fields:
            sections.append(("configuration", [(key, f"{a} and {b}") for key, (a, b) in fields.items()]))
        if self.outputs:
            sections.append(("outputs", [(part.name, _described(part)) for part in self.outputs]))
        if self.first_layer is not None:
            parted = [part for part in self.layers if part.max_abs != 0][:_SHOWN]
            sections.append(("layers", [(part.name, _described(part)) for part in parted]))
        return sections


def verify(
    a: str | os.PathLike | Checkpoint,
    b: str | os.PathLike | Checkpoint,
    *,
    tokens: int = 32,
    rows: int = 2,
    seed: int = 0,
    tolerance: float | None = None,
    by_layer: bool = True,
    logits: bool = True,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Verification:
    """Compare two checkpoints of any formats: keys, shapes, numbers, configurations, and what they compute.

    Weights are compared block by block, two blocks in memory at a time. Then both models run, one after the other, on
    the same random tokens (and pictures, as they leave the processor), in float32. Of a multimodal model and a decoder
    the decoders are compared, of a multimodal model and a tower the towers; of models with more and fewer tokens, the
    common ones.

    A mixture sends a token to other experts where two scores are nearly equal and rounding differs. Such a token's
    difference is large; `top1` says how many tokens still agree.

    Args:
        a: a folder or file that `open_checkpoint` reads, or what it gave.
        b: another.
        tokens: random tokens of a row; at most what both models take.
        rows: rows.
        seed: of the random tokens and pictures.
        tolerance: see `Verification.tolerance`; by default `TOLERANCE`.
        by_layer: read one matrix at a time, and of the experts only those that are used, which takes little memory and
            no more time; False reads a model whole before it runs.
        logits: compute outputs; otherwise weights and configurations are compared only.
        device: where the models run.
        progress: an object with `start(total_bytes)` and `advance(nbytes, file)`.

    Returns:
        What was found.

    Raises:
        CheckpointError: a path is no checkpoint, or a file is damaged.
        ValueError: a count below 1, a tolerance that is negative, or checkpoints of which one reads texts and one
            pictures only.
    """
    begin = time.perf_counter()
    for name, value in (("tokens", tokens), ("rows", rows)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: should be a whole number, 1 or more")
    tolerance = TOLERANCE if tolerance is None else tolerance
    if not tolerance >= 0:
        raise ValueError(f"tolerance = {tolerance!r}: should be a part of the standard deviation, 0 or more")
    opened = [
        given if isinstance(given, Checkpoint) else open_checkpoint(given, companions=False)
        for given in (a, b)
    ]
    parts, notes = _comparable(*opened)
    configs = (parts[0].config, parts[1].config)
    structure, function = compare_configs(*configs)
    total = sum(tensor.nbytes for part in parts for tensor in part.tensors.values())
    meter = _Meter(progress, total * (2 if logits else 1))
    found = _compare_tensors(*parts, meter)
    result = Verification(
        a=str(opened[0].path),
        b=str(opened[1].path),
        kinds=(opened[0].kind, opened[1].kind),
        structure=structure,
        function=function,
        tolerance=tolerance,
        **found,
    )
    reasons = notes + _reasons_of_weights(result)
    if logits:
        result, more = _run_both(result, parts, (tokens, rows, seed), by_layer, torch.device(device), meter)
        reasons += more
    elif not function and result.same_weights and not structure:
        result = replace(result, same_function=True)
    elif function:
        result = replace(result, same_function=False)
    if function:
        named = "; ".join(f"{name}: {x} and {y}" for name, (x, y) in function.items())
        agree = " (although the outputs on these tokens agree)" if _agree(result) else ""
        reasons.append(f"the configurations describe other functions{agree}: {named}")
    meter.finish()
    return replace(result, reasons=reasons, seconds=time.perf_counter() - begin)


class _Meter:
    """Counts what was read. Of experts that no token chose nothing is, so that the sum is known as a limit only."""

    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.left = progress, total
        if progress is not None:
            progress.start(total)

    def advance(self, nbytes: int, origin: str) -> None:
        nbytes = min(nbytes, self.left)
        self.left -= nbytes
        if self.progress is not None and nbytes:
            self.progress.advance(nbytes, origin.partition(": ")[0])

    def finish(self) -> None:
        self.advance(self.left, "")


def _comparable(first: Checkpoint, second: Checkpoint) -> tuple[list[Checkpoint], list[str]]:
    """Take the parts that can be compared with one another."""
    parts, notes = [first, second], []
    for index, (mine, other) in enumerate(((first, second), (second, first))):
        if not isinstance(mine.config, LlamoeConfig) or isinstance(other.config, LlamoeConfig):
            continue
        is_tower = isinstance(other.config, LlamoeVisionConfig)
        prefix = "vision_model." if is_tower else "language_model."
        tensors = {
            key.removeprefix(prefix): value for key, value in mine.tensors.items() if key.startswith(prefix)
        }
        config = mine.config.vision_config if is_tower else mine.config.text_config
        parts[index] = replace(mine, config=config, tensors=tensors)
        notes.append(
            f"{mine.path} is multimodal and {other.path} is not: its {'tower' if is_tower else 'decoder'} is compared"
        )
    if isinstance(parts[0].config, LlamoeVisionConfig) != isinstance(parts[1].config, LlamoeVisionConfig):
        raise ValueError(
            f"{first.path} holds a {type(first.config).__name__[6:-6].lower()} model and {second.path} a "
            f"{type(second.config).__name__[6:-6].lower()} one: a vision tower and a decoder have nothing to compare"
        )
    return parts, notes


def _compare_tensors(first: Checkpoint, second: Checkpoint, meter: _Meter) -> dict[str, Any]:
    sides = []
    for part in (first, second):
        aliases = {head: part.tensors[key] for head, key in tied_head(part.config).items()}
        sides.append({**aliases, **part.tensors})  # a tied head counts as a copy of the embedding
    a, b = sides
    shapes, tensors, dtypes, not_finite = {}, {}, Counter(), set()
    common = [key for key in a if key in b]
    for key in common:
        mine, its = a[key], b[key]
        if mine.dtype != its.dtype:
            dtypes[f"{_name(mine.dtype)} and {_name(its.dtype)}"] += 1
        if mine.shape != its.shape:
            shapes[key] = (list(mine.shape), list(its.shape))
            by_token = key.endswith(("embed_tokens.weight", "lm_head.weight"))
            if not by_token or mine.shape[1:] != its.shape[1:]:
                continue
        differs, finite = compare_tensors(mine, its, meter.advance)
        not_finite.update(
            f"{side}: {key}" for side, is_finite in zip("ab", finite, strict=True) if not is_finite
        )
        if differs != 0:
            tensors[key] = differs
    only = [[key for key in mine if key not in its] for mine, its in ((a, b), (b, a))]
    return {
        "compared": len(common),
        "only_in_a": only[0],
        "only_in_b": only[1],
        "shapes": shapes,
        "dtypes": dict(dtypes),
        "tensors": tensors,
        "not_finite": sorted(not_finite),
        "same_weights": not (only[0] or only[1] or shapes or tensors),
    }


def _run_both(
    result: Verification,
    parts: list[Checkpoint],
    sizes: tuple[int, int, int],
    by_layer: bool,
    device: torch.device,
    meter: _Meter,
) -> tuple[Verification, list[str]]:
    """Run both models on the same inputs and compare what leaves them, and each layer's hidden states."""
    configs = (parts[0].config, parts[1].config)
    if problem := _cannot_share_inputs(*configs):
        return replace(result, same_function=False), [problem]
    tokens, rows, seed = sizes
    if not isinstance(configs[0], LlamoeVisionConfig):
        tokens = min(tokens, *map(_longest, configs))
    inputs = random_inputs(configs, tokens, rows, seed)
    sources = []
    for side, part in zip("ab", parts, strict=True):
        try:
            sources.append(Weights(part.config, part.tensors, device, meter.advance))
        except CheckpointError as error:
            return replace(result, same_function=False), [f"{side} cannot be run: {error}"]

    states: dict[str, torch.Tensor] = {}
    layers: list[OutputDifference] = []
    first = run(configs[0], sources[0], inputs[0], stream=by_layer, watch=states.__setitem__)

    def compare_state(name: str, state: torch.Tensor) -> None:
        expected = states.pop(name, None)
        if expected is not None and expected.shape == state.shape:
            layers.append(_difference(name, expected, state))

    second = run(configs[1], sources[1], inputs[1], stream=by_layer, watch=compare_state)
    reasons = []
    if configs[0].get_text_config().hidden_size != configs[1].get_text_config().hidden_size:
        reasons.append("hidden sizes differ, so that hidden states are not compared")
    if "logits" in first and first["logits"].shape != second["logits"].shape:
        found = [output["logits"].shape[-1] for output in (first, second)]
        common = min(found)
        reasons.append(
            f"vocabularies of {found[0]:,} and {found[1]:,} tokens: compared on the first {common:,}"
        )
        first, second = ({"logits": output["logits"][..., :common]} for output in (first, second))
    outputs = []
    for name in sorted(first.keys() | second.keys()):
        shapes = [list(output[name].shape) if name in output else None for output in (first, second)]
        if shapes[0] != shapes[1]:
            reasons.append(f"{name}: {' and '.join('none' if s is None else str(s) for s in shapes)}")
        else:
            outputs.append(_difference(name, first[name], second[name]))
    agree = len(outputs) == len(first.keys() | second.keys())
    agree = agree and all(_within(part, result.tolerance) for part in outputs)
    reasons += [_sentence(part, result.tolerance) for part in outputs]
    parted = next((layer.name for layer in layers if not _within(layer, result.tolerance)), None)
    if parted is not None:
        reasons.append(f"the hidden states part at {parted}")
    result = replace(
        result,
        outputs=outputs,
        layers=layers,
        first_layer=parted,
        tokens=(tokens, rows, seed),
        by_layer=by_layer,
        same_function=agree and not result.function,
    )
    return result, reasons


def _cannot_share_inputs(a: LlamoeBaseConfig, b: LlamoeBaseConfig) -> str | None:
    visions = [getattr(config, "vision_config", config) for config in (a, b)]
    if not isinstance(visions[0], LlamoeVisionConfig):
        return None
    shapes = [(vision.num_channels, vision.image_size, vision.image_size) for vision in visions]
    if shapes[0] != shapes[1]:
        return (
            f"a sees pictures of {' x '.join(map(str, shapes[0]))} and b of {' x '.join(map(str, shapes[1]))}"
        )
    if isinstance(a, LlamoeConfig) and visions[0].tokens_per_tile != visions[1].tokens_per_tile:
        return f"a makes {visions[0].tokens_per_tile} tokens of a picture and b {visions[1].tokens_per_tile}"
    return None


def _longest(config: LlamoeBaseConfig) -> int:
    """Random tokens that a row can have, besides a picture's."""
    picture = config.vision_config.tokens_per_tile if isinstance(config, LlamoeConfig) else 0
    return max(config.get_text_config().max_position_embeddings - picture, 1)


def _difference(name: str, a: torch.Tensor, b: torch.Tensor) -> OutputDifference:
    difference = (a - b).abs()
    top1 = (a.argmax(-1) == b.argmax(-1)).float().mean().item() if name == "logits" else None
    return OutputDifference(
        name, difference.max().item(), difference.mean().item(), a.std(correction=0).item(), top1
    )


def _within(part: OutputDifference, tolerance: float) -> bool:
    return part.max_abs <= tolerance * part.std  # nan is not


def _agree(result: Verification) -> bool:
    return bool(result.outputs) and all(_within(part, result.tolerance) for part in result.outputs)


def _reasons_of_weights(result: Verification) -> list[str]:
    if result.same_weights:
        return [f"every number of {result.compared:,} tensors is equal"]
    reasons = []
    if result.tensors:
        (key, value), *_ = _largest(result.tensors)
        reasons.append(
            f"{len(result.tensors):,} of {result.compared:,} tensors differ, {key} by as much as {value:.3g}"
        )
    for label, keys in (("a", result.only_in_a), ("b", result.only_in_b)):
        if keys:
            reasons.append(f"only {label} has {_listed(keys)}")
    if result.shapes:
        key, (a, b) = next(iter(result.shapes.items()))
        more = f", and {len(result.shapes) - 1} other shapes differ" if len(result.shapes) > 1 else ""
        reasons.append(f"{key} has shape {a} in a and {b} in b{more}")
    return reasons


def _sentence(part: OutputDifference, tolerance: float) -> str:
    verdict = "within" if _within(part, tolerance) else "beyond"
    return f"{_described(part, part.name + ' differ by')}, {verdict} the tolerance of {tolerance:.3g}"


def _described(part: OutputDifference, begin: str = "max") -> str:
    share = f", {part.max_abs / part.std:.2g} of the standard deviation" if part.std > 0 else ""
    top1 = "" if part.top1 is None else f"; top-1 agrees at {part.top1:.1%}"
    return f"{begin} {part.max_abs:.3g} (mean {part.mean_abs:.3g}){share}{top1}"


def _largest(tensors: dict[str, float]) -> list[tuple[str, float]]:
    """The tensors that differ most; nan before all."""
    return sorted(tensors.items(), key=lambda pair: (pair[1] == pair[1], -pair[1]))[:_SHOWN]


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN:,} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
