"""Which parts of a model LoRA adapts: a `LoraConfig` by parts, and a word about experts that stay as they are."""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...configuration import LlamoeMixtralConfig
from ..checkpoints import in_units
from ..moe import STACKS, Experts

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.get_logger("llamoe")


def lora_config(
    model: PreTrainedModel,
    *,
    experts: bool = True,
    vision: bool = False,
    r: int = 8,
    dropout: float = 0.0,
    **options: Any,
) -> "LoraConfig":
    """A plain `peft.LoraConfig` that adapts all linear layers of the text model, and more.

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
        ValueError: a rank below 1, a dropout outside of 0 to 1, a vision tower that the model lacks, or experts of a
            class that is not llamoe's, which would stay as they are.
    """
    from peft import LoraConfig

    if isinstance(r, bool) or not isinstance(r, int) or r < 1:
        raise ValueError(f"lora_config: r is a rank of at least 1, not {r!r}.")
    if not 0 <= dropout < 1:
        raise ValueError(f"lora_config: dropout is at least 0 and less than 1, not {dropout!r}.")
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


def refuse_shared_experts(model: PreTrainedModel, parameters: Collection[str]) -> None:
    """Refuse LoRA on experts that processes share in another way than whole experts for one batch (`ValueError`)."""
    shared: Any = getattr(model.config, "distributed_config", None)
    if shared is None or not any(name.endswith(STACKS) for name in parameters):
        return
    sizes = {
        name: getattr(shared, name, None) or 1
        for name in ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size")
    }
    tp_size, ep_size, *others = sizes.values()
    if tp_size != ep_size or (ep_size > 1 and others != [1, 1]):
        raise ValueError(
            f"LoRA on experts under {', '.join(f'{name} = {size}' for name, size in sizes.items() if size > 1)}: "
            "processes can share whole experts and each see all rows (tp_size = ep_size, no more). Load the model so, "
            "or leave the experts out, llamoe.lora_config(model, experts=False)."
        )


def warn_of_frozen_experts(config: Any, model: nn.Module, parameters: Collection[str]) -> None:
    """Say once how many bytes of experts LoRA leaves frozen, if it adapts none."""
    experts = {
        name.replace(".base_layer", ""): module
        for name, module in model.named_modules()
        if isinstance(module, Experts)
    }
    stacks = [f"{name}.{stack}" for name in experts for stack in STACKS]
    saved = tuple(f"{module}.{stack}" for module in config.modules_to_save or () for stack in STACKS)
    is_trained = any(stack in parameters or stack.endswith(saved) for stack in stacks)
    if not stacks or config.inference_mode or is_trained:
        return
    size = sum(
        parameter.numel() * parameter.element_size()
        for module in experts.values()
        for parameter in module.parameters()
    )
    logger.warning_once(  # pyright: ignore[reportAttributeAccessIssue]
        f"LoRA leaves the routed experts frozen ({in_units(size)}). llamoe.lora_config(model) adapts them, too."
    )
