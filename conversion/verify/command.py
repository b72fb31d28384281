"""Whether two checkpoints compute the same function, from their tensors, configurations and outputs.

Both are read as stock keys, whatever their format, and run by this package's own model classes in float32. So the
comparison shows differences between the two files. An error that our reader makes on both sides alike does not show;
this project's tests compare the readers and the models with other implementations.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...configuration import LlamoeConfig, LlamoeVisionConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...configuration.json_files import reading
from ...configuration.sizes import count_of
from ..checkpoint import Checkpoint, tied_head
from ..io import Progress
from ..open import open_checkpoint
from .common_parts import Normalization, pixel_normalization, shared_parts
from .compare_stored import compare_configs, compare_rows, compare_tensors
from .compare_unreached import compare_unreached, wanted_tokens
from .report import (
    TOLERANCE,
    OutputDifference,
    Verification,
    difference,
    reasons_of_fields,
    reasons_of_weights,
    sentence,
    within,
)
from .run_streamed import Weights, random_inputs, run


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
    """Compare two checkpoints of any formats: keys, shapes, weights, configurations and outputs.

    Weights are compared block by block, two blocks in memory at a time. Then both models run one after the other on
    the same random tokens (and pictures), in float32. A multimodal model is compared with a decoder by its decoder, and
    with a tower by its tower, without an adapter or projection that only one of them has. Models with different numbers
    of tokens are compared on the common ones.

    Where both have a processor that states the pixel normalization (preprocessor_config.json or processor_config.json),
    the random pixels are normalized for each side. A tower into which the normalization was folded is then the same
    function. Otherwise both get the same values, as a processor would return them.

    Random tokens include rows of the embedding that differ, as many as fit. Weights that no token reaches, the other
    rows and experts without tokens, are compared separately where they differ. Functions count as the same only if
    these agree, too.

    Where two scores are nearly equal, rounding can make a mixture send a token to other experts. Such a token's
    difference is large; `top1` shows how many tokens still agree.

    Args:
        a: a folder or file that `open_checkpoint` reads, or its result.
        b: another.
        tokens: number of random tokens in a row; at most what both models accept.
        rows: number of rows.
        seed: random seed of tokens and pictures.
        tolerance: see `Verification.tolerance`; by default `TOLERANCE`.
        by_layer: read one matrix at a time, and only the experts that are used. This needs little memory and no more
            time. False reads a whole model before it runs.
        logits: compute outputs; otherwise only weights and configurations are compared.
        device: device that the models run on; this machine must have it.
        progress: an object with `start(total_bytes)` and `advance(nbytes, file)`.

    Raises:
        CheckpointError: a path is not a checkpoint, or a file is damaged.
        ValueError: a count below 1, a negative seed or tolerance, an unavailable device, or one checkpoint reads texts
            only and the other pictures only.
    """
    begin = time.perf_counter()
    count_of("tokens", tokens)
    count_of("rows", rows)
    count_of("seed", seed, 0)
    tolerance = TOLERANCE if tolerance is None else tolerance
    if not tolerance >= 0:
        raise ValueError(f"tolerance = {tolerance!r}: should be a part of the standard deviation, 0 or more")
    device = _usable(device)
    opened = [_open(given) for given in (a, b)]
    parts, notes = shared_parts(*opened)
    structure, function = compare_configs(parts[0].config, parts[1].config)
    normalizations = [pixel_normalization(part) for part in parts]
    if None not in normalizations and normalizations[0] != normalizations[1]:
        structure["normalization of pixels"] = (normalizations[0], normalizations[1])
    total = sum(tensor.nbytes for part in parts for tensor in part.tensors.values())
    meter = _Meter(progress, total * (2 if logits else 1))
    found, unequal, rows_differ = _compare_tensors(*parts, meter)
    result = Verification(
        a=str(opened[0].path),
        b=str(opened[1].path),
        kinds=(opened[0].kind, opened[1].kind),
        structure=structure,
        function=function,
        tolerance=tolerance,
        **found,
    )
    reasons = notes + reasons_of_weights(result)
    if logits:
        runner = _Runner(parts, normalizations, (tokens, rows, seed), by_layer, device, meter)
        result, more = runner.compare(result, unequal, rows_differ)
        reasons += more
    reasons += reasons_of_fields(result)
    meter.finish()
    return replace(result, reasons=reasons, seconds=time.perf_counter() - begin)


def _open(given: str | os.PathLike | Checkpoint) -> Checkpoint:
    if isinstance(given, Checkpoint):
        return given
    # It may be a device file, or a folder without permission.
    with reading(Path(given)):
        return open_checkpoint(given, companions=False)


def _usable(device: str | torch.device) -> torch.device:
    """The device, after a small computation on it.

    Raises:
        ValueError: there is no such device, or it cannot compute.
    """
    try:
        found = torch.device(device)
        torch.ones(1, device=found).add(1).cpu()
        return found
    except (RuntimeError, AssertionError, TypeError) as error:
        there = ["cpu"]
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator().type
            there += [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"device = {str(device)!r}: cannot be used here ({reason}); there is {', '.join(there)}."
        ) from error


class _Meter:
    """Counts bytes that were read. Unused experts are never read, so the total is an upper limit."""

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


def _compare_tensors(
    first: Checkpoint, second: Checkpoint, meter: _Meter
) -> tuple[dict[str, Any], dict[str, set[int]], torch.Tensor | None]:
    """Fields of the result, the experts that differ, and the differences of the embeddings' rows."""
    sides = []
    for part in (first, second):
        aliases = {head: part.tensors[key] for head, key in tied_head(part.config).items()}
        # A tied head counts as a copy of the embedding.
        sides.append({**aliases, **part.tensors})
    a, b = sides
    shapes, tensors, dtypes, not_finite = {}, {}, Counter(), set()
    unequal: dict[str, set[int]] = {}
    rows = None
    common = [key for key in a if key in b]
    for key in common:
        mine, its = a[key], b[key]
        if mine.dtype != its.dtype:
            dtypes[f"{mine.dtype_name} and {its.dtype_name}"] += 1
        if mine.shape != its.shape:
            shapes[key] = (list(mine.shape), list(its.shape))
            by_token = key.endswith(("embed_tokens.weight", "lm_head.weight"))
            if not by_token or mine.shape[1:] != its.shape[1:]:
                continue
        differs, finite, unequal[key] = compare_tensors(mine, its, meter.advance)
        not_finite.update(
            f"{side}: {key}" for side, is_finite in zip("ab", finite, strict=True) if not is_finite
        )
        is_embedding = key.endswith("embed_tokens.weight")
        if differs != 0:
            tensors[key] = differs
            if is_embedding:
                eps = max(part.config.get_text_config().rms_norm_eps for part in (first, second))
                rows = compare_rows(mine, its, eps, meter.advance)
        elif is_embedding:
            rows = torch.zeros(min(mine.shape[0], its.shape[0]))
    only = [[key for key in mine if key not in its] for mine, its in ((a, b), (b, a))]
    fields = {
        "compared": len(common),
        "only_in_a": only[0],
        "only_in_b": only[1],
        "shapes": shapes,
        "dtypes": dict(dtypes),
        "tensors": tensors,
        "not_finite": sorted(not_finite),
        "same_weights": not (only[0] or only[1] or shapes or tensors),
    }
    return fields, unequal, rows


