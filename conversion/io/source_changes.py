"""Detects source files that change during a conversion.

A conversion reads for hours, and somebody may download the source again meanwhile. Opening notes size, time and inode
of each file before reading it. A run that finds other values at the end has read a mixture of two files, and fails.
"""

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from ...configuration.errors import CheckpointError


class Look(NamedTuple):
    """What changes when a file is written or replaced; for a link, the values of its target."""

    size: int
    mtime_ns: int
    inode: int


_Opener = TypeVar("_Opener", bound=Callable[..., Any])
_noted: ContextVar[dict[Path, Look] | None] = ContextVar("noted", default=None)


def look_at(path: Path) -> Look:
    """The current look of a file."""
    # From an open file, since a network file system may otherwise answer from its cache.
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
    return Look(status.st_size, status.st_mtime_ns, status.st_ino)


def remember_looks(opener: _Opener) -> _Opener:
    """Decorate a function that opens a checkpoint: `looks` of the result holds each file's look before reading."""

    @wraps(opener)
    def opened(*args, **kwargs):
        outer, seen = _noted.get(), {}
        token = _noted.set(seen)
        try:
            checkpoint = opener(*args, **kwargs)
        finally:
            _noted.reset(token)
            if outer is not None:
                outer.update(seen | outer)
        return replace(checkpoint, looks=seen)

    return cast(_Opener, opened)


def note(path: Path) -> None:
    """Note the look of a file that is about to be read, unless it is noted already."""
    seen = _noted.get()
    if seen is not None and path not in seen:
        try:
            seen[path] = look_at(path)
        except OSError:
            # The reader reports a missing file.
            pass


def check_unchanged(looks: Mapping[Path, Look]) -> None:
    """Refuse to continue when a file has changed since it was opened.

    Raises:
        CheckpointError: a file has another size, time or inode, or is gone.
    """
    for path, before in looks.items():
        try:
            now = look_at(path)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read any more ({error.strerror}), though it was when the conversion began."
            ) from error
        if now != before:
            how = [name for name, old, new in zip(Look._fields, before, now, strict=True) if old != new]
            raise CheckpointError(
                f"{path}: was changed or replaced while it was being converted ({', '.join(how)} differ), so that the "
                "result would be a mixture. Begin again when nothing writes to the source."
            )
