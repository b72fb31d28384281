"""Source and target of a run: nothing finished, and nothing that is being written, is overwritten or read."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

from ...configuration.errors import CheckpointError
from ...configuration.json_files import FileStamp, stamp_of
from ...modeling.checkpoints import LOCK, UNFINISHED, FolderLock, holder

TEMPORARY = ".{}.partial"
# Seconds to wait for a run that is just ending, and how often its folder may vanish meanwhile.
_PATIENCE, _TRIES = 0.5, 100


def check_unchanged(looks: Mapping[Path, FileStamp]) -> None:
    """Raise a `CheckpointError` if a file has another size, time, inode or device than at its opening, or is gone."""
    for path, before in looks.items():
        try:
            now = stamp_of(path.stat())
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read any more ({error.strerror}), though it was when the conversion began."
            ) from error
        if now != before:
            how = [name for name, old, new in zip(FileStamp._fields, before, now, strict=True) if old != new]
            raise CheckpointError(
                f"{path}: was changed or replaced while it was being converted ({', '.join(how)} differ), so that the "
                "result would be a mixture. Begin again when nothing writes to the source."
            )


def check_apart(source: Path, target: Path) -> None:
    """Refuse, with a `ValueError`, a target that is the source or inside it, by whatever path."""
    if source.is_dir() and source.resolve() in (target.resolve(), *target.resolve().parents):
        raise ValueError(f"{target}: lies in the source, which is never changed. Choose another target.")


def check_target(target: Path, resume: bool) -> None:
    """Refuse a target that cannot be written to.

    Raises:
        ValueError: it is a file, not empty, or nothing that could be resumed.
    """
    if target.is_symlink() and not target.exists():
        raise ValueError(f"{target}: is a link to nothing. Remove it or choose another target.")
    if not target.exists():
        parent = next(parent for parent in target.absolute().parents if parent.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ValueError(
                f"{target}: {parent} is not a folder that can be written to. Choose another target."
            )
        return
    if not target.is_dir():
        raise ValueError(f"{target}: is a file, where a folder will be written. Choose another target.")
    if is_empty(target):
        return
    is_unfinished = (target / UNFINISHED).exists()
    if not resume:
        state, hint = ("is unfinished", "go on with resume=True (--resume)") if is_unfinished else (
            "exists already", "choose another target, or remove it"
        )  # fmt: skip
        raise ValueError(f"{target}: {state}; nothing is overwritten: {hint}.")
    if not is_unfinished:
        raise ValueError(
            f"{target}: there is nothing to resume: it is not a folder that a conversion left unfinished. If it is "
            "finished, use it; otherwise choose another target."
        )


def is_empty(target: Path) -> bool:
    """Whether a folder holds nothing, or only the remains of a run that was killed at its first file."""
    return {path.name for path in target.iterdir()} <= {LOCK, TEMPORARY.format(UNFINISHED)}


@contextmanager
def one_run(target: Path) -> Iterator[FolderLock]:
    """Create a folder if needed and keep all other runs out of it; created folders that stay empty are removed.

    Raises:
        ValueError: another run is writing there.
        OSError: the folder or the lock cannot be created.
    """
    made = [place for place in (target, *target.parents) if not place.exists()]
    is_ours = True
    try:
        lock = _lock(target)
        try:
            yield lock
        finally:
            is_ours = lock.is_held()
            lock.release()
    finally:
        for place in made if is_ours else ():
            try:
                place.rmdir()
            # Not empty, or removed by another run.
            except OSError:
                break


def _lock(target: Path) -> FolderLock:
    for attempt in range(_TRIES):
        try:
            target.mkdir(parents=True, exist_ok=True)
            return FolderLock(target, _PATIENCE)
        except Timeout:
            raise ValueError(
                f"{target}: is being written by {holder(target)}; nothing was touched. Wait until that ends. If it "
                "hangs, end it, then go on with resume=True (--resume)."
            ) from None
        # A run that ended has just removed the folder; `mkdir` may find that it exists and is none.
        except (FileNotFoundError, FileExistsError):
            if attempt == _TRIES - 1 or (target.exists() and not target.is_dir()):
                raise
    raise AssertionError
