"""Meta's formulas for the hidden sizes of feed-forwards, and parameters for which they give a size.

Sources: the feed-forwards of meta-llama/llama (LLaMA 1 and 2) and meta-llama/llama-models (Llama 3 and 4).
"""

import math
from collections.abc import Iterable

# Published pairs of multiple_of and ffn_dim_multiplier. Tried first, so that published sizes get their own values back.
_PUBLISHED = ((256, None), (4096, 1.3), (1024, 1.3))
_PUBLISHED_LLAMA4 = ((2048, 1.2),)
_POWERS = tuple(2**n for n in range(13))


def feed_forward_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Hidden size of a dense feed-forward, which is rounded down at each step."""
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
    """Hidden size of routed and shared experts, from Llama 4's `MoE`."""
    inner = int(multiplier * int(2 * int(ffn_exp * dim) / 3))
    if auto_scale:
        inner = int(inner / (capacity_factor + 1))
    return inner + -inner % multiple_of


def fit_dense(dim: int, inner: int) -> tuple[int, float | None]:
    """multiple_of and ffn_dim_multiplier for a dense feed-forward.

    Tried in this order: published pairs; the smallest power of two that needs no multiplier; the multiplier with the
    fewest decimals and the smallest power of two.
    """
    for pair in (*_PUBLISHED, *((power, None) for power in _POWERS)):
        if feed_forward_size(dim, *pair) == inner:
            return pair
    return _pairs(dim, inner, [power for power in _POWERS if inner % power == 0])[0]


def fit_mixture(dim: int, inner: int, expert: int) -> tuple[int, float, float, float]:
    """multiple_of, ffn_dim_multiplier, ffn_exp and capacity_factor for a dense feed-forward and experts.

    The capacity factor has no other effect: Meta's code limits no expert. It differs from the releases' 1.0 only
    where the multiplier is so large that the formula would skip sizes.
    """
    pairs = [pair for pair in _PUBLISHED_LLAMA4 if feed_forward_size(dim, *pair) == inner]
    shared = [power for power in _POWERS if math.gcd(inner, expert) % power == 0]
    for multiple_of, multiplier in pairs + _pairs(dim, inner, shared):
        capacity = float(max(1, math.ceil(multiplier) - 1))
        for ffn_exp in _expansions(dim, expert, multiple_of, multiplier, capacity):
            if expert_size(dim, multiple_of, multiplier, ffn_exp, capacity) == expert:
                return multiple_of, multiplier, ffn_exp, capacity
    raise AssertionError(f"no parameters for sizes {dim}, {inner}, {expert}")


def _pairs(dim: int, inner: int, powers: Iterable[int]) -> list[tuple[int, float]]:
    """Pairs of multiple_of, one of the powers, and multiplier; those with the fewest decimals first."""
    pairs = ((power, found) for power in powers for found in _multipliers(dim, inner, power))
    return sorted(pairs, key=lambda pair: (len(str(pair[1])), pair[0]))


def _multipliers(dim: int, inner: int, multiple_of: int) -> Iterable[float]:
    base = int(2 * (4 * dim) / 3)
    for decimals in range(1, 10):
        lowest = math.ceil((inner - multiple_of + 1) / base * 10**decimals)
        for candidate in (lowest, lowest + 1):
            multiplier = candidate / 10**decimals
            if multiplier > 0 and feed_forward_size(dim, multiple_of, multiplier) == inner:
                yield multiplier


def _expansions(
    dim: int, expert: int, multiple_of: int, multiplier: float, capacity: float
) -> Iterable[float]:
    # The releases' value.
    yield 4.0
    scale = 1.5 * (capacity + 1) / multiplier / dim
    for decimals in range(1, 5):
        yield round((expert - multiple_of // 2) * scale, decimals)
    # The formula first rounds down to an integer, so try the values around the quotient, to its last digit.
    middle = int(expert * scale * dim)
    reach = math.ceil(3 * scale * dim) + 3
    yield from ((middle + step + 0.5) / dim for step in range(-reach, reach))
