"""A `LoraConfig` for parts of a model."""

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
    """Return a plain `peft.LoraConfig` that adapts all linear layers of the text model, and more.

    An adapter of every expert has `num_experts` times the weights of one: with r = 16 it is 428 million for Scout.
    Ranks of 4 to 8 are enough for most.

    Args:
        model: the model that it is for; its modules are read, not changed.
        experts: adapt the routed experts' stacks, where the model has any.
        vision: adapt the vision tower's linear layers.
        r: rank.
        dropout: of what the adapters see. peft refuses it for stacks of experts; over llamoe it works.
        options: further fields of `LoraConfig`, `lora_alpha` (twice the rank by default) among them. Those that choose
            layers or modules (`layers_to_transform`, `exclude_modules`, `rank_pattern`, ...) mean experts, too.

    Raises:
        ValueError: a vision tower that the model lacks, or experts of a class that is not llamoe's, which would stay
            as they are.
    """
    from peft import LoraConfig

    if experts and type(model).__module__.startswith("transformers.models.") and _has_stacks(model):
        raise ValueError(
            f"lora_config: {type(model).__name__} is transformers' own class, whose experts this config would leave as "
            "they are. Call llamoe.adopt() before from_pretrained, or give experts=False."
        )
    has_tower = getattr(model.config, "vision_config", None) is not None
    if vision and not has_tower:
        raise ValueError(f"lora_config: this {type(model).__name__} has no vision tower to adapt.")
    stacks, linear = set(), set()
    for name, module in model.named_modules():
        # Another adapter may be there already.
        if ".lora_" in name:
            continue
        name = name.replace(".base_layer", "")
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            linear.add(name.rpartition(".")[2])
        # The same in every layer.
        name = ".".join(name.split(".")[-2:])
        if experts and isinstance(module, Experts):
            stacks |= {f"{name}.{stack}" for stack in STACKS}
    chosen: dict[str, Any] = {"target_modules": "all-linear", "lora_alpha": 2 * r}
    excluded = options.get("exclude_modules")
    by_layer = options.get("layers_to_transform") is not None
    # Of Mixtral peft takes "all-linear" for experts and routers, too, as they were in transformers 4. With layers it
    # refuses it, and beside exclusions it leaves out the tower.
    if by_layer or model.config.model_type == LlamoeMixtralConfig.model_type or (vision and excluded):
        chosen["target_modules"] = sorted(linear)
    if stacks:
        chosen["target_parameters"] = sorted(stacks)
    if by_layer:
        # Without it peft finds no numbers in the names of a model without a head.
        chosen["layers_pattern"] = "layers"
    if vision:
        chosen["exclude_modules"] = []
    elif by_layer and has_tower and "target_modules" not in options:
        # The tower's layers have the same numbers, and names in part.
        options["exclude_modules"] = _with_tower(excluded)
    return LoraConfig(r=r, lora_dropout=dropout, **(chosen | options))


def _has_stacks(model: nn.Module) -> bool:
    return any(
        name.endswith(tuple(f"experts.{stack}" for stack in STACKS)) for name, _ in model.named_parameters()
    )


def _with_tower(excluded: str | list[str] | None) -> str:
    """Peft's `exclude_modules`, and the vision tower."""
    tower = r"(.*\.)?vision_model\..*"
    if excluded and not isinstance(excluded, str):
        excluded = rf"(.*\.)?({'|'.join(map(re.escape, excluded))})"
    return f"{excluded}|{tower}" if excluded else tower
