"""Read small files and unambiguous JSON, write files atomically, and detect that a file has changed."""

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from .errors import CheckpointError

# Largest size in bytes of config.json and similar files: labels for 20,000 classes take a megabyte.
_MOST_BYTES = 1 << 24
# Largest size in bytes of vocabularies, and of indexes of hundreds of thousands of tensors.
LARGE = 1 << 27


@contextmanager
def reading(name: object, *others: type[Exception]) -> Iterator[None]:
    """Enter a context that turns an `OSError` and the `others` into a `CheckpointError` that names the file."""
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
        OSError: the path does not exist or is not accessible; an `IsADirectoryError` if it is a folder.
        CheckpointError: the path is a pipe or a device, which might be endless.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is a pipe or a device, but a checkpoint needs a file.")
    return status


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Write a small file atomically."""
    # The temporary name is unique, since several processes may write the file at once.
    unfinished = Path(f"{os.fspath(path)}.{uuid4().hex}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


FileStamp = tuple[int, int, int, int]
"""Size, time of writing, inode and device of a file. If they differ from before, the content may have changed."""


def stamp_of(status: os.stat_result) -> FileStamp:
    """Return the stamp of a file; for a link, of its target."""
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def read_json(path: str | os.PathLike, most: int = _MOST_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of at most `most` bytes.

    Raises:
        CheckpointError: the file is missing, is larger than `most`, or is not JSON; its content is not an object; an
            object has a name twice, for which readers may take either value; or a number is NaN.
    """
    # A file name with a zero byte raises a ValueError.
    with reading(path, ValueError):
        size = check_regular(path).st_size
        if size > most:
            raise CheckpointError(f"{path}: has {size} bytes, but at most {most} were expected.")
        with open(path, "rb") as file:
            raw = file.read(most + 1)
    try:
        content = json.loads(
            raw.decode("utf-8"), object_pairs_hook=without_duplicates, parse_constant=_number
        )
    # Invalid UTF-8 or JSON, or numbers that are too long, or objects that are nested too deeply.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not a valid JSON file ({str(error)[:200]}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: should hold a JSON object, not {type(content).__name__}.")
    return content


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict, for `json.loads`; raise a `ValueError` if a name occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:99]!r} occurs twice in one object")
    return content


def _number(name: str) -> float:
    """Convert one of JSON's constants "Infinity", "-Infinity" and "NaN"; raise a `ValueError` for the last."""
    if name == "NaN":
        raise ValueError("NaN is not a number")
    return float(name)
