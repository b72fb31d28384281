"""Helpers for writers of folders: names of their auxiliary files, a check for unfinished folders, and flushing."""

import os
from pathlib import Path

from ...configuration.errors import CheckpointError

LOCK = ".llamoe-lock"
"""File that a running command locks in the folder that it writes."""
UNFINISHED = ".llamoe-unfinished.json"
"""File that marks a folder until the command that writes it has finished."""


def check_whole(folder: str | os.PathLike, subfolder: str = "") -> None:
    """Raise a `CheckpointError` if a command is still writing the folder, or was stopped before its end."""
    path = Path(folder, subfolder)
    if (path / UNFINISHED).exists():
        raise CheckpointError(
            f"{path}: is unfinished. If no llamoe command is writing it any more, run the command that did again with "
            "--resume (resume=True); or remove the folder."
        )


def sync(path: Path) -> None:
    """Flush a file, or a folder's names, to the disk, so that a power failure leaves no name without content."""
    # Windows cannot open a folder, nor flush a file that is opened for reading.
    is_posix = os.name == "posix"
    if is_posix or path.is_file():
        descriptor = os.open(path, os.O_RDONLY if is_posix else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
