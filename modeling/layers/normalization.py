"""RMSNorm and L2Norm, both with float32 statistics for every dtype of activations.

Zhang & Sennrich 2019 (arXiv 1910.07467): `x / sqrt(mean(x ** 2) + eps) * weight`, the mean over the last axis. The
quotient is cast back to the input's dtype *before* it is multiplied by the weight: Meta's order, which decides the last
bit in bfloat16.

Shapes: D size of the last axis, hidden_size or head_dim; leading axes have any sizes.
"""

import torch
from torch import nn
from torch.nn import functional as F

from ..kernels import few_rms_norms


def rms_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square over the last axis.

    Args:
        x: `[..., D]`, any floating dtype.
        eps: added to the mean square, inside the root.

    Returns:
        `[..., D]` in the dtype of `x`, computed in float32.
    """
    # Autocast may return float32.
    return F.rms_norm(x, x.shape[-1:], None, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square normalization with a learned scale.

    `[2, -1, 3, 0]` becomes `[1.069, -0.535, 1.604, 0]` under a scale of ones.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize `[..., D]`; the dtype is kept unless the weight's is wider."""
        if (y := few_rms_norms(hidden_states, self.weight, self.eps)) is not None:
            return y
        return rms_normalize(hidden_states, self.eps) * self.weight

    def extra_repr(self) -> str:
        """Show the size and eps in `print(model)`."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class L2Norm(nn.Module):
    """RMSNorm without a weight: Llama 4 applies it to each query and key head after rotation."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `[..., D]`; the dtype is kept."""
        return rms_normalize(x, self.eps)

    def extra_repr(self) -> str:
        """Show eps in `print(model)`."""
        return f"eps={self.eps}"
