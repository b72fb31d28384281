"""Meta's formulas for hidden sizes, and their inverse: parameters from which Meta's code computes a given size.

Sources: the feed-forwards of meta-llama/llama (LLaMA 1 and 2) and meta-llama/llama-models (Llama 3 and 4).
"""

import math

# Published pairs of multiple_of and ffn_dim_multiplier. Tried first, so that published sizes get their own values back.
_PUBLISHED = ((256, None), (4096, 1.3), (1024, 1.3))
_PUBLISHED_LLAMA4 = (2048, 1.2)
_POWERS = tuple(2**n for n in range(13))


def feed_forward_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Compute the hidden size of a dense feed-forward, which is rounded down at each step."""
    inner = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        inner = int(multiplier * inner)
    return multiple_of * math.ceil(inner / multiple_of)


def expert_size(
    dim: int,
    multiple_of: int,
    multiplier: float,
    ffn_exp: float,
    capacity_factor: float = 1.0,
    auto_scale: bool = True,
) -> int:
    """Compute the hidden size of routed and shared experts, from Llama 4's `MoE`."""
    inner = int(multiplier * int(2 * int(ffn_exp * dim) / 3))
    if auto_scale:
        inner = int(inner / (capacity_factor + 1))
    return inner + -inner % multiple_of


def fit_dense(dim: int, inner: int) -> tuple[int, float | None]:
    """Find multiple_of and ffn_dim_multiplier for a dense feed-forward.

    Tried in this order: published pairs; the smallest power of two that needs no multiplier; no rounding, and the
    multiplier that gives the size.
    """
    for pair in (*_PUBLISHED, *((power, None) for power in _POWERS)):
        if feed_forward_size(dim, *pair) == inner:
            return pair
    return 1, _multiplier(dim, inner)


def fit_mixture(dim: int, inner: int, expert: int) -> tuple[int, float, float, float]:
    """Find multiple_of, ffn_dim_multiplier, ffn_exp and capacity_factor for a dense feed-forward and experts.

    The capacity factor has no other effect: Meta's code limits no expert.
    """
    multiple_of, multiplier = _PUBLISHED_LLAMA4
    if feed_forward_size(dim, multiple_of, multiplier) == inner:
        if expert_size(dim, multiple_of, multiplier, 4.0) == expert:
            return multiple_of, multiplier, 4.0, 1.0
    multiplier = _multiplier(dim, inner)
    # At least twice the size, so that the capacity factor is not negative.
    ffn_exp = 4.0 * math.ceil(2 * expert / inner + 1)
    scaled = expert_size(dim, 1, multiplier, ffn_exp, auto_scale=False)
    return 1, multiplier, ffn_exp, scaled / (expert + 0.5) - 1


def _multiplier(dim: int, inner: int) -> float:
    # A half more, since the product is rounded down.
    return (inner + 0.5) / int(2 * (4 * dim) / 3)
