"""A tower for other pictures: the position grid resized, or the pixel normalization folded into the patch weights.

Both work on a tower's tensors under stock keys: position rows with the class token last, patch weights as a linear
layer over channels, rows and columns of a patch. Shapes and suffixes: G patches a side, D width, C channels.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

import torch

from ...configuration.json_files import to_json
from ...configuration.sizes import count_of
from ..checkpoint import Checkpoint
from ..io import Computed, LazyTensor
from . import image_processors
from .image_processors import PROCESSOR

PATCH_WEIGHT = "patch_embedding.linear.weight"
POSITIONS = "positional_embedding_vlm"
# Mean and standard deviation of pixels for Llama 4.
_LLAMA_4 = [0.5] * 3


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
    tensors: Mapping[str, LazyTensor], mean: Sequence[float], std: Sequence[float]
) -> dict[str, LazyTensor]:
    """Change the normalization that a tower expects of its pixels to Llama 4's, and keep its features.

    With x = (raw - mean) / std and y = (raw - 0.5) / 0.5, x = y * 0.5 / std + (0.5 - mean) / std. The factor goes into
    the patch weights of its channel. What the constant adds to every patch goes into every patch's position. The class
    token sees no pixels, so its row stays.

    Returns:
        all tensors, two of them new, in their dtypes; computed in float64 and rounded once.
    """
    weight, positions = tensors[PATCH_WEIGHT], tensors[POSITIONS]
    pixels = weight.shape[1] // len(mean)
    mean_C, std_C = (torch.tensor(list(values), dtype=torch.float64) for values in (mean, std))
    factor = (0.5 / std_C).repeat_interleave(pixels)
    constant = ((0.5 - mean_C) / std_C).repeat_interleave(pixels)

    def scale(weight: torch.Tensor) -> torch.Tensor:
        return (weight.double() * factor).to(weight.dtype)

    def shift(positions: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shifted = positions.double()
        shifted[:-1] += weight.double() @ constant
        return shifted.to(positions.dtype)

    shifted = Computed(shift, [positions, weight], positions.shape, positions.dtype, positions.origin)
    return {**tensors, PATCH_WEIGHT: weight.map(scale), POSITIONS: shifted}


def resize(checkpoint: Checkpoint, image_size: int) -> Checkpoint:
    """A tower for pictures of another size in pixels: positions resized (see `resize_positions`), processor adapted.

    Raises:
        ValueError: the size is not a multiple of the patch size, or the grid does not fit the tower's adapter.
    """
    count_of("image_size", image_size)
    before: Any = checkpoint.config
    config = copy.deepcopy(before)
    config.image_size = image_size
    config.validate()
    old, new = before.grid_size, config.grid_size
    tensors = {**checkpoint.tensors, POSITIONS: resize_positions(checkpoint.tensors[POSITIONS], new)}
    companions = dict(checkpoint.companions)
    if (processor := read_processor(checkpoint)) is not None:
        resized = image_processors.with_image_size(processor, before.image_size, image_size)
        companions[PROCESSOR] = to_json(resized)
    note = (
        f"positions: resized from {old} x {old} to {new} x {new}" if old != new else "positions: as they were"
    )
    notes = [*checkpoint.notes, note]
    return replace(checkpoint, config=config, tensors=tensors, companions=companions, notes=notes)


def fold(checkpoint: Checkpoint) -> Checkpoint:
    """A tower that computes the same for pixels normalized by mean = std = 0.5.

    Raises:
        ValueError: the companions hold no preprocessor_config.json, which says what the weights expect.
    """
    processor, path = read_processor(checkpoint), checkpoint.path
    if processor is None:
        raise ValueError(
            f"{path}: holds no {PROCESSOR}, which says how pixels are normalized for these weights, so that the "
            "normalization cannot be folded. Put it there."
        )
    mean, std = image_processors.normalization(processor, f"{path}: {PROCESSOR}")
    if mean == std == _LLAMA_4:
        return replace(checkpoint, notes=[*checkpoint.notes, "normalization: is mean = std = 0.5 already"])
    if checkpoint.config.num_channels != len(mean):
        raise ValueError(
            f"{path}: has {checkpoint.config.num_channels} channels, but a mean for {len(mean)}."
        )
    note = f"normalization: mean {mean} and std {std} folded into the patch weights and positions; now 0.5 and 0.5"
    tensors = _fold_normalization(checkpoint.tensors, mean, std)
    processor.update(do_normalize=True, image_mean=_LLAMA_4, image_std=_LLAMA_4)
    companions = {**checkpoint.companions, PROCESSOR: to_json(processor)}
    return replace(checkpoint, tensors=tensors, companions=companions, notes=[*checkpoint.notes, note])


def read_processor(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The content of preprocessor_config.json; None where there is none."""
    content = checkpoint.companions.get(PROCESSOR)
    return None if content is None else json.loads(content)
