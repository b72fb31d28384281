"""Every branch on a library's version.

Supported: torch >= 2.11, transformers >= 5.23 and < 6, accelerate >= 1.15, peft >= 0.21.2. All other files use only
what both ends of these ranges share.
"""

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MIN_TRANSFORMERS = (5, 23)
NEXT_TRANSFORMERS_MAJOR = 6


def _find_transformers() -> tuple[str, tuple[int, ...]]:
    """Return the version of the installed transformers, even if it cannot be imported, and its release."""
    try:
        import transformers

        found = transformers.__version__
    except ImportError:
        found = _installed("transformers")
    return found, _release(found)


def _installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "(none)"


def _release(found: str) -> tuple[int, ...]:
    return tuple(int(part) for part in found.split(".")[:2] if part.isdigit())


def require_supported_transformers() -> None:
    """Refuse an unsupported transformers, before anything of it is used.

    Raises:
        ImportError: transformers is absent, older than 5.23, or 6 or newer.
    """
    wanted = f"transformers>={MIN_TRANSFORMERS[0]}.{MIN_TRANSFORMERS[1]},<{NEXT_TRANSFORMERS_MAJOR}"
    found, release = _find_transformers()
    if not MIN_TRANSFORMERS <= release < (NEXT_TRANSFORMERS_MAJOR,):
        raise ImportError(
            f'llamoe needs {wanted}, but transformers {found} is installed: pip install "{wanted}".'
        )


CACHE = "cache" if _find_transformers()[1] >= (5, 24) else "past_key_values"
"""The name by which transformers hands models a KV cache, and takes it from their outputs; 5.24 changed it."""

CACHE_OF_A_PASS = CACHE if _release(_installed("peft")) >= (0, 22) else "past_key_values"
"""The name by which `generate` gives a pass its cache; peft before 0.22 looks for the former one."""

PAGED_CACHE = "paged_cache" if CACHE == "cache" else "cache"
"""The keyword by which our models hand on the cache of continuous batching, beside other arguments of attention."""


def takes_cache(forward: Callable) -> Callable:
    """Decorate a forward so that its argument `past_key_values` is also accepted as `cache`, as of transformers 5.24.

    The cache of continuous batching, which 5.24 passes under that name, too, is forwarded as `PAGED_CACHE`.
    """
    if CACHE == "past_key_values":
        return forward
    from transformers.generation.continuous_batching import PagedAttentionCache

    @functools.wraps(forward)
    def takes_either(*args: Any, **kwargs: Any) -> Any:
        if "cache" in kwargs:
            cache = kwargs.pop("cache")
            if isinstance(cache, PagedAttentionCache):
                kwargs[PAGED_CACHE] = cache
            elif cache is not None and kwargs.get("past_key_values") is not None:
                raise ValueError("cache and past_key_values are two names of one argument; give one of them.")
            elif cache is not None:
                kwargs["past_key_values"] = cache
        return forward(*args, **kwargs)

    # Show both names in the signature: `generate` refuses unknown arguments, and peft looks for the former name.
    signature = inspect.signature(forward)
    parameters = list(signature.parameters.values())
    parameters.insert(-1, inspect.Parameter("cache", inspect.Parameter.KEYWORD_ONLY, default=None))
    takes_either.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return takes_either


def accept_peft() -> None:
    """Let models load adapters with the released peft, although transformers 5.24 requires the next release.

    Apart from this check its code for adapters is that of 5.23, which accepts peft 0.20.
    """
    from transformers.integrations import peft

    if _find_transformers()[1] == (5, 24):
        peft.MIN_PEFT_VERSION = "0.21.2"


def fill_paged_cache(key: Any, value: Any, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Append a layer's keys and values `[1, heads, T, head_dim]` to a paged cache, and return all of them.

    Before 5.24 the attention implementation did it, so the cache stays in its arguments `kwargs`. The cache changes
    these arguments.
    """
    cache = kwargs.pop(PAGED_CACHE, None) if CACHE == "cache" else None
    return (key, value) if cache is None else cache.update(key, value, layer_idx, kwargs=kwargs)


def splits_packed_columns_unevenly() -> bool:
    """Return True if torch can split the columns of gate and up, each separately, unevenly over devices.

    torch 2.15 can. In 2.11 saving and the backward pass raise.
    """
    import torch

    return torch.__version__ >= (2, 15)
