"""The numbers with which the factors of experts' stacks begin (`init_lora_weights`).

What peft computes from a linear layer's weight is computed from each expert's matrix. peft itself asks the experts'
module for a `weight`.
"""

import copy
from collections.abc import Collection
from typing import Any

import torch
from peft.tuners.lora import layer
from peft.utils.integrations import gather_params_ctx
from torch import nn

from ..moe import Experts
from .expert_layout import by_expert
from .stack_targets import is_reading

# peft begins these alike for a stack and for its experts.
_ALIKE = ("True", "gaussian")
_BY_EXPERT = ("False", "loftq", "olora", "orthogonal", "pissa")
# These change the base weights, also where an adapter is read that begins so.
_CHANGING = ("loftq", "olora", "pissa")
# Of an adapter that is read, which then has other numbers, no beginning is asked of these.
_FROM_DATA = ("eva", "lora_ga")


def _method(config: Any) -> str:
    method = str(getattr(config, "init_lora_weights", True))
    return "pissa" if method.startswith("pissa_niter_") else "olora" if method.lower() == "olora" else method


def refuse_beginnings(config: Any, model: nn.Module, parameters: Collection[str]) -> None:
    """Refuse a beginning that experts' stacks cannot have (`ValueError`).

    Such a one is what peft collects of linear layers alone, or changes weights that several processes share.
    """
    method = _method(config)
    if method in _ALIKE or (method in _FROM_DATA and is_reading()):
        return
    for name, module in model.named_modules():
        name = name.replace(".base_layer", "")
        if not isinstance(module, Experts) or not any(key.rpartition(".")[0] == name for key in parameters):
            continue
        asked = f"LoraConfig(init_lora_weights={config.init_lora_weights!r})"
        if method not in _BY_EXPERT:
            raise ValueError(
                f"{asked} is not for stacks of experts, and target_parameters names those of {name}: peft looks at "
                'inputs, gradients or weights of linear layers alone. Choose True, "gaussian", "orthogonal", "olora" '
                'or "pissa", or leave the experts to an adapter of their own.'
            )
        if method in _CHANGING and any(hasattr(stack, "device_mesh") for stack in module.parameters()):
            raise ValueError(
                f"{asked} changes the weights of {name}, of which each process holds a part: choose True, or begin "
                "the adapter in one process and load its base and file."
            )


def without_dropout(config: Any) -> Any:
    """A copy of a `LoraConfig` without the dropout that peft refuses for a stack."""
    config = copy.copy(config)
    config.lora_dropout = 0.0
    return config


def begin_by_expert(wrapper: Any, adapter_name: str, config: Any) -> None:
    """Begin a stack's factors as peft begins those of a linear layer with each expert's matrix."""
    method = _method(config)
    if method not in _BY_EXPERT or (is_reading() and method not in _CHANGING):
        return
    a, b = (factors[adapter_name].weight for factors in (wrapper.lora_A, wrapper.lora_B))
    if a.is_meta:
        if method in _CHANGING:
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} changes the experts' weights, for which "
                "low_cpu_mem_usage=True makes no numbers: leave it out."
            )
        return
    rank, alpha = wrapper.r[adapter_name], wrapper.lora_alpha[adapter_name]
    most = min(wrapper.in_features, wrapper.out_features)
    if method in _CHANGING and rank > most:
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r}: an expert's matrix has at most {most} singular values, "
            f"and r = {rank}."
        )
    is_input_first, stack = wrapper.get_base_layer().is_transposed, wrapper.get_param()
    of_one = without_dropout(config)
    with torch.no_grad(), gather_params_ctx(stack if method in _CHANGING else []):
        a_ErI, b_OrE = (by_expert(each.data, dim, wrapper.num_experts) for dim, each in enumerate((a, b)))
        # Other methods take the sizes alone, also of packed experts.
        unread = a.new_empty(1, 1).expand(wrapper.out_features, wrapper.in_features)
        for expert in range(wrapper.num_experts):
            matrix_OI = unread
            if method in _CHANGING:
                matrix_OI = stack.data[expert].t() if is_input_first else stack.data[expert]
            linear = nn.Linear(wrapper.in_features, wrapper.out_features, bias=False, device="meta")
            linear.weight = nn.Parameter(matrix_OI, requires_grad=False)
            one = layer.Linear(linear, adapter_name, config=of_one, r=rank, lora_alpha=alpha)
            a_ErI[expert] = one.lora_A[adapter_name].weight
            b_OrE[..., expert] = one.lora_B[adapter_name].weight
            if method in _CHANGING:
                matrix_OI.copy_(linear.weight)