@dataclass
class _Runner:
    """Runs both models on the same inputs and compares their outputs and each layer's hidden states."""

    parts: list[Checkpoint]
    normalizations: list[Normalization | None]
    sizes: tuple[int, int, int]
    by_layer: bool
    device: torch.device
    meter: _Meter

    def compare(
        self, result: Verification, unequal: dict[str, set[int]], rows_differ: torch.Tensor | None
    ) -> tuple[Verification, list[str]]:
        """Complete a result with the comparison of outputs, and return it with the reasons."""
        configs = (self.parts[0].config, self.parts[1].config)
        if problem := _cannot_share_inputs(*configs):
            return replace(result, not_run=problem), [problem]
        tokens, rows, seed = self.sizes
        if not isinstance(configs[0], LlamoeVisionConfig):
            tokens = min(tokens, *map(_longest, configs))
        inputs = random_inputs(
            configs,
            tokens,
            rows,
            seed,
            wanted=wanted_tokens(rows_differ),
            normalizations=None if None in self.normalizations else self.normalizations,
        )
        sides = []
        for side, part in zip("ab", self.parts, strict=True):
            try:
                sides.append(Weights(part.config, part.tensors, self.device, self.meter.advance))
            except CheckpointError as error:
                problem = f"{side} cannot be run: {error}"
                return replace(result, not_run=problem), [problem]
        result = replace(result, tokens=(tokens, rows, seed), by_layer=self.by_layer)
        result, reasons = self._outputs(result, (sides[0], sides[1]), inputs)
        if result.same_function and (not result.same_weights or result.structure):
            answers = compare_unreached((sides[0], sides[1]), result, inputs[0], rows_differ, unequal, seed)
            result = replace(result, unreached=answers)
            reasons += [reason for _, reason in answers]
        return result, reasons

    def _outputs(
        self, result: Verification, sides: tuple[Weights, Weights], inputs: list[dict[str, Any]]
    ) -> tuple[Verification, list[str]]:
        states: dict[str, torch.Tensor] = {}
        layers: list[OutputDifference] = []

        def compare_state(name: str, state: torch.Tensor) -> None:
            expected = states.pop(name, None)
            if expected is not None and expected.shape == state.shape:
                layers.append(difference(name, expected, state))

        first, second = (
            run(side, given, stream=self.by_layer, watch=watch)
            for side, given, watch in zip(sides, inputs, (states.__setitem__, compare_state), strict=True)
        )
        reasons = []
        widths = [side.config.get_text_config().hidden_size for side in sides]
        if widths[0] != widths[1]:
            reasons.append("hidden sizes differ, so that hidden states are not compared")
        if "logits" in first and first["logits"].shape != second["logits"].shape:
            found = [output["logits"].shape[-1] for output in (first, second)]
            common = min(found)
            reasons.append(
                f"vocabularies of {found[0]:,} and {found[1]:,} tokens: compared on the first {common:,}"
            )
            first, second = ({"logits": output["logits"][..., :common]} for output in (first, second))
        outputs, other_outputs = [], {}
        for name in sorted(first.keys() | second.keys()):
            shapes = [list(output[name].shape) if name in output else None for output in (first, second)]
            if shapes[0] != shapes[1]:
                other_outputs[name] = (shapes[0], shapes[1])
                reasons.append(f"{name}: {' and '.join('none' if s is None else str(s) for s in shapes)}")
            else:
                outputs.append(difference(name, first[name], second[name]))
        reasons += [sentence(part, result.tolerance) for part in outputs]
        parted = next((layer.name for layer in layers if not within(layer, result.tolerance)), None)
        if parted is not None:
            reasons.append(f"the hidden states part at {parted}")
        result = replace(
            result,
            outputs=outputs,
            other_outputs=other_outputs,
            layers=layers,
            first_layer=parted,
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
    """Number of random tokens that a row can have, besides a picture's."""
    picture = config.vision_config.tokens_per_tile if isinstance(config, LlamoeConfig) else 0
    return max(config.get_text_config().max_position_embeddings - picture, 1)
