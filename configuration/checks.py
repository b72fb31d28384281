"""Functions that write the error messages about configurations.

Every message has the form `Class.field = value: what is wrong; valid: what would be accepted`.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

from .errors import ConfigurationError

_LONGEST_VALUE = 120


def fail(config: Any, field: str, value: Any, problem: str, valid: str) -> NoReturn:
    """Raise a `ConfigurationError` for one field of a configuration or its class.

    `field` has an index or key in brackets if only that entry is wrong.
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
    """List the first `limit` names and the number of further ones: `a, b, c, d, e and 7 more`."""
    names = [str(name) for name in names]
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
