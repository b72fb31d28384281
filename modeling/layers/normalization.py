"""RMSNorm and L2Norm, with sums in float32 for every dtype of the input.

Zhang & Sennrich 2019 (arXiv 1910.07467): `x / sqrt(mean(x ** 2) + eps) * weight`, the mean over the last axis D. As in
Meta's code, the quotient is cast back to the input's dtype *before* it is multiplied by the weight; the other order
would differ in the last bit in bfloat16.
"""

import torch
from torch import nn

from ..kernels import rms_norm


class RMSNorm(nn.Module):
    """Root mean square normalization with a learned scale.

    `[2, -1, 3, 0]` becomes `[1.069, -0.535, 1.604, 0]` under a scale of ones.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize `[..., D]`; the result has the dtype of the input, or of the weight if that is wider."""
        return rms_norm(hidden_states, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Show the size and eps in `print(model)`."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class L2Norm(nn.Module):
    """RMSNorm without a weight: Llama 4 applies it to each query and key head after rotation."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `[..., D]`; the result has the dtype of `x`."""
        return rms_norm(x, None, self.eps)
