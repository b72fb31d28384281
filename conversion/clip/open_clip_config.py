"""What open_clip states about a tower besides its tensors: open_clip_config.json and its list of releases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...configuration.errors import CheckpointError
from ...configuration.vision import LlamoeVisionConfig
from .name_tables import HEADS, OPEN_CLIP_DEFAULTS, RELEASES, TOWERS, Release, describe_releases

OPEN_CLIP_CONFIG = "open_clip_config.json"
_TANH = {"approximate": "tanh"}


def read_sizes(model: Any, where: Path) -> dict[str, Any]:
    """Fields of `LlamoeVisionConfig` in the `model_cfg` of open_clip_config.json; or open_clip's defaults.

    Raises:
        CheckpointError: it cannot be read, or describes a part that ours does not have.
    """
    vision = model.get("vision_cfg") if isinstance(model, dict) else None
    if not isinstance(vision, dict):
        raise CheckpointError(f"{where}: has no vision_cfg, where open_clip describes the tower.")
    for name, (default, meaning) in OPEN_CLIP_DEFAULTS.items():
        if (vision.get(name) or default) != default:
            raise CheckpointError(
                f"{where}: {name} is {vision[name]!r}: {meaning} has no place in this tower, nor in MetaCLIP's."
            )
    try:
        width = int(vision.get("width", 768))
        patch = vision.get("patch_size", 16)
        if isinstance(patch, (list, tuple)):
            if len(set(patch)) != 1:
                raise CheckpointError(f"{where}: patch_size is {patch}; patches must be square.")
            patch = patch[0]
        if isinstance(vision.get("layers"), list):
            raise CheckpointError(
                f"{where}: layers is {vision['layers']}, a ResNet tower, which cannot be converted."
            )
        return {
            "hidden_size": width,
            "num_hidden_layers": int(vision.get("layers", 12)),
            "intermediate_size": int(width * float(vision.get("mlp_ratio", 4.0))),
            "patch_size": int(patch),
            "projection_dim": model.get("embed_dim"),
        }
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: vision_cfg cannot be read ({error}).") from error


def read_norm_eps(model: Mapping[str, Any], where: Path) -> float:
    """The epsilon that the norms add to the variance; torch's default if none is given."""
    arguments = model["vision_cfg"].get("norm_kwargs") or {}
    eps = arguments.get("eps", 1e-5) if isinstance(arguments, dict) else None
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise CheckpointError(f"{where}: norm_kwargs is {arguments!r}, where eps was expected.")
    return float(eps)


def read_activation(model: Mapping[str, Any], where: Path) -> str:
    """The activation, by transformers' name; open_clip's default is GELU."""
    quick = model.get("quick_gelu", False)
    if not isinstance(quick, bool):
        raise CheckpointError(f"{where}: quick_gelu is {quick!r}; true or false was expected.")
    arguments = model["vision_cfg"].get("act_kwargs") or {}
    if not quick and arguments not in ({}, {"approximate": "none"}, _TANH):
        raise CheckpointError(f"{where}: act_kwargs is {arguments}, which GELU does not take.")
    return "quick_gelu" if quick else "gelu_pytorch_tanh" if arguments == _TANH else "gelu"


def write_model_cfg(config: LlamoeVisionConfig) -> dict[str, Any]:
    """The open_clip description of a tower, without a text tower; `ValueError` for an activation it does not have."""
    if config.hidden_act not in ("quick_gelu", "gelu", "gelu_pytorch_tanh"):
        raise ValueError(
            f"hidden_act = {config.hidden_act!r}: open_clip has QuickGELU and GELU only, and cannot compute this tower."
        )
    width, inner = config.hidden_size, config.intermediate_size
    ratios = (round(inner / width, 4), inner / width, (inner + 0.5) / width)
    vision: dict[str, Any] = {
        "image_size": config.image_size,
        "layers": config.num_hidden_layers,
        "width": width,
        "head_width": config.head_dim,
        # open_clip rounds width * ratio down; a rounded ratio may give the integer below.
        "mlp_ratio": next(ratio for ratio in ratios if int(width * ratio) == inner),
        "patch_size": config.patch_size,
    }
    if config.norm_eps != 1e-5:
        vision["norm_kwargs"] = {"eps": config.norm_eps}
    if config.hidden_act == "gelu_pytorch_tanh":
        vision["act_kwargs"] = dict(_TANH)
    return {
        "embed_dim": width if config.projection_dim is None else config.projection_dim,
        "quick_gelu": config.hidden_act == "quick_gelu",
        "vision_cfg": vision,
    }


