"""Differences between two checkpoints as they are stored: elements of tensors, fields of configurations.

Configurations are compared by their effect. Some fields only change how a function is stored (experts, heads, the
pairing of rotated channels): with other weights it may be the same function. Other fields change the function of the
same weights, and a few random tokens may not show it: a chunk is full only after thousands of tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from ...configuration import (
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeMixtralConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
)
from ...configuration.base import LlamoeBaseConfig
from ...configuration.fields import fields_without_effect
from ...modeling.layers import RotaryEmbedding
from ..io import LazyTensor, blocks

# Elements that are compared at a time.
_PIECE = 1 << 24
# Fields that are compared with a model of another family, too, which may not have them. The rule of a router is
# compared only where both have one.
_SIZES = {
    "model_type",
    "tie_word_embeddings",
    *(
        name
        for config_class in (LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeTextConfig)
        for name, meaning in config_class.meanings.items()
        if meaning.effect == "structure" and meaning.part != "router"
    ),
}


def compare_tensors(a: LazyTensor, b: LazyTensor) -> tuple[float, bool]:
    """Compare two tensors of one shape, block by block.

    Returns:
        the largest absolute difference, nan where only one of two elements is nan; and whether both are equal once the
        wider one is rounded to the narrower's dtype.
    """
    largest, is_rounded = 0.0, True
    narrow = max(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    for start, stop in blocks(a):
        x, y = a.read(start, stop), b.read(start, stop)
        if x.dtype == y.dtype and torch.equal(x, y):
            continue
        pieces = zip(x.flatten().split(_PIECE), y.flatten().split(_PIECE), strict=True)
        for mine, its in ((mine.to(wide), its.to(wide)) for mine, its in pieces):
            difference = (mine - its).abs()
            # The same infinity in both, or nan in both.
            difference[(mine == its) | (mine.isnan() & its.isnan())] = 0
            found = difference.max().item() if len(difference) else 0.0
            # An infinity on one side is no rounding.
            is_rounded &= math.isfinite(found) and (
                found == 0 or torch.equal(mine.to(narrow), its.to(narrow))
            )
            largest = max(largest, found) if found == found and largest == largest else math.nan
    return largest, is_rounded


def compare_configs(
    a: LlamoeBaseConfig, b: LlamoeBaseConfig
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Fields of two configurations of one kind that differ and may change what the models compute.

    Lengths, scalings and layer lists are compared by their effect: a chunk that is never full, or a rotary scaling of
    one, is no difference.

    Returns:
        fields whose effect the outputs must show (sizes, experts, heads), and fields that change the function whatever
        the weights are; each field with both values.
    """
    structure, function = {}, {}
    first, second = _structure(a), _structure(b)
    for name, value in first.items():
        # The rule of a router, for one, is compared only where both families have one.
        if (name in second or name in _SIZES) and value != (other := second.get(name)):
            structure[name] = (value, other)
    mine, its = _function(a), _function(b)
    for name in [name for name in mine if name in its]:
        (shown, value), (other_shown, other) = mine[name], its[name]
        if value != other:
            function[name] = (shown, other_shown)
    return structure, function


def _of_parts(config: LlamoeConfig, facts_of: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    parts = {part: facts_of(getattr(config, part)) for part in config.sub_configs}
    return {f"{part}.{name}": value for part, facts in parts.items() for name, value in facts.items()}


def _structure(config: LlamoeBaseConfig) -> dict[str, Any]:
    """Every field that may change the function and is not compared by its effect."""
    if isinstance(config, LlamoeConfig):
        return _of_parts(config, _structure)
    unused = fields_without_effect(config)
    names = {name for name, meaning in config.meanings.items() if meaning.effect == "structure"}
    if not isinstance(config, LlamoeVisionConfig):
        names |= _SIZES
    unused -= {"tie_word_embeddings"}
    return {name: None if name in unused else getattr(config, name, None) for name in sorted(names)}


def _function(config: LlamoeBaseConfig) -> dict[str, tuple[Any, Any]]:
    """List each field that the function depends on, as it is shown and as it is compared."""
    if isinstance(config, LlamoeConfig):
        inner = _of_parts(config, _function)
        return {**inner, "image_token_index": (config.image_token_index, config.image_token_index)}
    if isinstance(config, LlamoeVisionConfig):
        return _function_of_tower(config)
    plans = [config.layer_plan(layer_idx) for layer_idx in range(config.num_hidden_layers)]
    longest = config.max_position_embeddings
    chunk = getattr(config, "attention_chunk_size", None) or longest
    window = getattr(config, "sliding_window", None) or longest
    floor = getattr(config, "floor_scale", longest + 1)
    tuning = (floor, config.attn_scale) if floor <= longest else None
    by_layer = {
        "layers that rotate": [plan.use_rope for plan in plans],
        "use_qk_norm": [plan.use_qk_norm for plan in plans],
        "attention_chunk_size": [
            chunk if plan.attention_type == "chunked_attention" and chunk < longest else None
            for plan in plans
        ],
        "sliding_window": [
            window if plan.attention_type == "sliding_attention" and window < longest else None
            for plan in plans
        ],
        "attn_temperature_tuning": [tuning if plan.use_temperature_tuning else None for plan in plans],
    }
    facts: dict[str, tuple[Any, Any]] = {
        name: (getattr(config, name),) * 2 for name in ("hidden_act", "rms_norm_eps")
    }
    for name, values in by_layer.items():
        facts[name] = (_by_layer(values), values)
    if any(by_layer["layers that rotate"]):
        facts["rope_parameters"] = (config.rope_parameters, _rotary(config))
    return facts


def _function_of_tower(config: LlamoeVisionConfig) -> dict[str, tuple[Any, Any]]:
    of_function = {name for name, meaning in config.meanings.items() if meaning.effect == "function"}
    names = of_function - {"vision_feature_layer", "rope_parameters"} - fields_without_effect(config)
    facts = {name: (getattr(config, name),) * 2 for name in sorted(names)}
    depth = range(config.num_hidden_layers + 1)[config.vision_feature_layer]
    facts["vision_feature_layer"] = (config.vision_feature_layer, config.num_hidden_layers - depth)
    if config.use_rope:
        theta = (config.rope_parameters or {}).get("rope_theta")
        facts["rope_theta"] = (theta, theta)
    return facts


def _rotary(config: LlamoeBaseConfig) -> tuple:
    """Return the rotation as numbers, so that two spellings of the same rotation are equal."""
    with torch.device("cpu"):
        rotary = RotaryEmbedding(config)
    by_length = None
    # These depend on the length of the pass.
    if rotary.rope_type in ("dynamic", "longrope"):
        by_length = (sorted(config.rope_parameters.items(), key=str), config.max_position_embeddings)
    return rotary.inv_freq.tolist(), rotary.attention_scaling, by_length


def _by_layer(values: list[Any]) -> Any:
    """Return the values of all layers, or one value if all are equal."""
    return values[0] if all(value == values[0] for value in values) else values
