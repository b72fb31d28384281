"""Checks of target and source folders before a run: nothing finished, and nothing being written, is overwritten."""

import os
from pathlib import Path

from ...configuration.errors import CheckpointError
from ...modeling.checkpoints import UNFINISHED, check_finished
from .run_lock import LOCK, find_run, refuse_second

TEMPORARY = ".{}.partial"


def check_apart(source: Path, target: Path) -> None:
    """Refuse, with a `ValueError`, a target that is the source or inside it, by whatever path."""
    if source.is_dir() and source.resolve() in (target.resolve(), *target.resolve().parents):
        raise ValueError(f"{target}: lies in the source, which is never changed. Choose another target.")


def check_target(target: Path, resume: bool) -> None:
    """Refuse a target that is in use, before any work.

    Raises:
        ValueError: another run is writing there, the target is a file or not empty, or there is nothing to resume.
    """
    if running := find_run(target):
        raise refuse_second(target, running)
    check_free(target, resume)


def check_free(target: Path, resume: bool) -> None:
    """`check_target` without the check for other runs, for the run that has the lock."""
    if target.is_symlink() and not target.exists():
        raise ValueError(f"{target}: is a link to nothing. Remove it or choose another target.")
    if not target.exists():
        parent = next(parent for parent in target.absolute().parents if parent.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ValueError(
                f"{target}: {parent} is no folder that can be written to. Choose another target."
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
            f"{target}: there is nothing to resume: it is no folder that a conversion left unfinished. If it is "
            "finished, use it; otherwise choose another target."
        )


def is_empty(target: Path) -> bool:
    """Whether a folder holds nothing, or only the remains of a run that was killed at its first file."""
    return {path.name for path in target.iterdir()} <= {LOCK, TEMPORARY.format(UNFINISHED)}


def check_source(folder: Path) -> None:
    """Refuse, with a `CheckpointError`, a source that a run is writing or has left unfinished."""
    if running := find_run(folder):
        raise CheckpointError(f"{folder}: is being written by {running}. Wait until that ends.")
    check_finished(folder)
