"""Vision towers between all formats: open_clip, transformers' CLIP, ours; on request for another picture size.

`open_tower.py` opens a tower. This file changes its picture size or pixel normalization and writes it.
"""

import copy
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from transformers import CLIPVisionConfig

from ...configuration.json_files import to_json
from ...configuration.vision import LlamoeVisionConfig
from ..checkpoint import (
    Checkpoint,
    Report,
    RunOptions,
    carry_out,
    check_at_least,
    main_dtype,
    parse_dtype,
    takes_options,
)
from ..hf import save_hf
from ..io import (
    LazyTensor,
    Plan,
    check_apart,
    check_target,
    from_tensor,
    read_json,
    split_shards,
    write_through,
)
from . import image_processors
from .image_processors import PROCESSOR
from .name_tables import CLIP, OPEN_CLIP
from .open_clip_config import OPEN_CLIP_CONFIG, write_model_cfg
from .open_tower import OPEN_CLIP_FILES, open_tower
from .resize import POSITIONS, fold_normalization, resize_positions

_TARGETS = ("tower", "open_clip", "clip")
# Mean and standard deviation of pixels for Llama 4.
_LLAMA_4 = ([0.5] * 3, [0.5] * 3)
_SHARD_SIZE = 5 * 10**9
# Configuration values that open_clip's and CLIP's classes need to compute the same function.
_REQUIRED = {
    "use_rope": (False, "rotates its patches by their place in the grid, as Llama 4's does"),
    "use_pre_layernorm": (True, "has no norm in front of its blocks"),
    "use_post_layernorm": (True, "has no norm behind its blocks"),
    "attention_bias": (True, "has no biases in its attention"),
}


@takes_options
def convert_vision(
    source: str | os.PathLike | torch.nn.Module,
    target: str | os.PathLike,
    *,
    to: str = "tower",
    image_size: int | None = None,
    fold_normalization: bool = False,
    activation: str | None = None,
    tag: str | None = None,
    model: str | None = None,
    heads: int | None = None,
    **options: Unpack[RunOptions],
) -> Report:
    """Convert a vision tower between open_clip, transformers' CLIP and ours, in any direction.

    Args:
        source: an open_clip file or folder, a folder of CLIP, MetaCLIP 2, Llama 4 or llamoe, or a model that
            `open_clip.create_model` returned, whose `visual` describes itself; only read.
        target: a folder that does not exist or is empty.
        to: "tower" writes a folder of `LlamoeVisionModel`; "open_clip" writes open_clip_model.safetensors (keys
            `visual.…`) and open_clip_config.json; "clip" writes a folder of transformers'
            `CLIPVisionModelWithProjection`, or `CLIPVisionModel` for a tower without projection.
        image_size: side of the pictures that the new tower takes, in pixels, a multiple of the patch size. The position
            grid is resized as open_clip does it.
        fold_normalization: change the patch weights so that pixels are normalized by mean = std = 0.5, as Llama 4's
            processor does, and the features stay the same.
        activation: "quick_gelu" or "gelu"; needed for an open_clip file without open_clip_config.json, unless `tag` or
            `model` is given.
        tag: the release's tag in open_clip, such as "metaclip_fullcc", which implies activation and preparation of
            pixels. The file is a local one in any case.
        model: the architecture's name in open_clip, such as "ViT-L-14-quickgelu", which stands for the description that
            the file has not. For the same weights open_clip has architectures with either activation.
        heads: number of attention heads; needed for an open_clip file of an unpublished size without
            open_clip_config.json.
        **options: see `RunOptions`.

    Returns:
        what was written; its notes say where the activation came from and what was changed.

    Raises:
        ValueError: bad options, a target in use or inside the source, an unknown activation or number of heads, a tower
            that the target format cannot express, a damaged source, or `resume` for a model, of which nothing shows
            that it is the same one; no file is left behind.
        TypeError: a module that is no model of open_clip.
        OSError: the disk is full or fails; complete files stay for `resume`.
    """
    begun = time.monotonic()
    target = Path(target)
    if to not in _TARGETS:
        raise ValueError(f"to = {to!r}: valid are {', '.join(map(repr, _TARGETS))}.")
    wanted = parse_dtype(options["dtype"])
    if not isinstance(source, torch.nn.Module):
        source = Path(source)
        check_apart(source, target)
    elif options["resume"]:
        raise ValueError("resume = True: goes on with files only. Convert the model anew to another target.")
    check_target(target, options["resume"])
    checkpoint = open_tower(source, activation=activation, tag=tag, model=model, heads=heads)
    if to != "tower":
        _check_expressible(checkpoint, to)
    if image_size is not None:
        checkpoint = resize(checkpoint, image_size)
    if fold_normalization:
        checkpoint = fold(checkpoint)
    identity = {"image_size": image_size, "fold_normalization": fold_normalization}
    identity |= {"hidden_act": checkpoint.config.hidden_act, "heads": checkpoint.config.num_attention_heads}
    if to == "tower":
        report = save_hf(checkpoint, target, layout="llamoe", identity=identity, **options)
        return replace(report, to="tower", seconds=time.monotonic() - begun)
    plan_target = _plan_open_clip if to == "open_clip" else _plan_clip
    checkpoint, plan = plan_target(checkpoint, wanted)
    plan.identity = {"dtype": str(wanted), **identity}
    return carry_out(plan, checkpoint, target, to, begun, options)


