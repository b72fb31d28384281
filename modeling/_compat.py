"""Every branch on a library's version.

Supported: torch >= 2.13, transformers >= 5.24 and < 6, accelerate >= 1.15, peft >= 0.21.2. All other files use only
what both ends of these ranges share.
"""

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


def _release(library: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(library).split(".")[:2])


CACHE_OF_A_PASS = "cache" if _release("peft") >= (0, 22) else "past_key_values"
"""The name by which `generate` gives a model its cache; peft before 0.22 looks for the former one."""


def takes_cache(forward: Callable) -> Callable:
    """Decorate a forward so that its argument `past_key_values` is also accepted as `cache`, as of transformers 5.24.

    The cache of continuous batching, which transformers passes under that name, too, is forwarded as `paged_cache`.
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

    if _release("transformers") == (5, 24):
        peft.MIN_PEFT_VERSION = "0.21.2"
