"""Chooses the parameters that an adapter changes, and refuses adapters that would give wrong results.

In peft, `target_parameters` names parameters by the ends of their names, and `layers_to_transform`, `layers_pattern`,
`exclude_modules` and `modules_to_save` only apply to linear layers. Here they apply to parameters, too: the config's
`target_parameters` become the full names of the parameters that all its fields choose.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..moe import STACKS
from ..quantization import QuantizedLinear
from .expert_layout import ambiguous_stack
from .unsupported import unsupported


def choose_parameters(config: Any, model: nn.Module) -> None:
    """Set a config's `target_parameters` to the full names of the parameters that its fields choose together."""
    from peft.tuners.tuners_utils import check_target_module_exists

    endings = tuple(getattr(config, "target_parameters", None) or ())
    if not endings:
        return
    # The first config chooses parameters as if they were modules; the second excludes modules as a whole.
    for_parameters, for_modules = copy.copy(config), copy.copy(config)
    for_parameters.target_modules = set(endings)
    for_modules.target_modules, for_modules.layers_to_transform = ".*", None
    named = [
        (name, f"{name}.{parameter}")
        for name, module in _plain_modules(model)
        for parameter, _ in module.named_parameters(recurse=False)
        if f".{name}.{parameter}".endswith(tuple(f".{end}" for end in endings))
    ]
    # Else leave it to peft, which raises an error.
    if named:
        config.target_parameters = sorted(
            key
            for name, key in named
            if check_target_module_exists(for_parameters, key)
            and check_target_module_exists(for_modules, name)
        )


def refuse_unsupported(config: Any, model: PreTrainedModel) -> None:
    """Raise a `ValueError` for an adapter that would silently give wrong results; call `choose_parameters` first."""
    from peft import PeftType
    from peft.tuners.tuners_utils import check_target_module_exists

    parameters = set(getattr(config, "target_parameters", None) or ())
    if (name := ambiguous_stack(model, parameters)) is not None:
        raise unsupported("square", f"target_parameters chooses {name}")
    if any(name.endswith(STACKS) for name in parameters):
        _refuse_shared_experts(model.config)
    method = getattr(config.peft_type, "value", config.peft_type)
    if method == PeftType.LORA or not getattr(config, "target_modules", None):
        return
    for name, module in _plain_modules(model):
        if isinstance(module, QuantizedLinear) and check_target_module_exists(config, name):
            raise unsupported("method", f"{method} for {name}, which is {module.storage}")


def _refuse_shared_experts(config: Any) -> None:
    """Raise a `ValueError` if experts are split, or distributed over processes with different batches."""
    distributed: Any = getattr(config, "distributed_config", None)
    names = ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size")
    sizes = {name: getattr(distributed, name, None) or 1 for name in names}
    tp_size, ep_size, *others = sizes.values()
    if tp_size != ep_size or (ep_size > 1 and others != [1, 1]):
        raise unsupported("shared", ", ".join(f"{name} = {size}" for name, size in sizes.items() if size > 1))


def _plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that belong to no adapter, with the names that they have without adapters."""
    for name, module in model.named_modules():
        if ".lora_" not in name:
            yield name.replace(".base_layer", ""), module
