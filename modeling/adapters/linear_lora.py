"""peft's LoRA layer beside linear layers of ours, plain and quantized.

peft is imported here, so this file is imported when somebody uses peft (`peft_registration`).
"""

from typing import Any

from peft import LoraConfig
from peft.tuners.lora import layer
from torch import nn

from ..layers import Linear
from .packed_weights import refuse_merging


class LoraLinear(layer.Linear):
    """peft's LoRA layer, whose factors multiply as the layer beside them does."""

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter, as peft does."""
        super().update_layer(adapter_name, *args, **kwargs)
        for factor in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            if type(factor) is nn.Linear:
                factor.__class__ = Linear

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the weight; a `ValueError` if it is quantized."""
        refuse_merging(self)
        super().merge(safe_merge, adapter_names)


def lora_linear(
    target: nn.Module, adapter_name: str, config: LoraConfig, parameter_name: str | None = None, **kwargs: Any
) -> LoraLinear | None:
    """Return the layer for a linear layer of ours; None leaves its parameters and `fan_in_fan_out` to peft."""
    if parameter_name is not None or config.fan_in_fan_out:
        return None
    return LoraLinear(target, adapter_name, config=config, **kwargs)
