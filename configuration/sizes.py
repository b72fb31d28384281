"""Sizes and counts that users give: bytes as numbers or texts."""

import math
import re
from typing import Any

GB = 10**9
_POWERS = "KMGT"


def parse_bytes(text: str) -> int | None:
    """Convert a text like "24GB" (10^9 bytes), "24GiB" (2^30) or "512" to bytes; None if it is no size."""
    match = re.fullmatch(r"(.*?)\s*([KMGT]I?)B", text.strip(), re.IGNORECASE)
    if match is None:
        return int(text.strip().removesuffix("B")) if re.fullmatch(r"\s*[0-9]{1,18}B?\s*", text) else None
    number, unit = match[1], match[2].upper()
    try:
        return int(float(number) * (1024 if unit.endswith("I") else 1000) ** (_POWERS.index(unit[0]) + 1))
    # What is not a number, and infinity.
    except (ValueError, OverflowError):
        return None


def bytes_of(name: str, value: Any, least: int = 0) -> int:
    """Convert a size that a user gave to bytes.

    Args:
        name: of the argument.
        value: bytes, or a text that `parse_bytes` takes, where "Gb" would be bits.
        least: the smallest valid number.

    Raises:
        ValueError: it is no size, or smaller.
    """
    number = value
    if isinstance(value, str):
        number = None if value.strip().endswith("b") else parse_bytes(value)
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or number < least or number != int(number):
        raise ValueError(f'{name}={value!r}: give bytes, or a text like "24GB", of at least {least}.')
    return int(number)


def count_of(name: str, value: Any, least: int = 1) -> int:
    """Check and return a count that a user gave.

    Raises:
        ValueError: it is not a whole number, or smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}.")
    return value
