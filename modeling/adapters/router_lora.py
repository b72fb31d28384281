"""LoRA on a router's weight, with an adapter for each row of a batch, which peft refuses for parameters.

Shapes: T tokens, H hidden_size, E experts.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import layer
from torch import nn

from .row_names import scales_of_rows


class ParamWrapper(layer.ParamWrapper):
    """The adapted weight of a `Router`; by the name of its class peft finds it."""

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, parameter_name: str | None = None, **kwargs: Any
    ):
        if parameter_name is None:
            raise ValueError(
                "LoRA's target_modules names the router's module, which is not a linear layer. Name its weight in "
                'target_parameters, such as ["router.weight"] ("gate.weight" of Mixtral).'
            )
        super().__init__(base_layer, adapter_name, parameter_name, **kwargs)

    def forward(
        self, x: torch.Tensor, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        """The router's output for tokens `[T, H]`, of which each row of a batch has an equal part."""
        if adapter_names is None or self.disable_adapters:
            return super().forward(x, *args, **kwargs)
        scales = scales_of_rows(self, adapter_names, len(x))
        return self.base_layer(x, *args, update=partial(self._update, scales), **kwargs)

    def _update(self, scales: dict[str, torch.Tensor], x_TH: torch.Tensor) -> torch.Tensor | float:
        """What the adapters of a batch add to the logits, `[T, E]`."""
        update_TE = 0.0
        for name, scale_T1 in scales.items():
            thin = self.lora_A[name](x_TH.to(self.lora_A[name].weight.dtype))
            update_TE = update_TE + self.lora_B[name](thin) * scale_T1
        return update_TE
