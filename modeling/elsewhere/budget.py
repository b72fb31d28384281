"""How much memory holds recently used experts, and how experts get there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .matrix_cache import LeastRecentlyUsed, Policy

# Of the memory that is available when a model is loaded, the share that experts may take where nobody names a size.
_SHARE_OF_AVAILABLE = 0.5


@dataclass(frozen=True)
class ExpertsMemory:
    """What `from_pretrained(experts_memory=…)` takes where a size alone does not say enough.

    Attributes:
        size: bytes, or a text like "8GB" or "8GiB": memory for recently used experts. Of experts on disk it is RAM, of
            experts in RAM memory of the accelerator. None: half of what is available, at most all of these experts.
        policy: makes the object that says which matrix goes first (`matrix_cache.Policy`); one for each memory.
        readers: threads that read from files.
        direct: whether files are read past the system's page cache; None: for matrices from 1 MiB, where the file
            system can.
        misses: "compute" computes rows of an expert that is not on the accelerator where it lies; "bring" copies it;
            "auto" takes what costs less time.
    """

    size: int | str | None = None
    policy: Callable[[], Policy] = LeastRecentlyUsed
    readers: int = 8
    direct: bool | None = None
    misses: Literal["auto", "compute", "bring"] = "auto"

    def __post_init__(self):
        """Check the values.

        Raises:
            ValueError: no size, no number of threads, or an unknown way.
        """
        if self.size is not None:
            object.__setattr__(self, "size", parse_size(self.size))
        if (
            isinstance(self.readers, bool)
            or not isinstance(self.readers, int)
            or not 1 <= self.readers <= 256
        ):
            raise ValueError(f"ExpertsMemory(readers={self.readers!r}): give a number of threads, 1 to 256.")
        if self.misses not in ("auto", "compute", "bring"):
            raise ValueError(f"ExpertsMemory(misses={self.misses!r}): give 'auto', 'compute' or 'bring'.")
        if not isinstance(self.direct, bool | None):
            raise ValueError(f"ExpertsMemory(direct={self.direct!r}): give True, False, or None.")
        made = self.policy() if callable(self.policy) else None
        if not all(callable(getattr(made, name, None)) for name in ("touch", "forget", "victim")):
            raise ValueError(
                f"ExpertsMemory(policy={self.policy!r}): give a class or function that makes an object with touch, "
                "forget and victim, such as LeastRecentlyUsed."
            )


def parse_size(size: Any) -> int:
    """Bytes of a size that `from_pretrained` was given.

    Raises:
        ValueError: it is none.
    """
    from accelerate.utils import convert_file_size_to_int

    number = size
    if isinstance(size, str):
        try:
            number = convert_file_size_to_int(size.strip())
        # Infinity, and what is no number.
        except (ValueError, OverflowError):
            number = None
    if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
        raise ValueError(f'experts_memory={size!r}: give bytes, or a text like "8GB", above 0.')
    return number


def default_size() -> int:
    """Bytes for experts where nobody names a size: half of the memory that is available now."""
    import psutil

    return int(psutil.virtual_memory().available * _SHARE_OF_AVAILABLE)
