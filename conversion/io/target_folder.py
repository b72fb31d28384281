"""Source and target of a run: nothing finished, and nothing that is being written, is overwritten."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ...modeling.checkpoints import LOCK, UNFINISHED

TEMPORARY = ".{}.partial"


def check_apart(source: Path, target: Path) -> None:
    """Refuse, with a `ValueError`, a target that is the source or inside it, by whatever path."""
    if source.is_dir() and source.resolve() in (target.resolve(), *target.resolve().parents):
        raise ValueError(f"{target}: lies in the source, which is never changed. Choose another target.")


def check_target(target: Path, resume: bool) -> None:
    """Refuse a target that cannot be written to.

    Raises:
        ValueError: it is a file, not empty, or nothing that could be resumed.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target}: is a file, where a folder will be written. Choose another target.")
    if is_empty(target):
        return
    is_unfinished = (target / UNFINISHED).exists()
    if not resume:
        if is_unfinished:
            raise ValueError(f"{target}: is unfinished; go on with resume=True (--resume), or remove it.")
        raise ValueError(f"{target}: exists already; choose another target, or remove it.")
    if not is_unfinished:
        raise ValueError(f"{target}: there is nothing to resume: no conversion left it unfinished.")


def is_empty(target: Path) -> bool:
    """Return whether a folder holds nothing, or only the remains of a run that was killed at its first file."""
    return {path.name for path in target.iterdir()} <= {LOCK, TEMPORARY.format(UNFINISHED)}


@contextmanager
def one_run(target: Path) -> Iterator[None]:
    """Create a folder if needed and keep all other runs out of it; a created folder that stays empty is removed.

    The lock is that of a file in the folder, which the system releases however the process ends.

    Raises:
        ValueError: another run is writing there.
        OSError: the folder or the lock cannot be created.
    """
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target / LOCK)
    try:
        with lock.acquire(timeout=0):
            try:
                yield
            finally:
                # Before the release, so that no run takes a lock that is about to vanish. Windows removes no open file.
                with suppress(OSError):
                    (target / LOCK).unlink()
    except Timeout:
        raise ValueError(
            f"{target}: is being written by another run. Wait until that ends; if it hangs, end it, then go on with "
            "resume=True (--resume)."
        ) from None
    finally:
        if is_new:
            # It holds what was written, or another run's files.
            with suppress(OSError):
                target.rmdir()
