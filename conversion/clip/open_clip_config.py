"""What open_clip states about a tower besides its tensors: open_clip_config.json, and its architectures.

Architectures are open_clip's own tables, which are read where a file does not describe itself: importing open_clip
takes as long as importing torch. Nothing is downloaded.
"""

from collections.abc import Mapping
from typing import Any, cast

from ...configuration.errors import CheckpointError

OPEN_CLIP_CONFIG = "open_clip_config.json"
_TANH = {"approximate": "tanh"}
# Fields of vision_cfg that must have their defaults: other values change the function and leave no other tensor.
_DEFAULTS = {"pool_type": "tok", "final_ln_after_pool": False, "pos_embed_type": "learnable"}


def side_of(value: Any, name: str, where: object) -> Any:
    """Return the side of a square, which may be given as a pair."""
    sides = list(value) if isinstance(value, (list, tuple)) else [value]
    if any(side != sides[0] for side in sides):
        raise CheckpointError(f"{where}: {name} is {value}; pictures and patches must be square.")
    return sides[0]


def read_model_cfg(model: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Convert a `model_cfg` of open_clip to fields of `LlamoeVisionConfig`; `where` names its file in errors.

    Raises:
        CheckpointError: it cannot be read, or describes a part that ours does not have.
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
            raise CheckpointError(f"{where}: act_kwargs is {act}, which is no activation here.")
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
        raise ValueError(f"model = {name!r}: no architecture of open_clip; see open_clip.list_models().")
    return cast(dict[str, Any], open_clip.get_model_config(name))
