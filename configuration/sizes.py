"""Sizes and counts that users give: bytes as numbers or texts."""

import math
import re
from typing import Any

GB = 10**9


def bytes_of(name: str, value: Any, least: int = 0) -> int:
    """Bytes of a size that a user gave.

    Args:
        name: of the argument.
        value: bytes, or a text like "24GB" (10^9 bytes each) or "24GiB".
        least: the smallest that is valid.

    Raises:
        ValueError: it is none, or smaller.
    """
    from accelerate.utils import convert_file_size_to_int

    number = value
    if isinstance(value, str):
        text = value.strip()
        # accelerate's largest unit is one of giga.
        unit, thousand = ("GiB", 1024) if text.endswith("TiB") else ("GB", 1000)
        is_tera = text.endswith(("TB", "TiB"))
        try:
            number = convert_file_size_to_int(text[: -len(unit)] + unit if is_tera else text)
            number *= thousand if is_tera else 1
        # Infinity, and what is no number.
        except (ValueError, OverflowError):
            number = None
        if text.endswith("b"):
            # To accelerate these are bits.
            number = None
        elif re.fullmatch(r"\d{1,18}B?", text):
            number = int(text.removesuffix("B"))
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or number < least or number != int(number):
        raise ValueError(f'{name}={value!r}: give bytes, or a text like "24GB", of at least {least}.')
    return int(number)


def count_of(name: str, value: Any, least: int = 1) -> int:
    """A number of things that a user gave.

    Raises:
        ValueError: it is no whole number, or smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}.")
    return value
