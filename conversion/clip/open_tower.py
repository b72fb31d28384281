"""Opens vision towers: open_clip's MetaCLIP, transformers' CLIP and MetaCLIP 2, Llama 4's and ours.

The weights do not show their activation: most MetaCLIP releases were trained with QuickGELU, some with GELU, and
open_clip lists the same weights under architectures with either. It is taken from a description of the weights
(open_clip_config.json, config.json, the release's tag, the caller) and never from a file's name. A tower without a
description, or with two that disagree, is refused.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPConfig, CLIPVisionConfig, MetaClip2Config, MetaClip2VisionConfig

from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from ...configuration.multimodal import LlamoeConfig
from ...configuration.vision import LlamoeVisionConfig
from ...modeling.checkpoints import check_shards
from ..checkpoint import Checkpoint, expected_shapes
from ..hf import open_hf, read_companions, weight_files
from ..io import (
    LazyTensor,
    Table,
    check_source,
    from_tensor,
    open_weights,
    read_json,
    read_through,
    remember_looks,
    write_through,
)
from . import image_processors
from .name_tables import CLIP, OPEN_CLIP, OPEN_CLIP_REFUSED, describe_releases
from .open_clip_config import (
    OPEN_CLIP_CONFIG,
    agree,
    find_heads,
    find_release,
    read_activation,
    read_norm_eps,
    read_sizes,
)

ACTIVATIONS = ("quick_gelu", "gelu")
OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
PROCESSOR = "preprocessor_config.json"
_CLIP_CONFIGS = {
    "clip": CLIPConfig,
    "clip_vision_model": CLIPVisionConfig,
    "metaclip_2": MetaClip2Config,
    "metaclip_2_vision_model": MetaClip2VisionConfig,
}
_OUR_TYPES = ("llamoe_vision", "llama4_vision_model", "llamoe", "llama4")
_WITHOUT_PREFIX = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")
_LICENCES = ("LICENSE", "NOTICE", "USE_POLICY")
# Classes whose checkpoints have no projection.
_BARE_ARCHITECTURES = ("CLIPVisionModel", "MetaClip2VisionModel")


@dataclass(frozen=True)
class _Format:
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


_OPEN_CLIP = _Format(
    OPEN_CLIP,
    class_token="visual.class_embedding",
    positions="visual.positional_embedding",
    patches="visual.conv1.weight",
    inner="visual.transformer.resblocks.0.mlp.c_fc.weight",
    layer=r"visual\.transformer\.resblocks\.(\d+)\.",
    projection="visual.proj",
    projection_axis=1,
)
_CLIP = _Format(
    CLIP,
    class_token="vision_model.embeddings.class_embedding",
    positions="vision_model.embeddings.position_embedding.weight",
    patches="vision_model.embeddings.patch_embedding.weight",
    inner="vision_model.encoder.layers.0.mlp.fc1.weight",
    layer=r"vision_model\.encoder\.layers\.(\d+)\.",
    projection="visual_projection.weight",
    projection_axis=0,
)


def tower_kind(path: str | Path) -> str | None:
    """The kind of vision tower at a path.

    Args:
        path: a folder, or a weight file.

    Returns:
        "open_clip", "clip" (transformers' CLIP or MetaCLIP 2), "hf" (ours or Llama 4's, alone or in a multimodal
        model), or None.
    """
    path = Path(path)
    if path.is_dir():
        if any((path / name).is_file() for name in OPEN_CLIP_FILES):
            return "open_clip"
        config = path / "config.json"
        model_type = str(read_json(config).get("model_type")) if config.is_file() else None
        if model_type in _CLIP_CONFIGS:
            return "clip"
        return "hf" if model_type in _OUR_TYPES else None
    if path.is_file() and path.suffix != ".json":
        is_open_clip = any(name.removeprefix("module.").startswith("visual.") for name in open_weights(path))
        return "open_clip" if is_open_clip else None
    return None


@remember_looks
def open_tower(
    path: str | Path, *, activation: str | None = None, tag: str | None = None, heads: int | None = None
) -> Checkpoint:
    """Open a vision tower: open_clip's, transformers' CLIP or MetaCLIP 2, Llama 4's or ours.

    All sizes are read off the tensors and compared with the configuration.

    Args:
        path: an open_clip file (.safetensors, .pt, .bin) or folder, or a folder of transformers.
        activation: "quick_gelu" or "gelu", for an open_clip file without open_clip_config.json.
        tag: the release's tag in open_clip ("metaclip_400m", "metaclip_fullcc", …), which implies the activation.
        heads: number of attention heads, for an open_clip file of an unpublished size without open_clip_config.json.

    Returns:
        the tower under the keys of `LlamoeVisionModel`. Its companions hold preprocessor_config.json where the source
        states how pictures are prepared, or is of open_clip, which has defaults for it.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor is missing, unknown or of another shape, or the
            tower has parts that ours cannot express.
        ValueError: activation or heads are unknown, or an argument contradicts the configuration.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder.")
    if path.is_dir():
        check_source(path)
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation = {activation!r}: valid are {' and '.join(map(repr, ACTIVATIONS))}.")
    if heads is not None and (isinstance(heads, bool) or not isinstance(heads, int) or heads < 1):
        raise ValueError(f"heads = {heads!r}: should be the number of attention heads, 1 or more.")
    kind = tower_kind(path)
    if kind == "open_clip":
        return _open_open_clip(path, activation, tag, heads)
    if tag is not None:
        raise ValueError(f"tag = {tag!r}: {path} is no open_clip checkpoint, and says its activation itself.")
    if kind is None:
        raise _explain_unknown(path)
    checkpoint = _open_clip(path) if kind == "clip" else _open_ours(path)
    stated = {f"config.json of {path}": checkpoint.config.hidden_act, "the argument activation": activation}
    agree("activation", {where: value for where, value in stated.items() if value is not None})
    stated = {f"config.json of {path}": checkpoint.config.num_attention_heads, "the argument heads": heads}
    agree("number of heads", {where: value for where, value in stated.items() if value is not None})
    return checkpoint


