"""Helpers for writing folders: names of auxiliary files, detection of unfinished folders, and flushing to disk."""

import os
from pathlib import Path

from ...configuration.errors import CheckpointError

LOCK = ".llamoe-lock"
UNFINISHED = ".llamoe-unfinished.json"


def check_whole(folder: str | os.PathLike, subfolder: str = "") -> None:
    """Raise a `CheckpointError` for a folder that a conversion has left unfinished, or is writing."""
    place = Path(folder, subfolder)
    if (place / UNFINISHED).exists():
        raise CheckpointError(
            f"{place}: is unfinished. If no llamoe command is writing it any more, run that command again with "
            "--resume (resume=True); or remove the folder."
        )


def sync(path: Path) -> None:
    """Flush a file, or a folder's names, to the disk: a power failure must not leave names without content."""
    # Windows opens no folder, and flushes no file that is open for reading.
    is_posix = os.name == "posix"
    if is_posix or path.is_file():
        descriptor = os.open(path, os.O_RDONLY if is_posix else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
