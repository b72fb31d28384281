"""What the tensors of a tower show, and whether they are those of one tower."""

import re
from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from ...configuration.vision import LlamoeVisionConfig
from ..checkpoint import Checkpoint, check_model
from ..hf import read_companions
from ..io import LazyTensor, Table, read_through, sources_of
from .image_processors import PROCESSOR
from .name_tables import OPEN_CLIP

# Keys whose tensors show the sizes, and their axes in the other formats.
_MEASURED = {
    "class_embedding": 1,
    "positional_embedding_vlm": 2,
    "patch_embedding.linear.weight": 4,
    "model.layers.0.mlp.fc1.weight": 2,
}
_LICENCES = ("LICENSE", "NOTICE", "USE_POLICY")


def measure(table: Table, tensors: Mapping[str, LazyTensor], where: Path) -> tuple[dict[str, Any], int]:
    """Configuration fields that the shapes show, and the number of patches a side."""
    names = [sources_of(table, key)[0] for key in _MEASURED]
    for name, axes in zip(names, _MEASURED.values(), strict=True):
        if name not in tensors:
            raise CheckpointError(
                f"{where}: {name} is missing, without which this is not a vision transformer of CLIP."
            )
        if tensors[name].ndim != axes:
            raise CheckpointError(
                f"{tensors[name].origin}: has shape {list(tensors[name].shape)}; {axes} axes were expected."
            )
    class_token, positions, patches, inner = (tensors[name] for name in names)
    (width,) = class_token.shape
    _, channels, *patch = patches.shape
    if patch[0] != patch[1]:
        raise CheckpointError(f"{patches.origin}: patches of {patch[0]} by {patch[1]} pixels are not square.")
    count = positions.shape[0]
    grid = isqrt(max(count - 1, 0))
    if grid < 1 or grid * grid != count - 1:
        raise CheckpointError(
            f"{positions.origin}: {count} positions are not those of a class token and a square grid of patches "
            "(1 + G * G); towers for other pictures are not converted."
        )
    layer = re.compile(re.escape(names[-1].partition(".0.")[0]) + r"\.(\d+)\.")
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": max(int(match[1]) for name in tensors if (match := layer.match(name))) + 1,
        "intermediate_size": inner.shape[0],
        "num_channels": channels,
        "patch_size": patch[0],
        "projection_dim": None,
    }
    projection = tensors.get(sources_of(table, "visual_projection.weight")[0])
    if projection is not None and projection.ndim == 2:
        sizes["projection_dim"] = projection.shape[1 if table is OPEN_CLIP else 0]
    return sizes, grid


def check_stated(
    stated: Mapping[str, Any], sizes: Mapping[str, Any], where: Path | str, weights: Path
) -> None:
    """Refuse a configuration that states other sizes than the tensors have."""
    for name, value in stated.items():
        if value is not None and value != sizes[name]:
            raise CheckpointError(
                f"{where}: makes {name} {value}, but the tensors of {weights} have {sizes[name]}. The two do not "
                "belong together."
            )


def image_size_of(stated: Any, grid: int, patch: int, where: Path | str) -> int:
    """Side of the picture in pixels; the position grid must fit it."""
    sides = (
        list(stated) if isinstance(stated, (list, tuple)) else [grid * patch if stated is None else stated]
    )
    if not sides or any(side != sides[0] for side in sides):
        raise CheckpointError(f"{where}: image_size is {stated}; pictures must be square.")
    if sides[0] != grid * patch:
        raise CheckpointError(
            f"{where}: image_size is {sides[0]}, but the positions are a grid of {grid} by {grid} patches of {patch} "
            f"pixels, which is {grid * patch}. Correct it; another size is made on request (image_size)."
        )
    return sides[0]


def make_config(where: Path, **fields: Any) -> LlamoeVisionConfig:
    """The configuration of a tower without adapter, of the fields that were found."""
    try:
        return LlamoeVisionConfig(
            **fields,
            use_rope=False,
            use_adapter=False,
            vision_output_dim=fields["hidden_size"],
            architectures=["LlamoeVisionModel"],
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def companions_of(path: Path, processor: Mapping[str, Any] | None) -> dict[str, bytes]:
    """The licence files of a folder, and the settings of its image processor."""
    found = read_companions(path) if path.is_dir() else {}
    kept = {name: content for name, content in found.items() if name.startswith(_LICENCES)}
    return kept if processor is None else {**kept, PROCESSOR: to_json(processor)}


def make_checkpoint(
    path: Path,
    kind: str,
    table: Table,
    config: LlamoeVisionConfig,
    tensors: Mapping[str, LazyTensor],
    processor: Mapping[str, Any] | None,
    files: list[Path],
    notes: list[str],
) -> Checkpoint:
    """The checkpoint of a tower, whose keys, shapes and dtypes must be those of the configuration's sizes."""
    ours, dropped = read_through(table, [tensors], config)
    ours = check_model(config, ours, str(path), lambda name: sources_of(table, name))
    return Checkpoint(path, kind, config, ours, dropped, companions_of(path, processor), files, notes)
