"""The form of errors about configurations.

Every error is a `ValueError` of one form, `Class.field = value: what is wrong; valid: what would be accepted`: a
person can act on it without reading this source, and a program can match it.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

from .errors import ConfigurationError

_LONGEST_VALUE = 120


def fail(config: Any, field: str, value: Any, problem: str, valid: str) -> NoReturn:
    """Raise the error for one field of a configuration or its class: what is wrong, and what would be accepted.

    The field's name has an index or key in brackets if the fault lies inside it.
    """
    owner = config.__name__ if isinstance(config, type) else type(config).__name__
    shown = repr(value)
    if len(shown) > _LONGEST_VALUE:
        shown = f"{shown[:_LONGEST_VALUE]}…"
    raise ConfigurationError(f"{owner}.{field} = {shown}: {problem}; valid: {valid}")


def enumerate_words(words: Iterable[Any]) -> str:
    """Join the words as in a sentence: `1, 2, 3 or 6`."""
    words = [str(word) for word in words]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def listed(names: Iterable[Any], limit: int = 5) -> str:
    """List the first names, and how many more there are: `a, b, c, d, e and 7 more`."""
    names = [str(name) for name in names]
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
