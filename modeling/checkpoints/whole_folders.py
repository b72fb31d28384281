"""What all writers of folders share: one run a folder, signs that it is not whole, and writing through to the disk.

A run's lock is held on a small file in the folder, so that it works whatever path leads there, and the system releases
it in whatever way the process ends. A file that a killed process left behind blocks nobody: only the lock counts.
"""

import errno
import os
import warnings
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from ...configuration.errors import CheckpointError

LOCK = ".llamoe-lock"
UNFINISHED = ".llamoe-unfinished.json"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


class FolderLock:
    """The right of one run to write into a folder; where the file system has no locks, it warns and keeps nobody out.

    Args:
        folder: exists.
        wait: seconds to wait for another holder's end; -1 for as long as it takes.

    Raises:
        filelock.Timeout: another one holds the lock (an OSError).
        OSError: the file cannot be made, or its name is a link.
    """

    def __init__(self, folder: Path, wait: float = 0):
        self.path, self._process = folder / LOCK, os.getpid()
        self._lock = FileLock(self.path)
        try:
            self._lock.acquire(timeout=wait)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"{folder}: its file system has no locks ({error.strerror}), so that nothing keeps a second run out; "
                "start none.",
                stacklevel=2,
            )
        self._status = os.stat(self.path)

    def is_held(self) -> bool:
        """Whether the folder still belongs to this run, and this is its process and not a fork."""
        if self._process != os.getpid():
            return False
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), self._status)
        except OSError:
            return False

    def check(self) -> None:
        """Raise an `OSError` if the folder no longer belongs to this run."""
        if not self.is_held():
            raise OSError(
                errno.ESTALE,
                f"{self.path.parent}: was moved, removed or taken over by another run while it was written. Nothing "
                "more is written there",
            )

    def release(self) -> None:
        """Remove the file, then release the lock: who waits sees that the file is gone, and makes another."""
        if self.is_held():
            # Windows removes no open file.
            with suppress(OSError):
                self.path.unlink()
        self._lock.release()


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
