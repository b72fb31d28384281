"""Read sizes and counts that users give; a size is a number of bytes, or a text such as "24GB"."""

import math
import re
from typing import Any

GB = 10**9


def bytes_of(name: str, value: Any, least: int = 0) -> int:
    """Convert a size that a user gave to bytes.

    Args:
        name: name of the argument, for the error message.
        value: bytes, or a text like "24GB" (24 * 10^9 bytes), "24GiB" (24 * 2^30) or "512"; "24Gb", which would be
            bits, is invalid.
        least: the smallest valid number.

    Raises:
        ValueError: the value is not a size, or is smaller than `least`.
    """
    number = value
    if isinstance(value, str):
        number_of_unit = r"\s*([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*(?:([KMGT])(I?))?B?\s*"
        match = re.fullmatch(number_of_unit, value.upper())
        number = None
        if match is not None and not value.strip().endswith("b"):
            power = " KMGT".index(match[2] or " ")
            number = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or number < least or number != int(number):
        raise ValueError(f'{name}={value!r}: give bytes, or a text like "24GB", of at least {least}.')
    return int(number)


def count_of(name: str, value: Any, least: int = 1) -> int:
    """Check and return a count that a user gave.

    Raises:
        ValueError: the value is not a whole number, or is smaller than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}.")
    return value
