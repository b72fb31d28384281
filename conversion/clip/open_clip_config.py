"""What open_clip states about a tower besides its tensors: open_clip_config.json, and its architectures.

Architectures are open_clip's own tables, which are read where a file does not describe itself: importing open_clip
takes as long as importing torch. Nothing is downloaded.
"""

from difflib import get_close_matches
from typing import Any, cast

from ...configuration.errors import CheckpointError
from .name_tables import OPEN_CLIP_DEFAULTS

OPEN_CLIP_CONFIG = "open_clip_config.json"
_TANH = {"approximate": "tanh"}


def side_of(value: Any, name: str, where: object) -> Any:
    """One side of a square, which may be given as a pair."""
    sides = list(value) if isinstance(value, (list, tuple)) else [value]
    if not sides or any(side != sides[0] for side in sides):
        raise CheckpointError(f"{where}: {name} is {value}; pictures and patches must be square.")
    return sides[0]


def read_model_cfg(model: Any, where: object) -> dict[str, Any]:
    """Fields of `LlamoeVisionConfig` in the `model_cfg` of open_clip_config.json; or open_clip's defaults.

    Raises:
        CheckpointError: it cannot be read, or describes a part that ours does not have.
    """
    vision = model.get("vision_cfg") if isinstance(model, dict) else None
    if not isinstance(vision, dict):
        raise CheckpointError(f"{where}: has no vision_cfg, where open_clip describes the tower.")
    for name, default in OPEN_CLIP_DEFAULTS.items():
        if (value := vision.get(name) or default) != default:
            raise CheckpointError(
                f"{where}: {name} is {value!r}, and only {default!r} has a place in this tower."
            )
    patch, image = (side_of(vision.get(name, 16), name, where) for name in ("patch_size", "image_size"))
    quick, act = model.get("quick_gelu", False), vision.get("act_kwargs") or {}
    if not isinstance(quick, bool) or (not quick and act not in ({}, {"approximate": "none"}, _TANH)):
        raise CheckpointError(
            f"{where}: quick_gelu is {quick!r} and act_kwargs {act}, which is no activation here."
        )
    try:
        width, layers = int(vision.get("width", 768)), int(vision.get("layers", 12))
        inner = int(width * float(vision.get("mlp_ratio", 4.0)))
        heads = width // int(vision.get("head_width", 64))
        eps = float((vision.get("norm_kwargs") or {}).get("eps", 1e-5))
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError) as error:
        raise CheckpointError(f"{where}: vision_cfg cannot be read ({error}).") from error
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": image,
        "projection_dim": model.get("embed_dim"),
        "norm_eps": eps,
        "hidden_act": "quick_gelu" if quick else "gelu_pytorch_tanh" if act == _TANH else "gelu",
    }


def architecture(name: str) -> dict[str, Any]:
    """The `model_cfg` of one of open_clip's architectures, such as "ViT-L-14-quickgelu"; no name on a hub is one."""
    import open_clip

    known = open_clip.list_models()
    if name not in known:
        near = ", ".join(get_close_matches(str(name), known, n=4)) or "see open_clip.list_models()"
        raise ValueError(f"model = {name!r}: no architecture of open_clip. Near to it: {near}.")
    return cast(dict[str, Any], open_clip.get_model_config(name))