def _explain_unknown(path: Path) -> CheckpointError:
    if path.is_file():
        names = open_weights(path)
        if any(name.startswith(("cls_token", "blocks.0.", "trunk.")) for name in names):
            found = (
                "has timm's names; the file open_clip_model.safetensors of the same release has open_clip's"
            )
        elif any("encoder.layers.0." in name or "model.layers.0." in name for name in names):
            found = "has transformers' names; give its folder, whose config.json belongs to it"
        else:
            found = (
                f"has no tensor of an open_clip tower (visual.…), but {', '.join(list(names)[:3]) or 'none'}"
            )
        return CheckpointError(f"{path}: {found}.")
    expected = (
        f"{' or '.join(OPEN_CLIP_FILES)}, or a config.json with model_type "
        f"{', '.join(map(repr, (*_CLIP_CONFIGS, *_OUR_TYPES)))}"
    )
    if not (path / "config.json").is_file():
        return CheckpointError(
            f"{path}: is no tower's folder: expected {expected}. A single file is named itself."
        )
    model_type = str(read_json(path / "config.json").get("model_type"))
    reason = " (SigLIP's towers have no class token and pool by attention)" if "siglip" in model_type else ""
    return CheckpointError(
        f"{path / 'config.json'}: model_type {model_type!r} is no tower that can be converted{reason}; expected "
        f"{expected}."
    )