def resize(checkpoint: Checkpoint, image_size: int) -> Checkpoint:
    """A tower for pictures of another size in pixels: positions resized (see `resize_positions`), processor adapted.

    Raises:
        ValueError: the size is no multiple of the patch size, or the grid does not fit the tower's adapter.
    """
    before = cast(LlamoeVisionConfig, checkpoint.config)
    check_at_least(1, image_size=image_size)
    config = copy.deepcopy(before)
    config.image_size = image_size
    config.validate()
    positions = resize_positions(checkpoint.tensors[POSITIONS], config.grid_size)
    companions = dict(checkpoint.companions)
    if (processor := _processor(checkpoint)) is not None:
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
    processor = _processor(checkpoint)
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
    tensors = fold_normalization(checkpoint.tensors, mean, std, *_LLAMA_4)
    processor.update(do_normalize=True, image_mean=_LLAMA_4[0], image_std=_LLAMA_4[1])
    companions = {**checkpoint.companions, PROCESSOR: to_json(processor)}
    return replace(checkpoint, tensors=tensors, companions=companions, notes=[*checkpoint.notes, note])


def _processor(checkpoint: Checkpoint) -> dict[str, Any] | None:
    content = checkpoint.companions.get(PROCESSOR)
    return None if content is None else json.loads(content)


def _check_expressible(checkpoint: Checkpoint, to: str) -> None:
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


def _encoder(checkpoint: Checkpoint, dtype: torch.dtype | None) -> tuple[Checkpoint, dict[str, LazyTensor]]:
    """The tensors that CLIP's classes have, and the checkpoint with a note on the others."""
    config = cast(LlamoeVisionConfig, checkpoint.config)
    adapter = [name for name in checkpoint.tensors if name.startswith("vision_adapter.")]
    dropped = dict.fromkeys(adapter, "belongs to the adapter, which CLIP does not have")
    notes = list(checkpoint.notes)
    if range(config.num_hidden_layers + 1)[config.vision_feature_layer] != config.num_hidden_layers:
        notes.append(
            f"vision_feature_layer: {config.vision_feature_layer} in the source; CLIP's classes give the last layer"
        )
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in dropped}
    if dtype is not None:
        tensors = {name: tensor.cast(dtype) for name, tensor in tensors.items()}
    return replace(checkpoint, dropped={**checkpoint.dropped, **dropped}, notes=notes), tensors


def _plan_open_clip(checkpoint: Checkpoint, dtype: torch.dtype | None) -> tuple[Checkpoint, Plan]:
    config = cast(LlamoeVisionConfig, checkpoint.config)
    model = write_model_cfg(config)
    checkpoint, tensors = _encoder(checkpoint, dtype)
    notes = checkpoint.notes
    if config.projection_dim is None:
        name = "visual_projection.weight"
        identity = torch.eye(config.hidden_size, dtype=tensors["class_embedding"].dtype)
        tensors[name] = from_tensor(identity, "an identity matrix")
        notes.append(
            "visual.proj: an identity matrix, as open_clip's towers always project and this one does not"
        )
    processor = _processor(checkpoint)
    content: dict[str, Any] = {"model_cfg": model}
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
        model["text_cfg"] = text
    else:
        notes.append(f"{OPEN_CLIP_CONFIG}: without text_cfg, as the source does not say it")
    (translated,) = write_through(OPEN_CLIP, tensors, 1, config)
    groups = [{OPEN_CLIP_FILES[0]: translated}]
    return checkpoint, Plan(groups, before=_licences(checkpoint), last={OPEN_CLIP_CONFIG: to_json(content)})


def _text_cfg(path: Path) -> Any:
    file = path / OPEN_CLIP_CONFIG if path.is_dir() else path.with_name(OPEN_CLIP_CONFIG)
    if not file.is_file() or (path.is_file() and path.name not in OPEN_CLIP_FILES):
        return None
    settings = read_json(file)
    model = settings.get("model_cfg", settings)
    return model.get("text_cfg") if isinstance(model, dict) else None


def _plan_clip(checkpoint: Checkpoint, dtype: torch.dtype | None) -> tuple[Checkpoint, Plan]:
    config = cast(LlamoeVisionConfig, checkpoint.config)
    checkpoint, tensors = _encoder(checkpoint, dtype)
    has_projection = config.projection_dim is not None
    same = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size",
        "patch_size", "hidden_act", "attention_dropout", *(("projection_dim",) if has_projection else ()),
    )  # fmt: skip
    stock = CLIPVisionConfig(
        **{name: getattr(config, name) for name in same},
        layer_norm_eps=config.norm_eps,
        architectures=["CLIPVisionModelWithProjection" if has_projection else "CLIPVisionModel"],
        dtype=str(main_dtype(tensors)).removeprefix("torch."),
    )
    (translated,) = write_through(CLIP, tensors, 1, config)
    groups, index = split_shards(translated, _SHARD_SIZE)
    before = {**_licences(checkpoint), "config.json": stock.to_json_string().encode()}
    processor = _processor(checkpoint)
    if processor is None:
        checkpoint.notes.append(f"{PROCESSOR}: not written, as the source has none")
    else:
        before[PROCESSOR] = to_json(_as_clip_processor(processor, checkpoint, cast(int, config.image_size)))
    return checkpoint, Plan(groups, before=before, last=index)


def _as_clip_processor(
    processor: Mapping[str, Any], checkpoint: Checkpoint, image_size: int
) -> dict[str, Any]:
    """Settings for `CLIPImageProcessor`; those of a processor that makes tiles become those of one tile."""
    if str(processor.get("image_processor_type", "CLIP")).startswith("CLIP"):
        return dict(processor)
    origin = f"{checkpoint.path}: {PROCESSOR}"
    return image_processors.from_open_clip(
        image_processors.to_open_clip(processor, origin), image_size, origin
    )


def _licences(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: content for name, content in checkpoint.companions.items() if name != PROCESSOR}
