"""Sums over the tensors of each part of a model, such as its attention or its experts."""

import re
from collections.abc import Iterable

# Names of parts, and patterns of their tensors' keys. A tensor belongs to the first part whose pattern its key matches.
_PARTS = (
    ("vision tower", r"(^|\.)vision_model\."),
    ("projector", r"^multi_modal_projector\."),
    ("embedding", r"embed_tokens\."),
    ("output head", r"lm_head\."),
    ("norms", r"norm"),
    ("attention", r"\.self_attn\."),
    ("routers", r"\.(router|mlp\.gate)\."),
    ("shared experts", r"\.shared_expert\."),
    ("experts", r"\.experts\."),
    ("feed-forwards", r"\.(mlp|feed_forward)\."),
)


def sum_by_part(
    tensors: Iterable[tuple[str, int, int]], is_tower: bool = False
) -> dict[str, tuple[int, int]]:
    """Sum two numbers of each tensor, such as its bytes before and after quantization, over each part of the model.

    Args:
        tensors: key, first and second number of each tensor.
        is_tower: the model is a vision tower alone: all tensors count as that part, the first of the list.
    """
    sums: dict[str, tuple[int, int]] = {}
    for key, first, second in tensors:
        part = next((label for label, pattern in _PARTS if is_tower or re.search(pattern, key)), "other")
        sum_of_first, sum_of_second = sums.get(part, (0, 0))
        sums[part] = sum_of_first + first, sum_of_second + second
    return sums


def in_units(size: int) -> str:
    """Format a number of bytes in GB, MB or kB, which are 10^9, 10^6 and 10^3 bytes."""
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if size >= unit / 10:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 1000:,.2f} kB"