def _open_open_clip(path: Path, activation: str | None, tag: str | None, heads: int | None) -> Checkpoint:
    file = path
    if path.is_dir():
        file = next(path / name for name in OPEN_CLIP_FILES if (path / name).is_file())
    tensors = _without_prefix(open_weights(file), file)
    for name in tensors:
        for part, reason in OPEN_CLIP_REFUSED.items():
            if name.startswith("visual.") and part in name:
                raise CheckpointError(
                    f"{file}: {name}: {reason} has no place in this tower, nor in MetaCLIP's."
                )
    if "visual.ln_pre.weight" not in tensors:
        raise CheckpointError(
            f"{file}: visual.ln_pre.weight is missing: a tower without a norm in front of its blocks (no_ln_pre) "
            "is not MetaCLIP's."
        )
    if _OPEN_CLIP.projection not in tensors:
        raise CheckpointError(
            f"{file}: {_OPEN_CLIP.projection} is missing, which every tower of open_clip has."
        )
    sizes, grid = _sizes(_OPEN_CLIP, tensors, file)
    # The configuration belongs to the file only where both have the names that open_clip gives them.
    config_file = file.with_name(OPEN_CLIP_CONFIG)
    settings: dict[str, Any] = {}
    model: dict[str, Any] = {}
    if file.name in OPEN_CLIP_FILES and config_file.is_file():
        settings = read_json(config_file)
        model = settings.get("model_cfg", settings)
        stated = read_sizes(model, config_file)
        _check_stated(stated, sizes, config_file, file)
        image_size = _image_size(
            model["vision_cfg"].get("image_size"), grid, sizes["patch_size"], config_file
        )
    else:
        image_size = grid * sizes["patch_size"]
    release = find_release(tag, sizes, image_size) if tag is not None else None
    act = {
        str(config_file): read_activation(model, config_file) if model else None,
        "the argument activation": activation,
        f"the tag {tag!r}": release.activation if release else None,
    }
    found = {where: value for where, value in act.items() if value is not None}
    if not found:
        raise ValueError(
            f"{file}: nothing says whether these weights were trained with QuickGELU or GELU: there is no "
            f"{OPEN_CLIP_CONFIG} beside a file named {' or '.join(OPEN_CLIP_FILES)}, and the tensors do not show it. "
            f"Give activation='quick_gelu' or 'gelu', or the release's tag. Known releases: {describe_releases()}."
        )
    notes = [f"activation: {agree('activation', found)}, by {' and '.join(found)}"]
    if not model:
        notes.append(f"pixels: open_clip's default preparation, as there is no {OPEN_CLIP_CONFIG}")
    config = _config(
        file,
        **sizes,
        image_size=image_size,
        hidden_act=agree("activation", found),
        num_attention_heads=find_heads(model, config_file, sizes, heads, file),
        norm_eps=read_norm_eps(model, config_file) if model else 1e-5,
    )
    preprocess = settings.get("preprocess_cfg") or {}
    if not isinstance(preprocess, dict):
        raise CheckpointError(f"{config_file}: preprocess_cfg is {preprocess!r}, not an object.")
    if release is not None:
        preprocess = {"resize_mode": release.resize_mode, **preprocess}
    processor = image_processors.from_open_clip(preprocess, image_size, str(config_file if model else file))
    return _checkpoint(path, "open_clip", _OPEN_CLIP, config, tensors, processor, [file], notes)


def _open_clip(path: Path) -> Checkpoint:
    config_file = path / "config.json"
    content = read_json(config_file)
    weights = weight_files(path)
    files = weights.files
    renamed: dict[str, LazyTensor] = {}
    held: dict[str, Path] = {}
    for file in files:
        for name, tensor in open_weights(file).items():
            held[name] = file
            # transformers leaves the prefix out in towers that are saved alone.
            key = f"vision_model.{name}" if name.startswith(_WITHOUT_PREFIX) else name
            if key in renamed:
                raise CheckpointError(
                    f"{tensor.origin}: is the same tensor as {renamed[key].origin}. Remove one."
                )
            renamed[key] = tensor
    check_shards(weights, held)
    sizes, grid = _sizes(_CLIP, renamed, path)
    try:
        stock = _CLIP_CONFIGS[content["model_type"]].from_dict(content)
    # transformers' classes raise various errors.
    except Exception as error:
        raise CheckpointError(
            f"{config_file}: cannot be read as {content['model_type']} ({error})."
        ) from error
    stock = getattr(stock, "vision_config", stock)
    architectures = content.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(
            f"{config_file}: architectures should be a list of names, not {str(architectures)[:99]}."
        )
    wants_projection = bool(architectures) and not set(architectures) & set(_BARE_ARCHITECTURES)
    if wants_projection and _CLIP.projection not in renamed:
        raise CheckpointError(
            f"{path}: {_CLIP.projection} is missing, which a {architectures[0]} (config.json) has."
        )
    patch = stock.patch_size[0] if isinstance(stock.patch_size, (list, tuple)) else stock.patch_size
    stated = {
        "hidden_size": stock.hidden_size,
        "num_hidden_layers": stock.num_hidden_layers,
        "intermediate_size": stock.intermediate_size,
        "num_channels": stock.num_channels,
        "patch_size": patch,
    }
    _check_stated(stated, sizes, config_file, path)
    notes = [f"activation: {stock.hidden_act}, by {config_file}"]
    config = _config(
        config_file,
        **sizes,
        image_size=_image_size(stock.image_size, grid, sizes["patch_size"], config_file),
        hidden_act=stock.hidden_act,
        num_attention_heads=stock.num_attention_heads,
        norm_eps=stock.layer_norm_eps,
    )
    return _checkpoint(path, "clip", _CLIP, config, renamed, _read_processor(path), files, notes)


