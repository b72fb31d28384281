"""Configurations of published models, as data.

Sources: the papers and `params.json` files of LLaMA (arXiv:2302.13971), Llama 2 (arXiv:2307.09288) and Llama
3 (arXiv:2407.21783); the published configurations of Llama 4 (pretrained releases; the instruction-tuned ones
differ in `max_position_embeddings`, 10485760 for Scout and 1048576 for Maverick); the published configurations and
`params.json` files of Mistral 7B (arXiv:2310.06825) and Mixtral (arXiv:2401.04088), base and instruction-tuned alike;
open_clip's configurations of the MetaCLIP towers.

MetaCLIP's releases differ in the activation function. The presets have QuickGELU, as the first release and MetaCLIP 2's
ViT-H at 224 pixels. The "altogether" ViT-H and the other towers of MetaCLIP 2 have GELU.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .base import READERS, LlamoeBaseConfig
from .checks import enumerate_words


def _dense(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, *, theta: float = 1e4, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llamoe_dense",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **more,
    }


def _scaled_rope(factor: float, high_freq_factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": 8192,
    }


def _llama_4(text: dict[str, Any]) -> dict[str, Any]:
    """Return a Llama 4 configuration; fields that it omits keep the classes' defaults, which are Scout's."""
    return {
        "model_type": "llamoe",
        "text_config": {
            "hidden_size": 5120,
            "max_position_embeddings": 262144,
            "bos_token_id": 200000,
            "eos_token_id": [200001, 200007, 200008],
            "pad_token_id": 200018,
            **text,
        },
        "vision_config": {
            "hidden_size": 1408,
            "image_size": 336,
            "vision_output_dim": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def _metaclip(patch: int, layers: int, width: int, heads: int, inner: int, joint: int) -> dict[str, Any]:
    return {
        "model_type": "llamoe_vision",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "image_size": 224,
        "patch_size": patch,
        "hidden_act": "quick_gelu",
        "norm_eps": 1e-5,
        "use_rope": False,
        "use_adapter": False,
        "projection_dim": joint,
        "vision_output_dim": width,
    }


_LLAMA_2 = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_LLAMA_3 = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "theta": 5e5,
}
_LLAMA_31 = _LLAMA_3 | {"max_position_embeddings": 131072, "rope_parameters": _scaled_rope(8.0, 4.0)}
_MISTRAL = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "theta": 1e6}
_MIXTRAL = _MISTRAL | {"model_type": "llamoe_mixtral"}
_SCOUT = {"rope_parameters": _scaled_rope(16.0, 1.0)}
_MAVERICK = {
    "num_local_experts": 128,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-7b": _dense(4096, 32, 32, 32, 11008, rms_norm_eps=1e-6),
        "llama-13b": _dense(5120, 40, 40, 40, 13824, rms_norm_eps=1e-6),
        "llama-33b": _dense(6656, 60, 52, 52, 17920, rms_norm_eps=1e-6),
        "llama-65b": _dense(8192, 80, 64, 64, 22016, rms_norm_eps=1e-5),
        "llama-2-7b": _dense(4096, 32, 32, 32, 11008, **_LLAMA_2),
        "llama-2-13b": _dense(5120, 40, 40, 40, 13824, **_LLAMA_2),
        "llama-2-70b": _dense(8192, 80, 64, 8, 28672, **_LLAMA_2),
        "llama-3-8b": _dense(4096, 32, 32, 8, 14336, **_LLAMA_3),
        "llama-3-70b": _dense(8192, 80, 64, 8, 28672, **_LLAMA_3),
        "llama-3.1-8b": _dense(4096, 32, 32, 8, 14336, **_LLAMA_31),
        "llama-3.1-70b": _dense(8192, 80, 64, 8, 28672, **_LLAMA_31),
        "mistral-7b-v0.1": _dense(
            4096, 32, 32, 8, 14336, **_MISTRAL | {"theta": 1e4, "sliding_window": 4096}
        ),
        "mistral-7b-v0.2": _dense(4096, 32, 32, 8, 14336, **_MISTRAL),
        "mistral-7b-v0.3": _dense(4096, 32, 32, 8, 14336, **_MISTRAL, vocab_size=32768),
        "mixtral-8x7b": _dense(4096, 32, 32, 8, 14336, **_MIXTRAL),
        "mixtral-8x22b": _dense(6144, 56, 48, 8, 16384, **_MIXTRAL | {"max_position_embeddings": 65536}),
        "llama-4-scout": _llama_4(_SCOUT),
        "llama-4-maverick": _llama_4(_MAVERICK),
        "metaclip-b32": _metaclip(32, 12, 768, 12, 3072, 512),
        "metaclip-b16": _metaclip(16, 12, 768, 12, 3072, 512),
        "metaclip-l14": _metaclip(14, 24, 1024, 16, 4096, 768),
        "metaclip-h14": _metaclip(14, 32, 1280, 16, 5120, 1024),
        "metaclip-g14": _metaclip(14, 48, 1664, 16, 8192, 1280),
    }
)
"""Name of each published model to its model type and fields. It cannot be changed; `preset` returns copies."""


def preset(name: str, **overrides: Any) -> LlamoeBaseConfig:
    """Return a new configuration of a published model.

    Args:
        name: Name of the model, a key of `PRESETS`.
        **overrides: Fields with other values; a dictionary for `text_config` or `vision_config` changes its fields.
    """
    if name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}; valid: {', '.join(PRESETS)}")
    config_class = READERS[PRESETS[name]["model_type"]]
    result: Any = config_class.from_dict(dict(PRESETS[name]), return_unused_kwargs=True, **overrides)
    config, unknown = result
    if unknown:
        raise ValueError(f"{config_class.__name__} has no field {enumerate_words(map(repr, unknown))}")
    return config
