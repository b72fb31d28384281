"""The parts that two checkpoints have in common."""

import copy
from dataclasses import replace
from typing import Any

from ...configuration import LlamoeConfig, LlamoeVisionConfig
from ..checkpoint import Checkpoint, take_part

_ADAPTER = ("pixel_shuffle_ratio", "projector_input_dim", "projector_output_dim", "projector_final_act")


def shared_parts(first: Checkpoint, second: Checkpoint) -> tuple[list[Checkpoint], list[str]]:
    """The parts that can be compared with one another, and notes on what was left out.

    For a multimodal model and a decoder that is the decoder. For a multimodal model and a tower it is the tower,
    without an adapter or projection that the other lacks or has in another size.

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
    """Leave out what only one of two towers has after the encoder."""
    configs: list[Any] = [copy.deepcopy(part.config) for part in parts]
    notes, dropped = [], []
    adapters = [config.use_adapter and [getattr(config, name) for name in _ADAPTER] for config in configs]
    if adapters[0] != adapters[1]:
        notes.append(_left_out("adapter", *map(bool, adapters)))
        dropped.append("vision_adapter.")
        for config in configs:
            config.use_adapter = False
            # Keeps the class token, too.
            config.vision_feature_select_strategy = "full"
            config.vision_output_dim = config.hidden_size
            config.projector_input_dim = config.projector_output_dim = config.hidden_size
    if configs[0].projection_dim != configs[1].projection_dim:
        notes.append(_left_out("projection", *(config.projection_dim is not None for config in configs)))
        dropped.append("visual_projection.")
        for config in configs:
            config.projection_dim = None
    encoders = []
    for part, config in zip(parts, configs, strict=True):
        kept = {key: tensor for key, tensor in part.tensors.items() if not key.startswith(tuple(dropped))}
        encoders.append(replace(part, config=config, tensors=kept))
    return encoders, notes


def _left_out(what: str, in_a: bool, in_b: bool) -> str:
    if in_a and in_b:
        return f"a and b have {what}s of other sizes: the towers are compared without"
    article = "an" if what[0] in "aeiou" else "a"
    return f"only {'a' if in_a else 'b'} has {article} {what}: the towers are compared without"
