"""Parts of a model, such as its attention or its experts, and the sums of their tensors' bytes."""

import re
from collections.abc import Iterable

# Parts by patterns of their tensors' keys; the first match counts.
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


def part_of(key: str) -> str:
    """Return the part of the model that a tensor belongs to; "other" if none matches."""
    return next((label for label, pattern in _PARTS if re.search(pattern, key)), "other")


def sum_by_part(
    tensors: Iterable[tuple[str, int, int]], is_tower: bool = False
) -> dict[str, tuple[int, int]]:
    """Sum two numbers for each tensor, such as bytes before and after, by part of the model.

    A tower alone, whose keys have no prefix, is one part.
    """
    found: dict[str, tuple[int, int]] = {}
    for key, first, second in tensors:
        part = "vision tower" if is_tower else part_of(key)
        sums = found.get(part, (0, 0))
        found[part] = sums[0] + first, sums[1] + second
    return found


def in_units(size: int) -> str:
    """Format a number of bytes in GB, MB or kB of 10^9, 10^6 or 10^3 bytes."""
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if size >= unit / 10:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 1000:,.2f} kB"
