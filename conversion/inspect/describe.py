"""What a model is in words: its sizes and dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ...configuration import LlamoeConfig, LlamoeMixtralConfig, LlamoeTextConfig, LlamoeVisionConfig
from ...configuration.base import LlamoeBaseConfig
from ..io import LazyTensor


def sizes_of(config: LlamoeBaseConfig) -> dict[str, Any]:
    """List the fields that determine the model's size, and which tokens a layer attends to."""
    if isinstance(config, LlamoeConfig):
        tower = {f"vision {name}": value for name, value in sizes_of(config.vision_config).items()}
        return {**sizes_of(config.text_config), **tower}
    if isinstance(config, LlamoeVisionConfig):
        names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size"]
        names += ["image_size", "patch_size", "tokens_per_tile", "hidden_act", "projection_dim"]
        names += ["projector_output_dim"] if config.use_adapter else []
        return {name: value for name in names if (value := getattr(config, name)) is not None}
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["intermediate_size"]
    sizes: dict[str, Any] = {}
    if isinstance(config, LlamoeMixtralConfig):
        names += ["num_local_experts", "num_experts_per_tok"]
    if isinstance(config, LlamoeTextConfig):
        names += ["intermediate_size_mlp"]
        if config.moe_layers:
            names += ["num_local_experts", "num_experts_per_tok"]
            sizes["layers with experts"] = len(config.moe_layers)
            sizes["interleave_moe_layer_step"] = config.interleave_moe_layer_step
        sizes["layers without rotation"] = config.no_rope_layers.count(0)
        sizes["no_rope_layer_interval"] = config.no_rope_layer_interval
        sizes["attention_chunk_size"] = config.attention_chunk_size
    elif config.layer_types or config.sliding_window:
        sizes["sliding_window"] = config.sliding_window
        sizes["layers with a window"] = config.attention_types().count("sliding_attention")
    names += ["vocab_size"]
    head = {name: getattr(config, name) for name in names}
    tail = {name: getattr(config, name) for name in ("max_position_embeddings", "tie_word_embeddings")}
    return {**head, **sizes, **tail, "rope": _rope(config.rope_parameters)}


def _rope(parameters: dict | None) -> str:
    parameters = {key: value for key, value in (parameters or {}).items() if value is not None}
    kind = parameters.pop("rope_type", "default")
    return ", ".join(
        [kind, *(f"{name} {value:g}" for name, value in parameters.items() if isinstance(value, float))]
    )


def dtypes_of(tensors: Iterable[LazyTensor]) -> dict[str, tuple[int, int]]:
    """Dtype to the number of its tensors and their bytes."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for tensor in tensors:
        count, size = found[tensor.dtype_name]
        found[tensor.dtype_name] = (count + 1, size + tensor.nbytes)
    return dict(found)
