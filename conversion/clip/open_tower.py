"""Open open_clip's MetaCLIP towers, and transformers' CLIP and MetaCLIP 2.

The weights do not show their activation: most MetaCLIP releases were trained with QuickGELU, some with GELU. So the
activation is read from a description of the weights (open_clip_config.json, config.json, or the architecture's name in
open_clip), never guessed from a file's name. A tower without a description is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from ...configuration.vision import LlamoeVisionConfig
from ..checkpoint import Checkpoint, check_model
from ..hf import open_shards, read_companions
from ..io import LazyTensor, Table, open_weights, read_json, read_through
from .name_tables import CLIP, OPEN_CLIP
from .open_clip_config import OPEN_CLIP_CONFIG, architecture, read_model_cfg, side_of
from .pictures import PROCESSOR, from_open_clip

OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_CLIP_TYPES = ("clip", "clip_vision_model", "metaclip_2", "metaclip_2_vision_model")
_WITHOUT_PREFIX = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")
# `architectures` in the config.json of towers without a projection.
_BARE = (None, [], ["CLIPVisionModel"], ["MetaClip2VisionModel"])
_LICENCES = ("LICENSE", "NOTICE", "USE_POLICY")


def tower_kind(path: Path) -> str | None:
    """Return the format of a vision tower's folder or file: "open_clip", "clip" (transformers), else None."""
    if path.is_dir():
        if any((path / name).is_file() for name in OPEN_CLIP_FILES):
            return "open_clip"
        config = path / "config.json"
        model_type = str(read_json(config).get("model_type")) if config.is_file() else None
        return "clip" if model_type in _CLIP_TYPES else None
    names = [] if path.suffix == ".json" else open_weights(path)[0]
    return "open_clip" if any(name.removeprefix("module.").startswith("visual.") for name in names) else None


def open_open_clip(path: Path, model: str | None) -> Checkpoint:
    """Open a file or folder of open_clip; `model` is the architecture's name, as in `convert_vision`.

    Raises:
        CheckpointError: a file is damaged; a tensor is missing, unknown or of another shape; or the tower has parts
            that `LlamoeVisionModel` does not have.
        ValueError: `model` is unknown, given for a tower that describes itself, or missing for one that does not.
    """
    file = path
    if path.is_dir():
        file = next(path / name for name in OPEN_CLIP_FILES if (path / name).is_file())
    # Distributed training adds this prefix.
    stored = open_weights(file)[0]
    tensors = {name.removeprefix("module."): tensor for name, tensor in stored.items()}
    if len(tensors) < len(stored):
        raise CheckpointError(
            f"{file}: holds tensors both with and without the prefix module. Remove one of each."
        )
    # An open_clip_config.json describes the weights beside it only if their file has the name that open_clip gives.
    described, settings = file.with_name(OPEN_CLIP_CONFIG), {}
    if file.name in OPEN_CLIP_FILES and described.is_file():
        if model is not None:
            raise ValueError(f"model = {model!r}: {described} describes the tower. Leave the argument out.")
        where, settings = str(described), read_json(described)
        model_cfg = settings.get("model_cfg", settings)
    elif model is not None:
        where, model_cfg = f"open_clip's {model}", architecture(model)
    else:
        raise ValueError(
            f"{file}: the tensors do not show the activation (QuickGELU or GELU) and the number of heads. Give "
            "open_clip's name of the model, such as model='ViT-L-14-quickgelu' (--model), or put "
            f"{OPEN_CLIP_CONFIG} beside a file named {' or '.join(OPEN_CLIP_FILES)}."
        )
    fields = read_model_cfg(model_cfg, where)
    notes = [f"activation: {fields['hidden_act']}, by {where}"]
    preprocess = settings.get("preprocess_cfg") or {}
    if not preprocess:
        notes.append(
            "pixels are prepared as open_clip does by default, since the source has no preprocess_cfg"
        )
    processor = from_open_clip(preprocess, fields["image_size"], where)
    checkpoint = _checkpoint(path, "open_clip", OPEN_CLIP, fields, tensors, processor, where)
    return replace(checkpoint, sources=[file], notes=notes)


def open_clip(path: Path) -> Checkpoint:
    """Open a folder of transformers' CLIP or MetaCLIP 2.

    Raises:
        CheckpointError: as `open_open_clip`.
    """
    file = path / "config.json"
    content = read_json(file)
    opened, _, files = open_shards(path)
    # transformers leaves the prefix out in towers that are saved alone.
    tensors = {
        f"vision_model.{name}" if name.startswith(_WITHOUT_PREFIX) else name: tensor
        for name, tensor in opened.items()
    }
    try:
        stock: Any = CONFIG_MAPPING[content["model_type"]].from_dict(content)
    # The class and its decorator raise errors of many kinds.
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read as {content['model_type']} ({error}).") from error
    stock = getattr(stock, "vision_config", stock)
    has_projection = content.get("architectures") not in _BARE or "visual_projection.weight" in tensors
    names = (
        "hidden_size num_hidden_layers intermediate_size num_channels num_attention_heads hidden_act".split()
    )
    fields = {name: getattr(stock, name) for name in names} | {
        "image_size": side_of(stock.image_size, "image_size", file),
        "patch_size": side_of(stock.patch_size, "patch_size", file),
        "norm_eps": stock.layer_norm_eps,
        "projection_dim": stock.projection_dim if has_projection else None,
    }
    checkpoint = _checkpoint(path, "clip", CLIP, fields, tensors, _read_processor(path), file)
    return replace(checkpoint, sources=files, notes=[f"activation: {stock.hidden_act}, by {file}"])


def _checkpoint(
    path: Path,
    kind: str,
    table: Table,
    fields: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    processor: Mapping[str, Any] | None,
    where: object,
) -> Checkpoint:
    """Make the checkpoint of a tower, which has no adapter; `where` is the file that `fields` come from, for errors."""
    config = LlamoeVisionConfig(
        **fields,
        use_rope=False,
        use_adapter=False,
        vision_output_dim=fields["hidden_size"],
        architectures=["LlamoeVisionModel"],
    )
    ours, dropped = read_through(table, [tensors], config)
    ours = check_model(config, ours, str(path))
    return Checkpoint(path, kind, config, ours, dropped, _companions(path, processor))


def tower_companions(path: Path) -> dict[str, bytes]:
    """Collect the licence files of a folder, and its image processor's settings as preprocessor_config.json."""
    return _companions(path, _read_processor(path))


def _companions(path: Path, processor: Mapping[str, Any] | None) -> dict[str, bytes]:
    files = read_companions(path) if path.is_dir() else {}
    kept = {name: content for name, content in files.items() if name.startswith(_LICENCES)}
    return kept if processor is None else {**kept, PROCESSOR: to_json(processor)}


def _read_processor(folder: Path) -> dict[str, Any] | None:
    """Read the settings of a folder's image processor, from its own file or from processor_config.json."""
    if (folder / PROCESSOR).is_file():
        return read_json(folder / PROCESSOR)
    whole = folder / "processor_config.json"
    part = read_json(whole).get("image_processor") if whole.is_file() else None
    return part if isinstance(part, dict) else None
