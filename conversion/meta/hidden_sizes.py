"""Meta's formulas for inner sizes of feed-forwards, and parameters from which they give a wanted size.

Sources: the feed-forwards of meta-llama/llama (LLaMA 1 and 2) and meta-llama/llama-models (Llama 3 and 4).
"""

import math

# Pairs of multiple_of and ffn_dim_multiplier in Meta's releases. They are tried first, so that the params.json of a
# released model gets the released values.
_PUBLISHED = ((256, None), (4096, 1.3), (1024, 1.3))
_PUBLISHED_LLAMA4 = (2048, 1.2)
_POWERS = tuple(2**n for n in range(13))


def feed_forward_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Compute the inner size of a dense feed-forward; each step but the last rounds down."""
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
    """Compute the inner size of routed and shared experts, as Llama 4's `MoE` does."""
    inner = int(multiplier * int(2 * int(ffn_exp * dim) / 3))
    if auto_scale:
        inner = int(inner / (capacity_factor + 1))
    return inner + -inner % multiple_of


def fit_dense(dim: int, inner: int) -> tuple[int, float | None]:
    """Find multiple_of and ffn_dim_multiplier that give a dense feed-forward the inner size `inner`.

    The first that fits is taken: a pair of Meta's releases, a power of two and no multiplier, or 1 and a multiplier.
    """
    for pair in (*_PUBLISHED, *((power, None) for power in _POWERS)):
        if feed_forward_size(dim, *pair) == inner:
            return pair
    return 1, _multiplier(dim, inner)


def fit_mixture(dim: int, inner: int, expert: int) -> tuple[int, float, float, float]:
    """Find multiple_of, ffn_dim_multiplier, ffn_exp and capacity_factor that give both inner sizes.

    `inner` is that of the dense feed-forward, `expert` that of an expert. The capacity factor has no other effect:
    Meta's code does not limit the tokens of an expert.
    """
    multiple_of, multiplier = _PUBLISHED_LLAMA4
    if feed_forward_size(dim, multiple_of, multiplier) == inner:
        if expert_size(dim, multiple_of, multiplier, 4.0) == expert:
            return multiple_of, multiplier, 4.0, 1.0
    multiplier = _multiplier(dim, inner)
    # Choose ffn_exp so large that the capacity factor is not negative.
    ffn_exp = 4.0 * math.ceil(2 * expert / inner + 1)
    scaled = expert_size(dim, 1, multiplier, ffn_exp, auto_scale=False)
    return 1, multiplier, ffn_exp, scaled / (expert + 0.5) - 1


def _multiplier(dim: int, inner: int) -> float:
    # Aim for half a channel more than needed, since the formula rounds the product down.
    return (inner + 0.5) / int(2 * (4 * dim) / 3)
