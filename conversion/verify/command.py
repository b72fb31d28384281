"""Whether two checkpoints hold the same model: compares tensors, configurations, and outputs for random tokens.

Both are read as stock keys, whatever their format, and run by this package's own model classes in float32. So the
comparison shows differences between the two files. An error that our reader makes on both sides alike does not show;
this project's tests compare the readers and the models with other implementations.
"""

from __future__ import annotations

import math
import os
import time

import torch

from ...configuration import LlamoeConfig, LlamoeVisionConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.sizes import count_of
from ..checkpoint import Checkpoint, tied_head
from ..io import Progress
from ..open import open_checkpoint
from .common_parts import shared_parts
from .compare_stored import compare_configs, compare_tensors
from .report import Verification
from .run_streamed import Weights, random_inputs, run


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

    Weights are compared block by block, two blocks in memory at a time. Where they are not equal, or a configuration
    leaves the function of equal weights open, both models run one after the other on the same random tokens (and
    pictures), in float32, one matrix in memory at a time. Outputs that agree show nothing of experts to which no token
    was sent, and of other tokens: `Verification.verdict` says on how many they agree.

    A multimodal model is compared with a decoder by its decoder, and with a tower by its tower, without an adapter or
    projection that only one of them has. Models with different numbers of tokens are compared on the common ones.

    Args:
        a: a folder or file that `open_checkpoint` reads, or its result.
        b: another.
        tokens: number of random tokens in a row; at most what both models accept.
        rows: number of rows.
        seed: random seed of tokens and pictures.
        logits: compute outputs; otherwise only weights and configurations are compared.
        progress: an object with `start(total_bytes)` and `advance(nbytes, file)`, for the comparison of weights.

    Raises:
        CheckpointError: a path is not a checkpoint, or a file is damaged.
        ValueError: a count below 1, a negative seed, or one checkpoint reads texts only and the other
            pictures only.
    """
    begin = time.perf_counter()
    count_of("tokens", tokens)
    count_of("rows", rows)
    count_of("seed", seed, 0)
    opened = [
        given if isinstance(given, Checkpoint) else open_checkpoint(given, companions=False)
        for given in (a, b)
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
    is_open = not (result.same_weights or result.is_rounded) or bool(result.undecided)
    if logits and is_open and not function:
        if not isinstance(configs[0], LlamoeVisionConfig):
            tokens = min(tokens, *map(_longest, configs))
        result.tokens = tokens * rows
        inputs = random_inputs(configs, tokens, rows, seed)
        outputs = [
            run(Weights(part.config, part.tensors), given) for part, given in zip(parts, inputs, strict=True)
        ]
        _compare_outputs(result, *outputs)
    result.seconds = time.perf_counter() - begin
    return result


def _compare_tensors(result: Verification, parts: list[Checkpoint], progress: Progress | None) -> None:
    # A tied head counts as a copy of the embedding.
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
    """Return the number of random tokens that a row can have, besides a picture's."""
    picture = config.vision_config.tokens_per_tile if isinstance(config, LlamoeConfig) else 0
    return max(config.get_text_config().max_position_embeddings - picture, 1)
