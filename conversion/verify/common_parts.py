"""The parts that two checkpoints have in common."""

import copy
from dataclasses import replace
from typing import Any

from ...configuration import LlamoeConfig, LlamoeVisionConfig
from ..checkpoint import Checkpoint, take_part

# Fields of what follows a tower's encoder.
_BEHIND = (
    "use_adapter", "pixel_shuffle_ratio", "projector_input_dim", "projector_output_dim", "projector_final_act",
    "projection_dim",
)  # fmt: skip


def shared_parts(first: Checkpoint, second: Checkpoint) -> tuple[list[Checkpoint], list[str]]:
    """List the parts that can be compared with one another, and notes on what was left out.

    For a multimodal model and a decoder that is the decoder. For a multimodal model and a tower it is the tower,
    without adapter and projection unless both have the same.

    Raises:
        ValueError: one reads texts only and the other pictures only.
    """
    parts, notes, is_part = [first, second], [], False
    for index, (mine, other) in enumerate(((first, second), (second, first))):
        if not isinstance(mine.config, LlamoeConfig) or isinstance(other.config, LlamoeConfig):
            continue
        is_tower = isinstance(other.config, LlamoeVisionConfig)
        is_part = is_tower
        parts[index] = take_part(mine, "vision_config" if is_tower else "text_config", "not compared")
        notes.append(
            f"{mine.path} is multimodal and {other.path} is not: its {'tower' if is_tower else 'decoder'} is compared"
        )
    if isinstance(parts[0].config, LlamoeVisionConfig) != isinstance(parts[1].config, LlamoeVisionConfig):
        raise ValueError(
            f"{first.path} holds a {type(first.config).__name__[6:-6].lower()} model and {second.path} a "
            f"{type(second.config).__name__[6:-6].lower()} one: a vision tower and a decoder have nothing to compare"
        )
    if is_part:
        parts, more = _encoders(parts)
        notes += more
    return parts, notes


def _encoders(parts: list[Checkpoint]) -> tuple[list[Checkpoint], list[str]]:
    """Leave out adapter and projection unless both towers have the same."""
    configs: list[Any] = [copy.deepcopy(part.config) for part in parts]
    if all(getattr(configs[0], name) == getattr(configs[1], name) for name in _BEHIND):
        return parts, []
    encoders = []
    for part, config in zip(parts, configs, strict=True):
        config.use_adapter, config.projection_dim = False, None
        # Keeps the class token, too.
        config.vision_feature_select_strategy = "full"
        config.vision_output_dim = config.hidden_size
        config.projector_input_dim = config.projector_output_dim = config.hidden_size
        tensors = {
            key: tensor
            for key, tensor in part.tensors.items()
            if not key.startswith(("vision_adapter.", "visual_projection."))
        }
        encoders.append(replace(part, config=config, tensors=tensors))
    return encoders, ["the towers differ in adapter or projection, and are compared without"]
