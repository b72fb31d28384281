"""`lora_config`: a `LoraConfig` for the text model, its experts and the vision tower."""

import re
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from ...configuration import LlamoeMixtralConfig
from ..moe import STACKS, Experts

if TYPE_CHECKING:
    from peft import LoraConfig


def lora_config(
    model: PreTrainedModel,
    *,
    experts: bool = True,
    vision: bool = False,
    r: int = 8,
    dropout: float = 0.0,
    **options: Any,
) -> "LoraConfig":
    """Return a `peft.LoraConfig` for all linear layers of the text model, its experts, and optionally the vision tower.

    An adapter of all experts is large: 428 million weights for Scout with r = 16. Ranks of 4 to 8 usually suffice.

    Args:
        model: the model to adapt; it is not changed.
        experts: adapt the routed experts' stacks, if the model has any.
        vision: adapt the vision tower's linear layers, too.
        r: rank.
        dropout: dropout rate of the adapter's inputs, also for stacks of experts, for which peft alone refuses it.
        options: further fields of `LoraConfig`, such as `lora_alpha` (default: 2 r). Fields that choose layers or
            modules (`layers_to_transform`, `exclude_modules`, `rank_pattern`, ...) also apply to experts.

    Raises:
        ValueError: `vision` for a model without a vision tower, or `experts` for a model of transformers' own class.
    """
    from peft import LoraConfig

    if experts and type(model).__module__.startswith("transformers.models.") and _has_stacks(model):
        raise ValueError(
            f"lora_config: {type(model).__name__} is transformers' own class, whose experts this config would not "
            "adapt. Call llamoe.adopt() before from_pretrained, or give experts=False."
        )
    has_tower = getattr(model.config, "vision_config", None) is not None
    if vision and not has_tower:
        raise ValueError(f"lora_config: this {type(model).__name__} has no vision tower to adapt.")
    stacks, linear = set(), set()
    for name, module in model.named_modules():
        # Skip layers of an adapter that the model already has.
        if ".lora_" in name:
            continue
        name = name.replace(".base_layer", "")
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            linear.add(name.rpartition(".")[2])
        # Drop the layer's number: peft then matches every layer.
        name = ".".join(name.split(".")[-2:])
        if experts and isinstance(module, Experts):
            stacks |= {f"{name}.{stack}" for stack in STACKS}
    chosen: dict[str, Any] = {"target_modules": "all-linear", "lora_alpha": 2 * r}
    excluded = options.get("exclude_modules")
    by_layer = options.get("layers_to_transform") is not None
    # Name the layers where "all-linear" would be wrong: peft refuses it beside `layers_to_transform`, and would add
    # Mixtral's experts and routers; beside `exclude_modules` llamoe leaves the vision tower out.
    if by_layer or model.config.model_type == LlamoeMixtralConfig.model_type or (vision and excluded):
        chosen["target_modules"] = sorted(linear)
    if stacks:
        chosen["target_parameters"] = sorted(stacks)
    if by_layer:
        # Without a pattern peft finds no layer numbers in names that begin with "layers", as in a model without a head.
        chosen["layers_pattern"] = "layers"
    if vision:
        chosen["exclude_modules"] = []
    elif by_layer and has_tower and "target_modules" not in options:
        # Leave out the vision tower, whose layers have the same numbers and partly the same names.
        options["exclude_modules"] = _with_tower(excluded)
    return LoraConfig(r=r, lora_dropout=dropout, **(chosen | options))


def _has_stacks(model: nn.Module) -> bool:
    """Return True if a model of any class has stacks of experts, by the names of its parameters."""
    return any(
        name.endswith(tuple(f"experts.{stack}" for stack in STACKS)) for name, _ in model.named_parameters()
    )


def _with_tower(excluded: str | list[str] | None) -> str:
    """Return a regex for `exclude_modules` that matches the excluded modules and those of the vision tower."""
    tower = r"(.*\.)?vision_model\..*"
    if excluded and not isinstance(excluded, str):
        excluded = rf"(.*\.)?({'|'.join(map(re.escape, excluded))})"
    return f"{excluded}|{tower}" if excluded else tower
