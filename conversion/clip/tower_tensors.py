"""What the tensors of a tower show, and whether they are those of one tower."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from ...configuration.vision import LlamoeVisionConfig
from ..checkpoint import Checkpoint, check_plain, expected_shapes_of
from ..hf import read_companions
from ..io import LazyTensor, Table, from_tensor, read_through, write_through
from .image_processors import PROCESSOR
from .name_tables import CLIP, OPEN_CLIP

_LICENCES = ("LICENSE", "NOTICE", "USE_POLICY")


@dataclass(frozen=True)
class Format:
    """Where the tensors of a format show the tower's sizes."""

    table: Table
    class_token: str
    positions: str
    patches: str
    # The first layer's.
    inner: str
    # Pattern of a layer's keys; its group is the number.
    layer: str
    projection: str
    projection_axis: int


OPEN_CLIP_TOWER = Format(
    OPEN_CLIP,
    class_token="visual.class_embedding",
    positions="visual.positional_embedding",
    patches="visual.conv1.weight",
    inner="visual.transformer.resblocks.0.mlp.c_fc.weight",
    layer=r"visual\.transformer\.resblocks\.(\d+)\.",
    projection="visual.proj",
    projection_axis=1,
)
CLIP_TOWER = Format(
    CLIP,
    class_token="vision_model.embeddings.class_embedding",
    positions="vision_model.embeddings.position_embedding.weight",
    patches="vision_model.embeddings.patch_embedding.weight",
    inner="vision_model.encoder.layers.0.mlp.fc1.weight",
    layer=r"vision_model\.encoder\.layers\.(\d+)\.",
    projection="visual_projection.weight",
    projection_axis=0,
)


def measure(form: Format, tensors: Mapping[str, LazyTensor], where: Path) -> tuple[dict[str, Any], int]:
    """Configuration fields that the shapes show, and the number of patches a side."""
    for name, axes in ((form.class_token, 1), (form.positions, 2), (form.patches, 4), (form.inner, 2)):
        if name not in tensors:
            raise CheckpointError(
                f"{where}: {name} is missing, without which this is no vision transformer of CLIP."
            )
        if tensors[name].ndim != axes:
            raise CheckpointError(
                f"{tensors[name].origin}: has shape {list(tensors[name].shape)}; {axes} axes were expected."
            )
    (width,) = tensors[form.class_token].shape
    _, channels, *patch = tensors[form.patches].shape
    if patch[0] != patch[1]:
        raise CheckpointError(
            f"{tensors[form.patches].origin}: patches of {patch[0]} by {patch[1]} pixels are not square."
        )
    positions = tensors[form.positions].shape[0]
    grid = isqrt(max(positions - 1, 0))
    if grid < 1 or grid * grid != positions - 1:
        raise CheckpointError(
            f"{tensors[form.positions].origin}: {positions} positions are not those of a class token and a square "
            "grid of patches (1 + G * G); towers for other pictures are not converted."
        )
    layers = {int(match[1]) for name in tensors if (match := re.match(form.layer, name))}
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": max(layers) + 1,
        "intermediate_size": tensors[form.inner].shape[0],
        "num_channels": channels,
        "patch_size": patch[0],
        "projection_dim": None,
    }
    projection = tensors.get(form.projection)
    if projection is not None and projection.ndim == 2:
        sizes["projection_dim"] = projection.shape[form.projection_axis]
    return sizes, grid


def check_stated(stated: Mapping[str, Any], sizes: Mapping[str, Any], where: Path, weights: Path) -> None:
    """Refuse a configuration that states other sizes than the tensors have."""
    for name, value in stated.items():
        if value is not None and value != sizes[name]:
            raise CheckpointError(
                f"{where}: makes {name} {value}, but the tensors of {weights} have {sizes[name]}. The two do not "
                "belong together."
            )


def image_size_of(stated: Any, grid: int, patch: int, where: Path) -> int:
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


def licences(folder: Path) -> dict[str, bytes]:
    """The licence files of a folder, by name."""
    found = read_companions(folder) if folder.is_dir() else {}
    return {name: content for name, content in found.items() if name.startswith(_LICENCES)}


def make_checkpoint(
    path: Path,
    kind: str,
    form: Format,
    config: LlamoeVisionConfig,
    tensors: Mapping[str, LazyTensor],
    processor: Mapping[str, Any] | None,
    files: list[Path],
    notes: list[str],
) -> Checkpoint:
    """The checkpoint of a tower, whose keys, shapes and dtypes must be those of the configuration's sizes."""
    # Too many layers are refused, and an unknown activation.
    shapes = expected_shapes_of(config, len(tensors), str(path))
    expected = {name: from_tensor(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
    (theirs,) = write_through(form.table, expected, 1, config)
    if missing := [name for name in theirs if name not in tensors]:
        raise CheckpointError(f"{path}: {listed(missing)} missing; the tower is not whole.")
    for name, tensor in theirs.items():
        found = tensors[name]
        if found.shape != tensor.shape:
            raise CheckpointError(
                f"{found.origin}: has shape {list(found.shape)} where the other tensors ask for {list(tensor.shape)}."
            )
        check_plain(found)
    ours, dropped = read_through(form.table, [tensors], config)
    companions = licences(path) | ({} if processor is None else {PROCESSOR: to_json(processor)})
    ours = {name: ours[name] for name in expected}
    return Checkpoint(path, kind, config, ours, dropped, companions, files, notes)
