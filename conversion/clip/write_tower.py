"""Towers as a folder of transformers' CLIP."""

from dataclasses import replace
from typing import Any

from transformers import CLIPVisionConfig

from ...configuration.json_files import to_json
from ..checkpoint import Checkpoint, main_dtype
from ..io import Plan, dtype_name, split_shards, write_through
from .image_processors import PROCESSOR, from_open_clip, normalization
from .name_tables import CLIP
from .resize import read_processor

_SHARD_SIZE = 5 * 10**9
# Configuration values that CLIP's classes need to compute the same function.
_REQUIRED = {
    "use_rope": (False, "rotates its patches by their place in the grid, as Llama 4's does"),
    "use_pre_layernorm": (True, "has no norm in front of its blocks"),
    "use_post_layernorm": (True, "has no norm behind its blocks"),
    "attention_bias": (True, "has no biases in its attention"),
}


def plan_clip(checkpoint: Checkpoint) -> tuple[Checkpoint, Plan]:
    """Plan a folder of transformers' CLIP; the checkpoint gets notes on it.

    Raises:
        ValueError: CLIP's classes cannot compute the tower.
    """
    config: Any = checkpoint.config
    for field, (required, meaning) in _REQUIRED.items():
        value = getattr(config, field)
        if value != required:
            raise ValueError(
                f"{checkpoint.path}: this tower {meaning} ({field} = {value}), which transformers' CLIP cannot "
                "express. Only to='tower' fits."
            )
    of_adapter = [name for name in checkpoint.tensors if name.startswith("vision_adapter.")]
    tensors = {name: one for name, one in checkpoint.tensors.items() if name not in of_adapter}
    dropped = checkpoint.dropped | dict.fromkeys(
        of_adapter, "belongs to the adapter, which CLIP does not have"
    )
    notes = list(checkpoint.notes)
    if range(config.num_hidden_layers + 1)[config.vision_feature_layer] != config.num_hidden_layers:
        notes.append(
            f"vision_feature_layer: {config.vision_feature_layer} in the source; CLIP's classes give the last layer"
        )
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
    before = {**checkpoint.companions, "config.json": stock.to_json_string().encode()}
    processor = read_processor(checkpoint)
    if processor is None:
        notes.append(f"{PROCESSOR}: not written, as the source has none")
    elif not str(processor.get("image_processor_type", "CLIP")).startswith("CLIP"):
        # Those of a processor that makes tiles become those of one tile.
        origin = f"{checkpoint.path}: {PROCESSOR}"
        mean, std = normalization(processor, origin)
        of_tile = from_open_clip({"mean": mean, "std": std}, config.image_size, origin)
        before[PROCESSOR] = to_json({**of_tile, "resample": processor.get("resample", 3)})
    return replace(checkpoint, dropped=dropped, notes=notes), Plan(groups, before=before, last=index)
