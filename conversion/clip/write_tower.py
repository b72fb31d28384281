"""Towers as open_clip's file and as a folder of transformers' CLIP."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig

from ...configuration.json_files import to_json
from ..checkpoint import Checkpoint, main_dtype
from ..io import InMemory, LazyTensor, Plan, dtype_name, read_json, split_shards, write_through
from . import image_processors
from .image_processors import PROCESSOR
from .name_tables import CLIP, OPEN_CLIP
from .open_clip_config import OPEN_CLIP_CONFIG, write_model_cfg
from .open_tower import OPEN_CLIP_FILES
from .resize import read_processor

_SHARD_SIZE = 5 * 10**9
# Configuration values that open_clip's and CLIP's classes need to compute the same function.
_REQUIRED = {
    "use_rope": (False, "rotates its patches by their place in the grid, as Llama 4's does"),
    "use_pre_layernorm": (True, "has no norm in front of its blocks"),
    "use_post_layernorm": (True, "has no norm behind its blocks"),
    "attention_bias": (True, "has no biases in its attention"),
}


def check_expressible(checkpoint: Checkpoint, to: str) -> None:
    """Raise a `ValueError` if open_clip's ("open_clip") or CLIP's ("clip") classes cannot compute the tower."""
    config = checkpoint.config
    names = {"open_clip": "open_clip's", "clip": "transformers' CLIP"}
    for field, (required, meaning) in _REQUIRED.items():
        found = getattr(config, field)
        if found != required:
            raise ValueError(
                f"{checkpoint.path}: this tower {meaning} ({field} = {found}), which {names[to]} towers cannot "
                "express. Only to='tower' fits."
            )
    if to == "open_clip" and config.num_channels != 3:
        raise ValueError(f"{checkpoint.path}: has {config.num_channels} channels; open_clip's towers have 3.")


def _encoder(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, LazyTensor]]:
    """The tensors that CLIP's classes have, and the checkpoint with a note on the others."""
    config: Any = checkpoint.config
    tensors = {
        name: one for name, one in checkpoint.tensors.items() if not name.startswith("vision_adapter.")
    }
    dropped = checkpoint.dropped | {
        name: "belongs to the adapter, which CLIP does not have"
        for name in checkpoint.tensors
        if name not in tensors
    }
    notes = list(checkpoint.notes)
    if range(config.num_hidden_layers + 1)[config.vision_feature_layer] != config.num_hidden_layers:
        notes.append(
            f"vision_feature_layer: {config.vision_feature_layer} in the source; CLIP's classes give the last layer"
        )
    return replace(checkpoint, dropped=dropped, notes=notes), tensors


def plan_open_clip(checkpoint: Checkpoint) -> tuple[Checkpoint, Plan]:
    """A folder of open_clip, and the checkpoint with notes on it."""
    config: Any = checkpoint.config
    content: dict[str, Any] = {"model_cfg": write_model_cfg(config)}
    checkpoint, tensors = _encoder(checkpoint)
    notes = checkpoint.notes
    if config.projection_dim is None:
        identity = torch.eye(config.hidden_size, dtype=tensors["class_embedding"].dtype)
        tensors["visual_projection.weight"] = InMemory(identity, "an identity matrix")
        notes.append(
            "visual.proj: an identity matrix, as open_clip's towers always project and this one does not"
        )
    processor = read_processor(checkpoint)
    if processor is None:
        notes.append(
            f"preprocess_cfg: unknown, as the source has no {PROCESSOR}; open_clip takes its default"
        )
    else:
        origin = f"{checkpoint.path}: {PROCESSOR}"
        content["preprocess_cfg"] = image_processors.to_open_clip(processor, origin)
    # A model of open_clip has no files.
    text = _text_cfg(checkpoint.path) if checkpoint.sources else None
    if text is not None:
        content["model_cfg"]["text_cfg"] = text
    else:
        notes.append(f"{OPEN_CLIP_CONFIG}: without text_cfg, as the source does not say it")
    groups = [{OPEN_CLIP_FILES[0]: write_through(OPEN_CLIP, tensors, 1, config)[0]}]
    return checkpoint, Plan(groups, before=_licences(checkpoint), last={OPEN_CLIP_CONFIG: to_json(content)})


def _text_cfg(path: Path) -> Any:
    file = path / OPEN_CLIP_CONFIG if path.is_dir() else path.with_name(OPEN_CLIP_CONFIG)
    if not file.is_file() or (path.is_file() and path.name not in OPEN_CLIP_FILES):
        return None
    settings = read_json(file)
    model = settings.get("model_cfg", settings)
    return model.get("text_cfg") if isinstance(model, dict) else None


def plan_clip(checkpoint: Checkpoint) -> tuple[Checkpoint, Plan]:
    """The same for a folder of transformers' CLIP."""
    config: Any = checkpoint.config
    checkpoint, tensors = _encoder(checkpoint)
    has_projection = config.projection_dim is not None
    same = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size",
        "patch_size", "hidden_act", "attention_dropout", *(("projection_dim",) if has_projection else ()),
    )  # fmt: skip
    stock = CLIPVisionConfig(
        **{name: getattr(config, name) for name in same},
        layer_norm_eps=config.norm_eps,
        architectures=["CLIPVisionModelWithProjection" if has_projection else "CLIPVisionModel"],
        dtype=dtype_name(main_dtype(tensors)),
    )
    groups, index = split_shards(write_through(CLIP, tensors, 1, config)[0], _SHARD_SIZE)
    before = {**_licences(checkpoint), "config.json": stock.to_json_string().encode()}
    processor = read_processor(checkpoint)
    if processor is None:
        checkpoint.notes.append(f"{PROCESSOR}: not written, as the source has none")
    else:
        if not str(processor.get("image_processor_type", "CLIP")).startswith("CLIP"):
            # Those of a processor that makes tiles become those of one tile.
            origin = f"{checkpoint.path}: {PROCESSOR}"
            settings = image_processors.to_open_clip(processor, origin)
            processor = image_processors.from_open_clip(settings, config.image_size, origin)
        before[PROCESSOR] = to_json(processor)
    return checkpoint, Plan(groups, before=before, last=index)


def _licences(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: content for name, content in checkpoint.companions.items() if name != PROCESSOR}
