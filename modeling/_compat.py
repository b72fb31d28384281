"""Every branch on a library's version.

Supported: torch >= 2.13, transformers >= 5.24 and < 6, accelerate >= 1.15, peft >= 0.21.2. All other files work with
every version in these ranges.
"""

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


def _release(library: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(library).split(".")[:2])


CACHE_ARGUMENT = "cache" if _release("peft") >= (0, 22) else "past_key_values"
"""The argument by which `generate` gives a model its KV cache; peft before 0.22 looks for its former name."""


def takes_cache(forward: Callable) -> Callable:
    """Decorate a `forward` so that it takes its argument `past_key_values` also as `cache`, transformers 5.24's name.

    Continuous batching passes its paged cache by this name, too; `forward` gets it as `paged_cache`.
    """
    from transformers.generation.continuous_batching import PagedAttentionCache

    @functools.wraps(forward)
    def takes_either(*args: Any, **kwargs: Any) -> Any:
        if "cache" in kwargs:
            cache = kwargs.pop("cache")
            if isinstance(cache, PagedAttentionCache):
                kwargs["paged_cache"] = cache
            elif cache is not None and kwargs.get("past_key_values") is not None:
                raise ValueError("cache and past_key_values are two names of one argument; give one of them.")
            elif cache is not None:
                kwargs["past_key_values"] = cache
        return forward(*args, **kwargs)

    # The signature shows both names: `generate` refuses names that it lacks, and peft looks for the former name.
    signature = inspect.signature(forward)
    parameters = list(signature.parameters.values())
    parameters.insert(-1, inspect.Parameter("cache", inspect.Parameter.KEYWORD_ONLY, default=None))
    takes_either.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return takes_either


def accept_peft() -> None:
    """Let transformers 5.24 load adapters with peft 0.21.2, although it requires a later, unreleased version.

    Apart from this requirement, its adapter code equals that of transformers 5.23, which accepts peft 0.20.
    """
    from transformers.integrations import peft

    if _release("transformers") == (5, 24):
        peft.MIN_PEFT_VERSION = "0.21.2"
