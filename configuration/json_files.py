"""Reads small files and unambiguous JSON, writes files atomically, and compares versions of a file."""

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from .errors import CheckpointError

# For config.json and similar files: labels for 20,000 classes take a megabyte.
_MOST_BYTES = 1 << 24
# Larger limit, for vocabularies and indexes of hundreds of thousands of tensors.
LARGE = 1 << 27


@contextmanager
def reading(name: object, *others: type[Exception]) -> Iterator[None]:
    """Enter a context that turns an `OSError`, or an error of these classes, into a `CheckpointError` for a path."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, *others) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{name}: cannot be read ({reason}).") from error


def to_json(content: Any) -> bytes:
    """Format the content as JSON in the style of Hugging Face's folders."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def check_regular(path: str | os.PathLike) -> os.stat_result:
    """Return the `os.stat` result of a regular file, or of a link to one.

    Raises:
        OSError: it does not exist or is not accessible; an `IsADirectoryError` for a folder.
        CheckpointError: it is a pipe or a device, which might never end.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is a pipe or a device, where the checkpoint should have a file.")
    return status


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Write a small file atomically."""
    # A temporary name of its own, since several processes may write the file at once.
    unfinished = Path(f"{os.fspath(path)}.{uuid4().hex}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


class FileStamp(NamedTuple):
    """Size, time of writing and identity of a file; a different stamp means that the content may differ."""

    size: int
    mtime_ns: int
    inode: int
    device: int


def stamp_of(status: os.stat_result) -> FileStamp:
    """Return the stamp of a file; for a link, of its target."""
    return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


def read_json(path: str | os.PathLike, most: int = _MOST_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of at most `most` bytes.

    Raises:
        CheckpointError: the file is missing, larger than `most`, no JSON, or no object; an object has a name twice,
            of which readers may take either; a number is NaN.
    """
    # A name with a zero byte is a ValueError.
    with reading(path, ValueError):
        size = check_regular(path).st_size
        if size > most:
            raise CheckpointError(f"{path}: has {size} bytes, where at most {most} were expected.")
        with open(path, "rb") as file:
            raw = file.read(most + 1)
    try:
        content = json.loads(
            raw.decode("utf-8"), object_pairs_hook=without_duplicates, parse_constant=_number
        )
    # Invalid UTF-8 or JSON, or too long numbers or too deep nesting.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not a valid JSON file ({str(error)[:200]}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: should hold a JSON object, not {type(content).__name__}.")
    return content


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's pairs as a dict, for `object_pairs_hook`; `ValueError` for a name that occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:99]!r} stands twice in one object")
    return content


def _number(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a number")
    return float(name)
