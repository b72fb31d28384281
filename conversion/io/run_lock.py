"""One run at a time for a target folder, by a lock that the kernel releases when the process ends in any way.

The lock (flock) is held on a small file in the folder. So it works whatever path leads to the folder, and between
machines where a network file system supports locks, as NFS does. A file that a killed run left behind blocks nobody:
only the lock counts, and the file's text names the holder for messages.

A run can still lose its folder when somebody moves or removes the folder or the lock file. `RunLock.check` notices it
before any file gets its final name, and a run that lost its folder removes nothing there.

Where a file system has no locks, a run warns and continues. It then replaces another run's lock file by its own, so
that the other run loses its folder.
"""

import errno
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
# Windows has no fcntl.
except ImportError:
    fcntl = None

LOCK = ".llamoe-lock"
# Seconds to wait: enough for a new holder to write its name, or for one that ends to release the lock.
_PATIENCE = 0.5
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_held: set["RunLock"] = set()


def find_run(target: Path) -> str | None:
    """A description of the run that is writing into a folder; None if there is none."""
    if fcntl is None:
        return None
    try:
        with open(target / LOCK, "rb", buffering=0) as file:
            # A shared lock, since NFS refuses an exclusive one on a file opened for reading.
            return None if _get(file, fcntl.LOCK_SH) else _holder(file)
    # There is no lock file, or the system has no locks.
    except OSError:
        return None


class RunLock:
    """The right of a run to write into a folder; `file` is the lock file, None on a system without locks."""

    def __init__(self, folder: Path, file: Any):
        self.folder, self.file, self.process = folder, file, os.getpid()
        _held.add(self)

    def is_held(self) -> bool:
        """Whether the folder still belongs to this run, and this is its process and not a fork."""
        is_ours = self.process == os.getpid()
        return is_ours and (self.file is None or _is_at(self.folder / LOCK, self.file))

    def check(self) -> None:
        """Refuse to continue in a folder that no longer belongs to this run.

        Raises:
            OSError: the folder was lost.
        """
        if not self.is_held():
            raise OSError(
                errno.ESTALE,
                f"{self.folder}: was moved, removed or taken over by another run while it was written. Nothing more is "
                "written there",
            )

    def sign(self) -> None:
        """Write the holder's name into the lock file."""
        if self.file is not None:
            self.file.truncate(0)
            self.file.write(f"process {self.process} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Remove the file, then release the lock: waiting runs see that the file they have open is gone."""
        if self.file is not None:
            if self.is_held():
                (self.folder / LOCK).unlink()
            self.file.close()
        _held.discard(self)


@contextmanager
def one_run(target: Path) -> Iterator[RunLock]:
    """Create a folder if needed and keep all other runs out of it.

    Created folders that are empty at the end are removed.

    Raises:
        ValueError: another run is writing there.
        OSError: the folder or the lock cannot be created.
    """
    made: set[Path] = set()
    lock = None
    try:
        lock = RunLock(target, _wait_for_lock(target, made))
        lock.sign()
        yield lock
    finally:
        is_ours = lock is None or lock.is_held()
        if lock is not None:
            lock.release()
        if is_ours:
            _remove_empty(target, made)


def _wait_for_lock(target: Path, made: set[Path]) -> Any:
    """The lock file of a folder, open and locked; created folders are added to `made`."""
    if fcntl is None:
        _warn(target, "this system has no locks")
    deadline = time.monotonic() + _PATIENCE
    while True:
        is_late = time.monotonic() > deadline
        try:
            made.update(place for place in (target, *target.parents) if not place.exists())
            target.mkdir(parents=True, exist_ok=True)
            if fcntl is None:
                return None
            file = _open(target / LOCK)
            if _get(file, fcntl.LOCK_EX) and _is_at(target / LOCK, file):
                return file
            if is_late:
                raise refuse_second(target, _holder(file))
            time.sleep(_PATIENCE / 50)
        # A run that ended has just removed the folder; `mkdir` complains that it exists if that happens inside of it.
        except (FileNotFoundError, FileExistsError):
            if is_late or target.exists() and not target.is_dir():
                raise
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _warn(target, f"its file system has no locks ({error.strerror})")
            (target / LOCK).unlink(missing_ok=True)
            return _open(target / LOCK)


def _warn(target: Path, reason: str) -> None:
    warnings.warn(f"{target}: {reason}, so that nothing keeps a second run out; start none.", stacklevel=2)


def _open(path: Path) -> Any:
    """Open a lock file, empty or not, but follow no symbolic link."""
    flags = getattr(os, "O_NOFOLLOW", 0)
    return open(path, "a+b", buffering=0, opener=lambda path, mode: os.open(path, mode | flags, 0o666))


def _get(file: Any, kind: int) -> bool:
    """Whether the lock was acquired, without waiting."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, file: Any) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file.fileno()))
    except OSError:
        return False


def _holder(file: Any) -> str:
    try:
        file.seek(0)
        said = file.read(200).decode(errors="replace")
    # Some systems forbid reading a locked file.
    except OSError:
        said = ""
    return said if said and said.isprintable() else "another process"


def refuse_second(target: Path, running: str) -> ValueError:
    """The error for a run that meets another one, as described by `find_run`."""
    return ValueError(
        f"{target}: is being written by {running}; nothing was touched. Wait until that ends. If it hangs, end it, "
        "then go on with resume=True (--resume)."
    )


def _remove_empty(target: Path, made: set[Path]) -> None:
    for place in (target, *target.parents):
        if place not in made:
            return
        try:
            place.rmdir()
        # Not empty, or removed by another run.
        except OSError:
            return


def _let_go() -> None:
    """Close the lock files in a forked process, which would otherwise hold the locks after its parent has ended."""
    for lock in _held:
        if lock.file is not None:
            lock.file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
