"""One run a target folder, by a lock that the kernel takes back when the process ends, however it ends.

The lock (flock) is held on a small file in the folder, so that it holds by whatever path the folder is reached, and
between machines where a network file system passes locks on, as NFS does. A file that a killed run left behind stops
nobody: only the lock counts, and the file says who has it, for messages.

A run may lose its folder all the same: it is moved or removed, or the lock file is. `RunLock.check` notices before
anything gets its final name, and a run that lost its folder removes nothing there.

Where a file system has no locks a run says so and goes on. It then puts a file of its own in the place of another
run's, which thereby loses its folder.
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
except ImportError:  # Windows has none
    fcntl = None

LOCK = ".llamoe-lock"
# Long enough for a run that has just got the lock to say who it is, or for one that ends to give it back.
_PATIENCE = 0.5  # seconds
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_held: set["RunLock"] = set()


def find_run(target: Path) -> str | None:
    """The run that is writing into a folder, in words; None if there is none."""
    if fcntl is None:
        return None
    try:
        with open(target / LOCK, "rb", buffering=0) as file:
            # Shared, since NFS gives no other for a file that is open for reading only.
            return None if _get(file, fcntl.LOCK_SH) else _holder(file)
    except OSError:  # no lock file, or no locks here
        return None


class RunLock:
    """The right of a run to write into a folder.

    Args:
        folder: that is written.
        file: the lock file, open and locked; None on a system without locks.
    """

    def __init__(self, folder: Path, file: Any):
        self.folder, self.file, self.process = folder, file, os.getpid()
        _held.add(self)

    def is_held(self) -> bool:
        """Whether the folder is still this run's, and this process is the one that runs, not a fork of it."""
        is_ours = self.process == os.getpid()
        return is_ours and (self.file is None or _is_at(self.folder / LOCK, self.file))

    def check(self) -> None:
        """Refuse to go on in a folder that is no longer this run's.

        Raises:
            OSError: it is not.
        """
        if not self.is_held():
            raise OSError(
                errno.ESTALE,
                f"{self.folder}: was moved, removed or taken over by another run while it was written. Nothing more is "
                "written there",
            )

    def sign(self) -> None:
        """Say in the file who has the lock."""
        if self.file is not None:
            self.file.truncate(0)
            self.file.write(f"process {self.process} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Remove the file, then give the lock back: who waits for it sees that this file is no longer the one."""
        if self.file is not None:
            if self.is_held():
                (self.folder / LOCK).unlink()
            self.file.close()
        _held.discard(self)


@contextmanager
def one_run(target: Path) -> Iterator[RunLock]:
    """Make a folder, where it is missing, and keep all other runs out of it.

    Folders that were made are removed in the end if they are empty.

    Raises:
        ValueError: another run is writing there.
        OSError: the folder or the lock cannot be made.
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
    """The lock file of a folder, open and locked; folders that were missing are added to `made`."""
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
        except FileNotFoundError:  # a run that ended has just removed the folder
            if is_late:
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
    """Open a lock file, empty or not, but none that a link leads to elsewhere."""
    flags = getattr(os, "O_NOFOLLOW", 0)
    return open(path, "a+b", buffering=0, opener=lambda path, mode: os.open(path, mode | flags, 0o666))


def _get(file: Any, kind: int) -> bool:
    """Whether a lock could be got at once."""
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
    except OSError:  # where a lock keeps others from reading, too
        said = ""
    return said if said and said.isprintable() else "another process"


def refuse_second(target: Path, running: str) -> ValueError:
    """The error of a run that meets another one, which `find_run` found."""
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
        except OSError:  # something is in it, or another run has removed it
            return


def _let_go() -> None:
    """In a forked process, which would hold the locks on when this one has ended."""
    for lock in _held:
        if lock.file is not None:
            lock.file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
