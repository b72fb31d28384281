"""The linear layer of all models."""

import torch
from torch import nn

from ..kernels import linear

# torch's own `forward`: if other code has replaced it, `Linear` calls the replacement.
_FORWARD = nn.Linear.forward


class Linear(nn.Linear):
    """`nn.Linear` with faster products of few rows on a CPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        if nn.Linear.forward is not _FORWARD:
            return super().forward(input)
        return linear(input, self.weight, self.bias)


def make_layers_plain(model: nn.Module) -> None:
    """Turn a model's `Linear` layers into `nn.Linear`, in place: other libraries' quantizers ignore subclasses."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
