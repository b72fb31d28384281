"""SwiGLU feed-forward (Shazeer 2020, arXiv 2002.05202): `down(act(gate(x)) * up(x))`."""

import torch
from torch import nn
from transformers.activations import ACT2FN

from .linear import Linear


def activation(name: str) -> nn.Module:
    """Return transformers' activation function of this name; raise a `ValueError` if there is none."""
    if name not in ACT2FN:
        raise ValueError(f"hidden_act = {name!r}: unknown activation; valid: {', '.join(sorted(ACT2FN))}.")
    return ACT2FN[name]


class FeedForward(nn.Module):
    """The dense feed-forward of a layer, and the shared expert of a mixture."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str, bias: bool = False):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn = activation(hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `[..., hidden_size]` to the same shape."""
        # No variables hold gate and up, so their memory is free during the last product.
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
