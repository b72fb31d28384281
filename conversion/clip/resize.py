"""A tower for pictures of another size: the position grid resized. Shapes: G patches a side, D width."""

import copy
import json
from dataclasses import replace
from math import isqrt
from typing import Any

import torch

from ...configuration.json_files import to_json
from ...configuration.sizes import count_of
from ..checkpoint import Checkpoint
from ..io import LazyTensor
from . import image_processors
from .image_processors import PROCESSOR

POSITIONS = "positional_embedding_vlm"


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


def resize(checkpoint: Checkpoint, image_size: int) -> Checkpoint:
    """Resize a tower for pictures of another size in pixels: its positions and its processor.

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


def read_processor(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Read preprocessor_config.json; None where there is none."""
    content = checkpoint.companions.get(PROCESSOR)
    return None if content is None else json.loads(content)