def find_heads(
    model: Mapping[str, Any], config_file: Path, sizes: Mapping[str, Any], heads: int | None, file: Path
) -> int:
    """The number of attention heads, which no tensor shows.

    It is stated by the configuration (`model`, empty if there is none), by the caller (`heads`), or known of the
    published towers of these sizes.

    Raises:
        ValueError: no source states it, or two sources disagree.
    """
    width = sizes["hidden_size"]
    shape = (width, sizes["num_hidden_layers"], sizes["intermediate_size"])
    found: dict[str, Any] = {}
    if model:
        head_width = model["vision_cfg"].get("head_width", 64)
        is_count = (
            isinstance(head_width, int) and not isinstance(head_width, bool) and 1 <= head_width <= width
        )
        if not is_count or width % (width // head_width):
            raise CheckpointError(
                f"{config_file}: head_width is {head_width!r}, which does not divide width {width}."
            )
        found[str(config_file)] = width // head_width
    elif shape in HEADS:
        found["the published towers of this size"] = HEADS[shape]
    if heads is not None:
        found["the argument heads"] = heads
    if not found:
        raise ValueError(
            f"{file}: the tensors do not show the number of attention heads, and no published tower has width {width}, "
            f"{shape[1]} layers and inner width {shape[2]}. Give heads= (often width / 64 = {width / 64:g}), or put "
            f"{OPEN_CLIP_CONFIG} beside the file."
        )
    return agree("number of heads", found)


def agree(what: str, stated: Mapping[str, Any]) -> Any:
    """The one value that the sources state; `stated` maps source to value, None for a source that is silent.

    Raises:
        ValueError: the values differ.
    """
    stated = {where: value for where, value in stated.items() if value is not None}
    if len(set(stated.values())) > 1:
        said = ", ".join(f"{value!r} by {where}" for where, value in stated.items())
        raise ValueError(
            f"the {what} is said to be {said}. Only one can belong to these weights: correct the file, or leave out "
            "the argument."
        )
    return next(iter(stated.values()))


def find_release(tag: str, sizes: Mapping[str, Any], image_size: int) -> Release:
    """The release that a tag and a tower's sizes belong to.

    The picture size decides where a release has the same tower with both activations.

    Raises:
        ValueError: an unknown tag, no tower of these sizes in the release, or an undecided activation.
    """
    named = [release for release in RELEASES if release.tag == str(tag).lower().replace("-", "_")]
    if not named:
        raise ValueError(
            f"tag = {tag!r}: no release of MetaCLIP in open_clip. Known releases: {describe_releases()}."
        )
    shape = (sizes["hidden_size"], sizes["num_hidden_layers"], sizes["patch_size"])
    fitting = [release for release in named if any(TOWERS[name] == shape for name in release.sizes)]
    same_size = [release for release in fitting if release.image_size == image_size]
    chosen = same_size or fitting
    if len({release.activation for release in chosen}) != 1:
        problem = (
            "has no tower" if not fitting else "has towers of either activation, but none for these pictures,"
        )
        raise ValueError(
            f"tag = {tag!r}: the release {problem} of width {shape[0]}, {shape[1]} layers, patches of {shape[2]} and "
            f"{image_size} pixels. Give activation= instead. Known releases: {describe_releases()}."
        )
    return chosen[0]
