"""LoRA on a router's weight, with an adapter for each row of a batch, which peft refuses for parameters.

Shapes: T tokens, H hidden_size, E experts.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import layer
from torch import nn


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
        """The router's output for tokens `[T, H]`.

        Args:
            x: tokens.
            args: what `Router.forward` takes besides.
            adapter_names: the adapter of each row of the batch; of its T tokens each has an equal part.
            kwargs: what `Router.forward` takes besides.

        Raises:
            ValueError: several adapters in a batch while one is merged, or more or fewer names than rows.
        """
        if adapter_names is None or self.disable_adapters:
            return super().forward(x, *args, **kwargs)
        if self.merged:
            raise ValueError(
                "adapter_names while adapters are merged into the weights: call unmerge_adapter() first."
            )
        if len(x) % len(adapter_names):
            raise ValueError(f"adapter_names has {len(adapter_names)} names for {len(x)} tokens.")
        return self.base_layer(x, *args, update=partial(self._update, adapter_names), **kwargs)

    def _update(self, adapter_names: Sequence[str], x_TH: torch.Tensor) -> torch.Tensor | float:
        """What the adapters of a batch add to the logits, `[T, E]`."""
        update_TE, repeats = 0.0, len(x_TH) // len(adapter_names)
        for name in dict.fromkeys(adapter_names):
            if name in self.lora_A:
                chosen = torch.tensor([other == name for other in adapter_names], device=x_TH.device)
                scale_T1 = chosen.repeat_interleave(repeats)[:, None] * self.scaling[name]
                thin = self.lora_A[name](x_TH.to(self.lora_A[name].weight.dtype))
                update_TE = update_TE + self.lora_B[name](thin) * scale_T1
        return update_TE
