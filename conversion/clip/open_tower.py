"""Opens vision towers: open_clip's MetaCLIP, transformers' CLIP and MetaCLIP 2, Llama 4's and ours.

The weights do not show their activation: most MetaCLIP releases were trained with QuickGELU, some with GELU, and
open_clip lists the same weights under architectures with either. It is taken from a description of the weights
(open_clip_config.json, config.json, the release's tag, the architecture's name in open_clip, the caller) and never from
a file's name. A tower without a description, or with two that disagree, is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import CLIPConfig, CLIPVisionConfig, MetaClip2Config, MetaClip2VisionConfig

from ...configuration.errors import CheckpointError
from ...configuration.multimodal import LlamoeConfig
from ...configuration.sizes import count_of
from ...modeling.checkpoints import check_whole
from ..checkpoint import Checkpoint, refuse_adapter, take_part
from ..hf import open_hf, open_shards
from ..io import LazyTensor, from_tensor, look_at_source, open_weights, read_json
from . import image_processors
from .image_processors import PROCESSOR
from .name_tables import CLIP, OPEN_CLIP, OPEN_CLIP_REFUSED
from .open_clip_config import (
    OPEN_CLIP_CONFIG,
    agree,
    architecture,
    describe_releases,
    describe_tower,
    find_release,
    published_heads,
    read_activation,
    read_heads,
    read_norm_eps,
    read_sizes,
)
from .tower_tensors import check_stated, companions_of, image_size_of, make_checkpoint, make_config, measure

ACTIVATIONS = ("quick_gelu", "gelu")
OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_CLIP_CONFIGS = {
    "clip": CLIPConfig,
    "clip_vision_model": CLIPVisionConfig,
    "metaclip_2": MetaClip2Config,
    "metaclip_2_vision_model": MetaClip2VisionConfig,
}
_OUR_TYPES = ("llamoe_vision", "llama4_vision_model", "llamoe", "llama4")
_WITHOUT_PREFIX = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")
# Classes whose checkpoints have no projection.
_BARE_ARCHITECTURES = ("CLIPVisionModel", "MetaClip2VisionModel")


def tower_kind(path: str | Path) -> str | None:
    """The kind of vision tower in a folder or weight file; None if there is none.

    It is "open_clip", "clip" (transformers' CLIP or MetaCLIP 2), or "hf" (ours or Llama 4's, alone or in a multimodal
    model).
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


