"""Compare the tensors and configuration fields of two checkpoints.

Fields that differ are of two kinds. If fields of the structure (experts, heads, the pairing of rotated channels)
differ, models with different weights may compute the same, so outputs have to be compared. Fields of the function
change what the same weights compute, although a few random tokens may not show it: a chunk of attention is full only
after thousands of tokens.
"""

import copy
import math
from dataclasses import replace
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
from ..checkpoint import Checkpoint, take_part
from ..io import LazyTensor, blocks

# Elements per block of a comparison.
_PIECE = 1 << 24
# Fields that count as different also if one of two models lacks them, as another family may. A router's fields are not
# among them: they are compared only if both models have them.
_SIZES = {
    "model_type",
    *(
        name
        for config_class in (LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeTextConfig)
        for name, meaning in config_class.meanings.items()
        if meaning.effect == "structure" and meaning.part != "router"
    ),
}


# Fields of the adapter and projection behind a tower's encoder.
_BEHIND = (
    "use_adapter", "pixel_shuffle_ratio", "projector_input_dim", "projector_output_dim", "projector_final_act",
    "projection_dim",
)  # fmt: skip


def shared_parts(first: Checkpoint, second: Checkpoint) -> tuple[list[Checkpoint], list[str]]:
    """Return the parts of both models that can be compared, and notes on what was left out.

    From a multimodal model, the decoder is compared with a decoder, and the tower with a tower. Then both towers are
    taken without adapter and projection unless these are equal.

    Raises:
        ValueError: one checkpoint is a decoder and the other a tower.
    """
    parts, notes = [first, second], []
    for index, (mine, other) in enumerate(((first, second), (second, first))):
        if isinstance(mine.config, LlamoeConfig) and not isinstance(other.config, LlamoeConfig):
            name = "vision_config" if isinstance(other.config, LlamoeVisionConfig) else "text_config"
            parts[index] = take_part(mine, name, "not compared")
            notes.append(f"{mine.path} is multimodal and {other.path} is not: its {name} is compared")
    are_towers = [isinstance(part.config, LlamoeVisionConfig) for part in parts]
    if are_towers[0] != are_towers[1]:
        raise ValueError(f"{first.path} and {second.path}: a vision tower cannot be compared with a decoder.")
    configs: list[Any] = [part.config for part in parts]
    if notes and are_towers[0] and any(len({getattr(c, name) for c in configs}) > 1 for name in _BEHIND):
        parts = list(map(_encoder, parts))
        notes.append("the towers differ in adapter or projection, and are compared without these")
    return parts, notes


def _encoder(tower: Checkpoint) -> Checkpoint:
    """Return a tower without adapter and projection, which puts out the encoder's states, with the class token."""
    config: Any = copy.deepcopy(tower.config)
    config.use_adapter, config.projection_dim = False, None
    config.vision_feature_select_strategy = "full"
    config.vision_output_dim = config.projector_input_dim = config.projector_output_dim = config.hidden_size
    behind = ("vision_adapter.", "visual_projection.")
    tensors = {key: tensor for key, tensor in tower.tensors.items() if not key.startswith(behind)}
    return replace(tower, config=config, tensors=tensors)


def compare_tensors(a: LazyTensor, b: LazyTensor) -> tuple[float, bool]:
    """Compare two tensors of one shape, block by block.

    Returns:
        the largest absolute difference, or nan if only one of two elements is nan; and whether the tensors are equal
        after rounding the wider one to the narrower dtype.
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
            # Also no difference: the same infinity in both, or nan in both.
            difference[(mine == its) | (mine.isnan() & its.isnan())] = 0
            worst = difference.max().item() if len(difference) else 0.0
            # Rounding does not explain an infinity on one side.
            is_rounded &= math.isfinite(worst) and (
                worst == 0 or torch.equal(mine.to(narrow), its.to(narrow))
            )
            largest = math.nan if math.isnan(worst + largest) else max(largest, worst)
    return largest, is_rounded


def compare_configs(
    a: LlamoeBaseConfig, b: LlamoeBaseConfig
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """List the fields of two configurations that differ and may change the models' outputs.

    Lengths, scalings and lists of layers are compared by their effect: a chunk that is never full, or a rotary scaling
    by 1, is no difference.

    Returns:
        fields of the structure, and fields of the function (see the module's docstring), each with both values.
    """
    structure, function = {}, {}
    if isinstance(a, LlamoeConfig) and isinstance(b, LlamoeConfig):
        for part in a.sub_configs:
            inner = compare_configs(getattr(a, part), getattr(b, part))
            for fields, differing in zip((structure, function), inner, strict=True):
                fields.update({f"{part}.{name}": both for name, both in differing.items()})
        if a.image_token_index != b.image_token_index:
            function["image_token_index"] = (a.image_token_index, b.image_token_index)
        return structure, function
    first, second = _structure(a), _structure(b)
    for name, value in first.items():
        if (name in second or name in _SIZES) and value != (other := second.get(name)):
            structure[name] = (value, other)
    mine, its = _function(a), _function(b)
    for name in [name for name in mine if name in its]:
        (shown, value), (other_shown, other) = mine[name], its[name]
        if value != other:
            function[name] = (shown, other_shown)
    return structure, function


def _structure(config: LlamoeBaseConfig) -> dict[str, Any]:
    """Return the fields of the structure with their values; None for a field without effect in this model."""
    unused = fields_without_effect(config)
    names = {name for name, meaning in config.meanings.items() if meaning.effect == "structure"}
    if not isinstance(config, LlamoeVisionConfig):
        names |= _SIZES
    # A tied head is compared as a copy of the embedding.
    names -= {"tie_word_embeddings"}
    return {name: None if name in unused else getattr(config, name, None) for name in sorted(names)}


def _function(config: LlamoeBaseConfig) -> dict[str, tuple[Any, Any]]:
    """Return each field of the function with a value to print, and a value to compare, which describes the effect."""
    if isinstance(config, LlamoeVisionConfig):
        return _function_of_tower(config)
    plans = [config.layer_plan(layer_idx) for layer_idx in range(config.num_hidden_layers)]
    longest = config.max_position_embeddings

    def limits(kind: str, name: str) -> list[int | None]:
        limit = getattr(config, name, None) or longest
        return [limit if plan.attention_type == kind and limit < longest else None for plan in plans]

    floor = getattr(config, "floor_scale", longest + 1)
    tuning = (floor, config.attn_scale) if floor <= longest else None
    by_layer = {
        "layers that rotate": [plan.use_rope for plan in plans],
        "use_qk_norm": [plan.use_qk_norm for plan in plans],
        "attention_chunk_size": limits("chunked_attention", "attention_chunk_size"),
        "sliding_window": limits("sliding_attention", "sliding_window"),
        "attn_temperature_tuning": [tuning if plan.use_temperature_tuning else None for plan in plans],
    }
    facts: dict[str, tuple[Any, Any]] = {
        name: (getattr(config, name),) * 2 for name in ("hidden_act", "rms_norm_eps")
    }
    for name, values in by_layer.items():
        # If all layers have the same value, print it once.
        facts[name] = (values[0] if all(value == values[0] for value in values) else values, values)
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
    """Return rotary frequencies and scaling, which are equal if two configurations describe the same rotation."""
    with torch.device("cpu"):
        rotary = RotaryEmbedding(config)
    by_length = None
    # Frequencies of these types also depend on the sequence's length.
    if rotary.rope_type in ("dynamic", "longrope"):
        by_length = (sorted(config.rope_parameters.items(), key=str), config.max_position_embeddings)
    return rotary.inv_freq.tolist(), rotary.attention_scaling, by_length
