"""RMSNorm and L2Norm, both with float32 statistics for every dtype of activations.

Zhang & Sennrich 2019 (arXiv 1910.07467). `eps` stands inside the root, and the result is cast back to the input's
dtype *before* it is multiplied by the weight: Meta's order, which decides the last bit in bfloat16. torch's `rms_norm`
normalizes in one call, which is one kernel on a GPU. It gets the weight only in float32, since it multiplies before the
cast. On a CPU it makes a dozen calls and takes twice the memory: there the same formula runs in place with equal bits,
and for a few rows, as in a decode step, in four calls.

Shapes: B batch, T tokens, H heads, D head_dim.
"""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from ..kernels import CPU_SHORTCUT_MAX_ROWS, can_use_shortcut


def rms_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square over the last axis.

    Args:
        x: `[..., D]`, any floating dtype.
        eps: added to the mean square, inside the root.

    Returns:
        `[..., D]` in the dtype of `x`, computed in float32.
    """
    if can_use_shortcut(x):
        return _normalize_plainly(x, eps)
    normalized = F.rms_norm(x, x.shape[-1:], None, eps)
    # Autocast may return float32.
    return normalized if normalized.dtype == x.dtype else normalized.to(x.dtype)


def _normalize_plainly(x: torch.Tensor, eps: float) -> torch.Tensor:
    # x is [B, T, hidden_size] or [B, T, H, D]; the first two axes count the rows.
    if x.shape[:-1][:2].numel() <= CPU_SHORTCUT_MAX_ROWS:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    squares = x.square()
    scale = squares.mean(-1, keepdim=True).add_(eps).rsqrt_()
    return torch.mul(x, scale, out=squares)


@functools.lru_cache(maxsize=64)
def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


class RMSNorm(nn.Module):
    """Root mean square normalization with a learned scale.

    `[2, -1, 3, 0]` becomes `[1.069, -0.535, 1.604, 0]` under a scale of ones.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize `[..., hidden_size]`; the dtype is kept unless the weight's is wider."""
        weight = self.weight
        # All float32: no cast that must precede the multiplication by the weight.
        if hidden_states.dtype == weight.dtype == torch.float32:
            if can_use_shortcut(hidden_states):
                return _normalize_plainly(hidden_states, self.eps).mul_(weight)
            return F.rms_norm(hidden_states, weight.shape, weight, self.eps)
        return rms_normalize(hidden_states, self.eps) * weight

    def extra_repr(self) -> str:
        """Show the size and eps in `print(model)`."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class L2Norm(nn.Module):
    """RMSNorm without a weight: Llama 4 applies it to each query and key head after rotation."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `[..., head_dim]`; the dtype is kept."""
        return rms_normalize(x, self.eps)

    def extra_repr(self) -> str:
        """Show eps in `print(model)`."""
        return f"eps={self.eps}"
