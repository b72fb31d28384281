"""Read open_clip's descriptions of a tower: open_clip_config.json, or the table of its architectures.

The table is a part of open_clip, which is imported only for a file without open_clip_config.json, since that takes as
long as importing torch. Nothing is downloaded.
"""

from collections.abc import Mapping
from typing import Any, cast

from ...configuration.errors import CheckpointError

OPEN_CLIP_CONFIG = "open_clip_config.json"
_TANH = {"approximate": "tanh"}
# Fields of vision_cfg that must have these defaults. Other values change what the tower computes, and no tensor shows
# them.
_DEFAULTS = {"pool_type": "tok", "final_ln_after_pool": False, "pos_embed_type": "learnable"}


def side_of(value: Any, name: str, where: object) -> Any:
    """Return the side of a square, which may be written as a pair of equal sides."""
    sides = list(value) if isinstance(value, (list, tuple)) else [value]
    if any(side != sides[0] for side in sides):
        raise CheckpointError(f"{where}: {name} is {value}; pictures and patches must be square.")
    return sides[0]


def read_model_cfg(model: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Convert a `model_cfg` of open_clip to fields of `LlamoeVisionConfig`; `where` names its file in errors.

    Raises:
        CheckpointError: it cannot be read, or describes a part that `LlamoeVisionModel` does not have.
    """
    try:
        vision: dict[str, Any] = model["vision_cfg"]
        for name, default in _DEFAULTS.items():
            if (value := vision.get(name) or default) != default:
                raise CheckpointError(
                    f"{where}: {name} is {value!r}, where only {default!r} can be converted."
                )
        act = vision.get("act_kwargs") or {}
        if not model.get("quick_gelu") and act not in ({}, {"approximate": "none"}, _TANH):
            raise CheckpointError(
                f"{where}: act_kwargs is {act}; only GELU, exact or by tanh, can be converted."
            )
        width = vision.get("width", 768)
        return {
            "hidden_size": width,
            "num_hidden_layers": vision.get("layers", 12),
            "intermediate_size": int(width * vision.get("mlp_ratio", 4.0)),
            "num_attention_heads": width // vision.get("head_width", 64),
            "patch_size": side_of(vision.get("patch_size", 16), "patch_size", where),
            "image_size": side_of(vision.get("image_size", 224), "image_size", where),
            "projection_dim": model.get("embed_dim"),
            "norm_eps": (vision.get("norm_kwargs") or {}).get("eps", 1e-5),
            "hidden_act": "quick_gelu"
            if model.get("quick_gelu")
            else "gelu_pytorch_tanh"
            if act == _TANH
            else "gelu",
        }
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{where}: cannot be read as a model_cfg of open_clip ({error!r}).") from error


def architecture(name: str) -> dict[str, Any]:
    """Look up the `model_cfg` of an architecture of open_clip, such as "ViT-L-14-quickgelu"."""
    import open_clip

    if name not in open_clip.list_models():
        raise ValueError(
            f"model = {name!r}: open_clip has no such architecture; see open_clip.list_models()."
        )
    return cast(dict[str, Any], open_clip.get_model_config(name))