def _open_ours(path: Path) -> Checkpoint:
    """Open a tower's folder, or the tower of a multimodal model."""
    whole = open_hf(path)
    processor = _read_processor(path)
    companions = _licences(path) | ({} if processor is None else {PROCESSOR: to_json(processor)})
    if not isinstance(whole.config, LlamoeConfig):
        return replace(whole, companions=companions)
    config = copy.deepcopy(whole.config.vision_config)
    config.architectures = ["LlamoeVisionModel"]
    tower = {name: tensor for name, tensor in whole.tensors.items() if name.startswith("vision_model.")}
    rest = {name: "not part of the tower" for name in whole.tensors if name not in tower}
    return replace(
        whole,
        config=config,
        tensors={name.removeprefix("vision_model."): tensor for name, tensor in tower.items()},
        dropped={**whole.dropped, **rest},
        companions=companions,
    )


def _read_processor(folder: Path) -> dict[str, Any] | None:
    """Settings of a folder's image processor, from its own file or from the model's processor."""
    if (folder / PROCESSOR).is_file():
        return read_json(folder / PROCESSOR)
    whole = folder / "processor_config.json"
    part = read_json(whole).get("image_processor") if whole.is_file() else None
    return part if isinstance(part, dict) else None


def _licences(folder: Path) -> dict[str, bytes]:
    found = read_companions(folder) if folder.is_dir() else {}
    return {name: content for name, content in found.items() if name.startswith(_LICENCES)}


def _sizes(form: _Format, tensors: Mapping[str, LazyTensor], where: Path) -> tuple[dict[str, Any], int]:
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


def _config(where: Path, **fields: Any) -> LlamoeVisionConfig:
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


def _checkpoint(
    path: Path,
    kind: str,
    form: _Format,
    config: LlamoeVisionConfig,
    tensors: Mapping[str, LazyTensor],
    processor: Mapping[str, Any] | None,
    files: list[Path],
    notes: list[str],
) -> Checkpoint:
    try:
        shapes = expected_shapes(config)
    # An unknown activation.
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    expected = {name: from_tensor(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
    _check_tensors(write_through(form.table, expected, 1, config)[0], tensors, path)
    ours, dropped = read_through(form.table, [tensors], config)
    companions = _licences(path) | ({} if processor is None else {PROCESSOR: to_json(processor)})
    ours = {name: ours[name] for name in expected}
    return Checkpoint(path, kind, config, ours, dropped, companions, files, notes)


def _check_tensors(
    expected: Mapping[str, LazyTensor], tensors: Mapping[str, LazyTensor], where: Path
) -> None:
    """Compare keys, shapes and dtypes with those of a tower of the sizes that were found."""
    missing = [name for name in expected if name not in tensors]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"{where}: {', '.join(missing[:5])}{more} missing; the tower is not whole.")
    for name, tensor in expected.items():
        found = tensors[name]
        if found.shape != tensor.shape:
            raise CheckpointError(
                f"{found.origin}: has shape {list(found.shape)} where the other tensors ask for {list(tensor.shape)}."
            )
        if not found.dtype.is_floating_point or found.dtype.itemsize < 2:
            raise CheckpointError(
                f"{found.origin}: has dtype {str(found.dtype).removeprefix('torch.')}; plain float32, float16 or "
                "bfloat16 weights were expected. Quantized weights are not converted."
            )


def _without_prefix(tensors: Mapping[str, LazyTensor], file: Path) -> dict[str, LazyTensor]:
    """The tensors without the prefix that distributed training adds to each name."""
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        key = name.removeprefix("module.")
        if key in result:
            raise CheckpointError(
                f"{file}: {key} and module.{key} are the same tensor under two names. Remove one."
            )
        result[key] = tensor
    return result


def _check_stated(stated: Mapping[str, Any], sizes: Mapping[str, Any], where: Path, weights: Path) -> None:
    for name, value in stated.items():
        if value is not None and value != sizes[name]:
            raise CheckpointError(
                f"{where}: makes {name} {value}, but the tensors of {weights} have {sizes[name]}. The two do not "
                "belong together."
            )


def _image_size(stated: Any, grid: int, patch: int, where: Path) -> int:
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
