"""Whether two checkpoints compute the same function: compares tensors, configurations, and logits of random tokens.

Both are read as stock keys, whatever their format, and run by this package's own model classes in float32. So the
comparison shows differences between the two files. An error that our reader makes on both sides alike does not show;
this project's tests compare the readers and the models with other implementations.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import torch

from ...configuration import LlamoeConfig, LlamoeVisionConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...configuration.json_files import reading
from ...configuration.sizes import count_of
from ...modeling.checkpoints import devices_here
from ..checkpoint import Checkpoint, tied_head
from ..io import Progress
from ..open import open_checkpoint
from .common_parts import pixel_normalization, shared_parts
from .compare_stored import compare_configs, compare_rows, compare_tensors
from .compare_unreached import compare_unreached, wanted_tokens
from .report import (
    TOLERANCE,
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
    result = Verification(
        str(opened[0].path),
        str(opened[1].path),
        (opened[0].kind, opened[1].kind),
        structure=structure,
        function=function,
        tolerance=tolerance,
    )
    unequal, rows_differ = _compare_tensors(result, parts, meter)
    result.reasons = notes + reasons_of_weights(result)
    if logits:
        try:
            sides = _sides(parts, device, meter)
        except CheckpointError as error:
            result.not_run = str(error)
            result.reasons.append(result.not_run)
        else:
            configs = (parts[0].config, parts[1].config)
            tokens = (
                tokens if isinstance(configs[0], LlamoeVisionConfig) else min(tokens, *map(_longest, configs))
            )
            wanted = wanted_tokens(rows_differ)
            pixels = None if None in normalizations else normalizations
            inputs = random_inputs(configs, tokens, rows, seed, wanted=wanted, normalizations=pixels)
            result.tokens, result.by_layer = (tokens, rows, seed), by_layer
            _compare_outputs(result, sides, inputs)
            if result.same_function and (not result.same_weights or result.structure):
                result.unreached = compare_unreached(sides, result, inputs[0], rows_differ, unequal, seed)
                result.reasons += [reason for _, reason in result.unreached]
    result.reasons += reasons_of_fields(result)
    meter.finish()
    result.seconds = time.perf_counter() - begin
    return result


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
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"device = {str(device)!r}: cannot be used here ({reason}); there is {', '.join(devices_here())}."
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
    result: Verification, parts: list[Checkpoint], meter: _Meter
) -> tuple[dict[str, set[int]], torch.Tensor | None]:
    """Compare the weights; return the experts that differ, and the differences of the embeddings' rows."""
    # A tied head counts as a copy of the embedding.
    a, b = (
        {head: part.tensors[key] for head, key in tied_head(part.config).items()} | part.tensors
        for part in parts
    )
    result.only_in_a, result.only_in_b = [[key for key in x if key not in y] for x, y in ((a, b), (b, a))]
    dtypes, not_finite, unequal, rows = Counter(), set(), {}, None
    for key, mine in a.items():
        if key not in b:
            continue
        its = b[key]
        result.compared += 1
        if mine.dtype != its.dtype:
            dtypes[f"{mine.dtype_name} and {its.dtype_name}"] += 1
        if mine.shape != its.shape:
            result.shapes[key] = (list(mine.shape), list(its.shape))
            by_token = key.endswith(("embed_tokens.weight", "lm_head.weight"))
            if not by_token or mine.shape[1:] != its.shape[1:]:
                continue
        differs, finite, unequal[key] = compare_tensors(mine, its, meter.advance)
        not_finite.update(
            f"{side}: {key}" for side, is_finite in zip("ab", finite, strict=True) if not is_finite
        )
        is_embedding = key.endswith("embed_tokens.weight")
        if differs != 0:
            result.tensors[key] = differs
            if is_embedding:
                eps = max(part.config.get_text_config().rms_norm_eps for part in parts)
                rows = compare_rows(mine, its, eps, meter.advance)
        elif is_embedding:
            rows = torch.zeros(min(mine.shape[0], its.shape[0]))
    result.dtypes, result.not_finite = dict(dtypes), sorted(not_finite)
    result.same_weights = not (result.only_in_a or result.only_in_b or result.shapes or result.tensors)
    return unequal, rows


def _sides(parts: list[Checkpoint], device: torch.device, meter: _Meter) -> tuple[Weights, Weights]:
    """Both models, to be run on the same inputs.

    Raises:
        CheckpointError: they take no common inputs, or one has not all weights.
    """
    if problem := _cannot_share_inputs(parts[0].config, parts[1].config):
        raise CheckpointError(problem)
    sides = []
    for side, part in zip("ab", parts, strict=True):
        try:
            sides.append(Weights(part.config, part.tensors, device, meter.advance))
        except CheckpointError as error:
            raise CheckpointError(f"{side} cannot be run: {error}") from error
    return sides[0], sides[1]


def _compare_outputs(
    result: Verification, sides: tuple[Weights, Weights], inputs: list[dict[str, torch.Tensor]]
) -> None:
    """Run both models, and compare their outputs and each layer's hidden states."""
    states: dict[str, torch.Tensor] = {}

    def compare_state(name: str, state: torch.Tensor) -> None:
        expected = states.pop(name, None)
        if expected is not None and expected.shape == state.shape:
            result.layers.append(difference(name, expected, state))

    first, second = (
        run(side, given, stream=bool(result.by_layer), watch=watch)
        for side, given, watch in zip(sides, inputs, (states.__setitem__, compare_state), strict=True)
    )
    reasons = result.reasons
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
    for name in sorted(first.keys() | second.keys()):
        a, b = (list(output[name].shape) if name in output else None for output in (first, second))
        if a == b:
            result.outputs.append(difference(name, first[name], second[name]))
        else:
            result.other_outputs[name] = (a, b)
            reasons.append(f"{name}: {a or 'none'} and {b or 'none'}")
    reasons += [sentence(part, result.tolerance) for part in result.outputs]
    parted = (layer.name for layer in result.layers if not within(layer, result.tolerance))
    result.first_layer = next(parted, None)
    if result.first_layer is not None:
        reasons.append(f"the hidden states part at {result.first_layer}")


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