def open_tower(
    path: str | Path | nn.Module,
    *,
    activation: str | None = None,
    tag: str | None = None,
    model: str | None = None,
    heads: int | None = None,
) -> Checkpoint:
    """Open a vision tower: open_clip's, transformers' CLIP or MetaCLIP 2, Llama 4's or ours.

    All sizes are read off the tensors and compared with the configuration.

    Args:
        path: an open_clip file (.safetensors, .pt, .bin) or folder, a folder of transformers, or a model of open_clip.
        activation, tag, model, heads: what an open_clip file does not state, as in `convert_vision`.

    Returns:
        the tower under the keys of `LlamoeVisionModel`. Its companions hold preprocessor_config.json where the source
        states how pictures are prepared, or is of open_clip, which has defaults for it.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor is missing, unknown or of another shape, or the
            tower has parts that ours cannot express.
        ValueError: activation, model or heads are unknown, or an argument contradicts the configuration.
        TypeError: a module that is not a model of open_clip.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation = {activation!r}: valid are {' and '.join(map(repr, ACTIVATIONS))}.")
    if heads is not None:
        count_of("heads", heads)
    if isinstance(path, nn.Module):
        return _open_open_clip(path, activation, tag, model, heads)
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder.")
    check_whole(path)
    refuse_adapter(path)
    looks = look_at_source(path)
    kind = tower_kind(path)
    if kind == "open_clip":
        return replace(_open_open_clip(path, activation, tag, model, heads), looks=looks)
    for name, value in {"tag": tag, "model": model}.items():
        if value is not None:
            raise ValueError(f"{name} = {value!r}: {path} is no open_clip checkpoint, and describes itself.")
    if kind is None:
        raise _explain_unknown(path)
    checkpoint = _open_clip(path) if kind == "clip" else _open_ours(path)
    config, where = checkpoint.config, f"config.json of {path}"
    agree("activation", {where: config.hidden_act, "the argument activation": activation})
    agree("number of heads", {where: config.num_attention_heads, "the argument heads": heads})
    return replace(checkpoint, looks=looks)


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
            f"{path}: is not a tower's folder: expected {expected}. A single file is named itself."
        )
    model_type = str(read_json(path / "config.json").get("model_type"))
    reason = " (SigLIP's towers have no class token and pool by attention)" if "siglip" in model_type else ""
    return CheckpointError(
        f"{path / 'config.json'}: model_type {model_type!r} is not a tower that can be converted{reason}; expected "
        f"{expected}."
    )


def _open_open_clip(
    path: Path | nn.Module,
    activation: str | None,
    tag: str | None,
    model: str | None,
    heads: int | None,
) -> Checkpoint:
    if isinstance(path, nn.Module):
        # A name for messages, which no file has.
        file = Path(f"<open_clip.{type(path).__name__}>")
        tensors = _view_tower(path, file)
    else:
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
    if "visual.proj" not in tensors:
        raise CheckpointError(f"{file}: visual.proj is missing, which every tower of open_clip has.")
    sizes, grid = measure(OPEN_CLIP, tensors, file)
    # The configuration belongs to the file only where both have the names that open_clip gives them.
    config_file = file.with_name(OPEN_CLIP_CONFIG)
    settings: dict[str, Any] | None = None
    described: dict[str, Any] = {}
    if isinstance(path, nn.Module):
        config_file = file
        settings = describe_tower(cast(nn.Module, path.visual), file)
    elif file.name in OPEN_CLIP_FILES and config_file.is_file():
        settings = read_json(config_file)
    if settings is not None:
        described[str(config_file)] = settings.get("model_cfg", settings)
    if model is not None:
        described[f"open_clip's {model}"] = architecture(model)
    image_size = grid * sizes["patch_size"]
    for where, content in described.items():
        check_stated(read_sizes(content, where), sizes, where, file)
        image_size_of(content["vision_cfg"].get("image_size"), grid, sizes["patch_size"], where)
    tagged, prepared = (None, {}) if tag is None else find_release(tag, sizes, image_size)
    act = {where: read_activation(content, where) for where, content in described.items()}
    act |= {"the argument activation": activation, f"the tag {tag!r}": tagged}
    found = [where for where, value in act.items() if value is not None]
    if not found:
        raise ValueError(
            f"{file}: nothing says whether these weights were trained with QuickGELU or GELU: there is no "
            f"{OPEN_CLIP_CONFIG} beside a file named {' or '.join(OPEN_CLIP_FILES)}, and the tensors do not show it. "
            "Give activation='quick_gelu' or 'gelu', or the release's tag, or open_clip's name of the model. "
            f"{describe_releases(sizes)}"
        )
    hidden_act = agree("activation", act)
    notes = [f"activation: {hidden_act}, by {' and '.join(found)}"]
    preprocess = (settings or {}).get("preprocess_cfg") or {}
    if not preprocess and tag is None:
        notes.append("pixels: open_clip's default preparation, as nothing states another")
    config = make_config(
        file,
        **sizes,
        image_size=image_size,
        hidden_act=hidden_act,
        num_attention_heads=_find_heads(described, sizes, heads, file),
        norm_eps=agree(
            "norm_eps", {where: read_norm_eps(content, where) for where, content in described.items()}
        )
        if described
        else 1e-5,
    )
    if not isinstance(preprocess, dict):
        raise CheckpointError(f"{config_file}: preprocess_cfg is {preprocess!r}, not an object.")
    origin = str(config_file if settings else file)
    processor = image_processors.from_open_clip({**prepared, **preprocess}, image_size, origin)
    place, sources = (file, []) if isinstance(path, nn.Module) else (path, [file])
    return make_checkpoint(place, "open_clip", OPEN_CLIP, config, tensors, processor, sources, notes)


def _view_tower(model: nn.Module, where: Path) -> dict[str, LazyTensor]:
    """View the tensors of the tower of a model of open_clip; those on an accelerator are copied."""
    visual = getattr(model, "visual", None)
    if not isinstance(visual, nn.Module):
        raise TypeError(
            f"{type(model).__name__}: is not a model of open_clip, which has its tower in `visual`; expected a path, "
            "or what open_clip.create_model returns."
        )
    state = {f"visual.{name}": tensor for name, tensor in visual.state_dict().items()}
    if any(tensor.is_meta for tensor in state.values()):
        raise CheckpointError(f"{where}: its tensors are on the meta device and hold no numbers.")
    return {name: from_tensor(tensor.cpu(), f"{where}: {name}") for name, tensor in state.items()}


def _find_heads(described: Mapping[str, Any], sizes: Mapping[str, Any], heads: int | None, file: Path) -> int:
    """The number of attention heads, which no tensor shows: described, given, or that of published towers.

    Raises:
        ValueError: no source states it, or two sources disagree.
    """
    width = sizes["hidden_size"]
    found = {where: read_heads(content, where, width) for where, content in described.items()}
    if not found and (published := published_heads(sizes)):
        found["the published towers of this size"] = published
    if heads is not None:
        found["the argument heads"] = heads
    if not found:
        raise ValueError(
            f"{file}: the tensors do not show the number of attention heads, and no published tower has width {width}, "
            f"{sizes['num_hidden_layers']} layers and inner width {sizes['intermediate_size']}. Give heads= (often "
            f"width / 64 = {width / 64:g}), or put {OPEN_CLIP_CONFIG} beside the file."
        )
    return agree("number of heads", found)


def _open_clip(path: Path) -> Checkpoint:
    config_file = path / "config.json"
    content = read_json(config_file)
    tensors, _, files = open_shards(path)
    renamed: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        # transformers leaves the prefix out in towers that are saved alone.
        key = f"vision_model.{name}" if name.startswith(_WITHOUT_PREFIX) else name
        if key in renamed:
            raise CheckpointError(
                f"{tensor.origin}: is the same tensor as {renamed[key].origin}. Remove one."
            )
        renamed[key] = tensor
    sizes, grid = measure(CLIP, renamed, path)
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
    if wants_projection and "visual_projection.weight" not in renamed:
        raise CheckpointError(
            f"{path}: visual_projection.weight is missing, which a {architectures[0]} (config.json) has."
        )
    patch = stock.patch_size[0] if isinstance(stock.patch_size, (list, tuple)) else stock.patch_size
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_channels")
    stated = {name: getattr(stock, name) for name in names} | {"patch_size": patch}
    check_stated(stated, sizes, config_file, path)
    notes = [f"activation: {stock.hidden_act}, by {config_file}"]
    config = make_config(
        config_file,
        **sizes,
        image_size=image_size_of(stock.image_size, grid, sizes["patch_size"], config_file),
        hidden_act=stock.hidden_act,
        num_attention_heads=stock.num_attention_heads,
        norm_eps=stock.layer_norm_eps,
    )
    return make_checkpoint(path, "clip", CLIP, config, renamed, _read_processor(path), files, notes)


def _open_ours(path: Path) -> Checkpoint:
    """Open a tower's folder, or the tower of a multimodal model."""
    whole = open_hf(path)
    companions = companions_of(path, _read_processor(path))
    if not isinstance(whole.config, LlamoeConfig):
        return replace(whole, companions=companions)
    tower = take_part(whole, "vision_config", "not part of the tower")
    tower.config.architectures = ["LlamoeVisionModel"]
    return replace(tower, companions=companions)


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


def _read_processor(folder: Path) -> dict[str, Any] | None:
    """Settings of a folder's image processor, from its own file or from the model's processor."""
    if (folder / PROCESSOR).is_file():
        return read_json(folder / PROCESSOR)
    whole = folder / "processor_config.json"
    part = read_json(whole).get("image_processor") if whole.is_file() else None
    return part if isinstance(part, dict) else None
