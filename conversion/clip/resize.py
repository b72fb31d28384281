"""A tower for other pictures: the position grid resized, or the pixel normalization folded into the patch weights.

Both work on a tower's tensors under stock keys: position rows with the class token last, patch weights as a linear
layer over channels, rows and columns of a patch. Shapes and suffixes: G patches a side, D width, C channels.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any, cast

import torch

from ...configuration.json_files import to_json
from ...configuration.sizes import count_of
from ...configuration.vision import LlamoeVisionConfig
from ..checkpoint import Checkpoint
from ..io import LazyTensor, compute
from . import image_processors
from .image_processors import PROCESSOR

PATCH_WEIGHT = "patch_embedding.linear.weight"
POSITIONS = "positional_embedding_vlm"
# Mean and standard deviation of pixels for Llama 4.
_LLAMA_4 = ([0.5] * 3, [0.5] * 3)


def resize_positions(positions: LazyTensor, grid: int) -> LazyTensor:
    """Resize a learned position grid as open_clip does when it loads a tower for another picture size.

    The resize is bicubic with antialiasing, corners not aligned (`open_clip.model.resize_pos_embed`). The class token's
    row is unchanged. transformers' `interpolate_pos_encoding` has no antialiasing and gives other values, even when it
    enlarges.

    Args:
        positions: `[G * G + 1, D]`, class token last.
        grid: patches a side of the new picture.

    Returns:
        `[grid * grid + 1, D]` of the same dtype; computed in float32, or in float64 for float64.
    """
    rows, width = positions.shape
    side = isqrt(rows - 1)
    assert side * side == rows - 1, positions
    if side == grid:
        return positions

    def resize(table: torch.Tensor) -> torch.Tensor:
        exact = table.to(torch.promote_types(table.dtype, torch.float32))
        # Permuted without a copy: with this memory layout torch runs the same kernel as for open_clip.
        patches = exact[:-1].reshape(1, side, side, width).permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(
            patches, size=(grid, grid), mode="bicubic", antialias=True, align_corners=False
        )
        patches = resized.permute(0, 2, 3, 1).reshape(grid * grid, width)
        return torch.cat([patches, exact[-1:]]).to(table.dtype)

    return positions.map(resize, (grid * grid + 1, width))


def _fold_normalization(
    tensors: Mapping[str, LazyTensor],
    mean: Sequence[float],
    std: Sequence[float],
    to_mean: Sequence[float],
    to_std: Sequence[float],
) -> dict[str, LazyTensor]:
    """Change the normalization that a tower expects of its pixels, and keep its features.

    With x = (raw - mean) / std and y = (raw - to_mean) / to_std, x = y * to_std / std + (to_mean - mean) / std. The
    factor goes into the patch weights of its channel. What the constant adds to every patch goes into every patch's
    position. The class token sees no pixels, so its row stays.

    Returns:
        all tensors, two of them new, in their dtypes; computed in float64 and rounded once.
    """
    weight, positions = tensors[PATCH_WEIGHT], tensors[POSITIONS]
    width, columns = weight.shape
    assert columns % len(mean) == 0, (weight, mean)
    pixels = columns // len(mean)
    mean_C, std_C, to_mean_C, to_std_C = (
        torch.tensor(list(values), dtype=torch.float64) for values in (mean, std, to_mean, to_std)
    )
    factor = (to_std_C / std_C).repeat_interleave(pixels)
    constant = ((to_mean_C - mean_C) / std_C).repeat_interleave(pixels)

    def scale(weight: torch.Tensor) -> torch.Tensor:
        return (weight.double() * factor).to(weight.dtype)

    def shift(positions: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shifted = positions.double()
        shifted[:-1] += weight.double() @ constant
        return shifted.to(positions.dtype)

    return {
        **tensors,
        PATCH_WEIGHT: weight.map(scale),
        POSITIONS: compute(shift, [positions, weight], positions.shape, positions.dtype, positions.origin),
    }


def resize(checkpoint: Checkpoint, image_size: int) -> Checkpoint:
    """A tower for pictures of another size in pixels: positions resized (see `resize_positions`), processor adapted.

    Raises:
        ValueError: the size is not a multiple of the patch size, or the grid does not fit the tower's adapter.
    """
    before = cast(LlamoeVisionConfig, checkpoint.config)
    count_of("image_size", image_size)
    config = copy.deepcopy(before)
    config.image_size = image_size
    config.validate()
    positions = resize_positions(checkpoint.tensors[POSITIONS], config.grid_size)
    companions = dict(checkpoint.companions)
    if (processor := read_processor(checkpoint)) is not None:
        side = cast(int, before.image_size)
        companions[PROCESSOR] = to_json(image_processors.with_image_size(processor, side, image_size))
    old, new = before.grid_size, config.grid_size
    note = (
        f"positions: resized from {old} x {old} to {new} x {new}" if old != new else "positions: as they were"
    )
    tensors, notes = {**checkpoint.tensors, POSITIONS: positions}, [*checkpoint.notes, note]
    return replace(checkpoint, config=config, tensors=tensors, companions=companions, notes=notes)


def fold(checkpoint: Checkpoint) -> Checkpoint:
    """A tower that computes the same for pixels normalized by mean = std = 0.5.

    Raises:
        ValueError: the companions hold no preprocessor_config.json, which says what the weights expect.
    """
    processor = read_processor(checkpoint)
    origin = f"{checkpoint.path}: {PROCESSOR}"
    if processor is None:
        raise ValueError(
            f"{checkpoint.path}: holds no {PROCESSOR}, which says how pixels are normalized for these weights, so that "
            "the normalization cannot be folded. Put it there."
        )
    mean, std = image_processors.normalization(processor, origin)
    if (mean, std) == _LLAMA_4:
        return replace(checkpoint, notes=[*checkpoint.notes, "normalization: is mean = std = 0.5 already"])
    if checkpoint.config.num_channels != len(mean):
        raise ValueError(
            f"{checkpoint.path}: has {checkpoint.config.num_channels} channels, but a mean for {len(mean)}."
        )
    note = f"normalization: mean {mean} and std {std} folded into the patch weights and positions; now 0.5 and 0.5"
    tensors = _fold_normalization(checkpoint.tensors, mean, std, *_LLAMA_4)
    processor.update(do_normalize=True, image_mean=_LLAMA_4[0], image_std=_LLAMA_4[1])
    companions = {**checkpoint.companions, PROCESSOR: to_json(processor)}
    return replace(checkpoint, tensors=tensors, companions=companions, notes=[*checkpoint.notes, note])


def read_processor(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The content of preprocessor_config.json; None where there is none."""
    content = checkpoint.companions.get(PROCESSOR)
    return None if content is None else json.loads(content)
