"""Checkpoints written block by block; a file that has its final name is always complete.

A file is created in full size under a temporary name, filled, flushed to the disk and renamed. The file without which
no program takes the folder for a checkpoint (the index of several shards, Meta's params.json) is written last. Until
then the folder holds the file `UNFINISHED` with the plan's fingerprint, so that a later run of the same plan can
continue after the last complete file. A finished target, or one that another run is writing, is refused.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from ...configuration.errors import CheckpointError
from ...configuration.json_files import read_json, to_json
from ...modeling.checkpoints import LOCK, UNFINISHED, sync
from .lazy_tensor import LazyTensor, blocks
from .plan import Plan, Progress
from .preallocated_files import SafetensorsOutput, TorchOutput

_TEMPORARY = ".{}.partial"
# Number of elements that are checked for infinities and nan at once.
_CHECKED_AT_ONCE = 1 << 24


def check_apart(source: Path, target: Path) -> None:
    """Raise a `ValueError` if the target is the source or lies inside it; links are followed."""
    if source.is_dir() and source.resolve() in (target.resolve(), *target.resolve().parents):
        raise ValueError(
            f"{target}: is the source or lies in it; a source is never changed. Choose another target."
        )


def check_target(target: Path, resume: bool) -> None:
    """Check that the target can be written: it does not exist, is empty, or with `resume` is unfinished.

    Raises:
        ValueError: the target is none of these.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target}: is a file; the result is a folder. Choose another target.")
    if _is_empty(target):
        return
    is_unfinished = (target / UNFINISHED).exists()
    if not resume:
        if is_unfinished:
            raise ValueError(f"{target}: is unfinished; continue with resume=True (--resume), or remove it.")
        raise ValueError(f"{target}: exists already; choose another target, or remove it.")
    if not is_unfinished:
        raise ValueError(f"{target}: there is nothing to resume: no conversion left it unfinished.")


def _is_empty(target: Path) -> bool:
    """Return True if a folder is empty, or holds only files of a run that was killed while it wrote the first."""
    return {path.name for path in target.iterdir()} <= {LOCK, _TEMPORARY.format(UNFINISHED)}


@contextmanager
def _one_run(target: Path) -> Iterator[None]:
    """Create the folder if needed, and lock it for this run; remove it if it was created and stays empty.

    The operating system releases the lock, on a file in the folder, however the process ends.

    Raises:
        ValueError: another run is writing into the folder.
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
                # Remove the file before the lock is released: later, another run might have locked it. Windows refuses
                # to remove an open file.
                with suppress(OSError):
                    (target / LOCK).unlink()
    except Timeout:
        raise ValueError(
            f"{target}: is being written by another run. Wait until that ends; if it hangs, end it, then continue with "
            "resume=True (--resume)."
        ) from None
    finally:
        if is_new:
            # rmdir fails if the folder is not empty, so no file is lost.
            with suppress(OSError):
                target.rmdir()


def write(plan: Plan, target: Path, resume: bool = False, progress: Progress | None = None) -> None:
    """Write a planned checkpoint into a folder, which does not exist or is empty.

    With `resume`, an earlier run of the same plan has left the folder unfinished; its complete files are kept.

    Raises:
        ValueError: the target is in use, the earlier run had another plan, or a weight is not finite. The files that
            this run has written are removed.
        OSError: the disk is full or fails. Complete files stay for `resume`.
    """
    with _one_run(target):
        # Check again, now with the lock: another run may have written the folder since the first check.
        check_target(target, resume)
        _Run(plan, target, progress).write()


class _Run:
    """A run that writes a plan.

    Attributes:
        missing: names of the weight files that have to be written.
        completed: paths of the files that this run has written.
    """

    def __init__(self, plan: Plan, target: Path, progress: Progress | None):
        self.plan, self.target, self.progress = plan, target, progress
        self.missing = [name for name in plan.files if not (target / name).is_file()]
        self.completed: list[Path] = []

    def write(self) -> None:
        """Write the missing files; if that fails, no incomplete file stays."""
        is_begun = not _is_empty(self.target)
        if is_begun and read_json(self.target / UNFINISHED).get("fingerprint") != self.plan.fingerprint():
            raise ValueError(
                f"{self.target}: an earlier run began it from another source or with other options, so it cannot be "
                "resumed. Give the same ones, or another target."
            )
        try:
            if not is_begun:
                self._write_small({UNFINISHED: to_json({"fingerprint": self.plan.fingerprint()})})
            self._write_small(self.plan.before)
            self._write_weights()
            self._write_small(self.plan.last)
            (self.target / UNFINISHED).unlink()
        except ValueError:
            # In reverse, so that `UNFINISHED` is removed last.
            for path in reversed(self.completed):
                path.unlink()
                if path.parent != self.target and not any(path.parent.iterdir()):
                    path.parent.rmdir()
            raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.target}: writing failed ({error.strerror or error}). Whole files were kept; make room or "
                "repair the disk, then continue with resume=True (--resume)",
            ) from error
        finally:
            for name in (UNFINISHED, *self.plan.before, *self.plan.files, *self.plan.last):
                self._partial(name).unlink(missing_ok=True)

    def _write_weights(self) -> None:
        if self.progress:
            self.progress.start(self.plan.nbytes)
        for name, tensors in self.plan.files.items():
            if name in self.missing:
                self._write_file(name, tensors)
            elif self.progress:
                self.progress.advance(_nbytes(tensors), name)

    def _write_file(self, name: str, tensors: Mapping[str, LazyTensor]) -> None:
        make = SafetensorsOutput if name.endswith(".safetensors") else TorchOutput
        with closing(make(self._partial(name), tensors)) as output:
            for key, tensor in tensors.items():
                for start, stop in blocks(tensor):
                    block = tensor.read(start, stop)
                    check_finite(key, tensor, block)
                    output.append(key, block)
                    if self.progress:
                        self.progress.advance(block.nbytes, name)
            output.finish()
        self._name(name)
        sync(self.target)

    def _write_small(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            partial = self._partial(name)
            partial.parent.mkdir(exist_ok=True)
            partial.write_bytes(content)
            sync(partial)
            self._name(name)

    def _name(self, name: str) -> None:
        """Rename a complete file to its final name."""
        os.replace(self._partial(name), self.target / name)
        self.completed.append(self.target / name)

    def _partial(self, name: str) -> Path:
        """Return the temporary path of a file until it is complete."""
        path = self.target / name
        return path.parent / _TEMPORARY.format(path.name)


def _nbytes(tensors: Mapping[str, LazyTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def check_finite(key: str, tensor: LazyTensor, block: torch.Tensor) -> None:
    """Raise a `CheckpointError` if a block of the tensor `key` holds infinities or nan."""
    if not block.is_floating_point() or block.dtype.itemsize == 1:
        return
    for piece in block.split(_CHECKED_AT_ONCE):
        # A sum is many times faster than a check of each element, which is needed only if the sum is not finite.
        if bool(torch.isfinite(piece.sum())) or bool(piece.isfinite().all()):
            continue
        count = int((~piece.isfinite()).sum())
        raise CheckpointError(
            f"{tensor.origin} (as {key}): {count} of its numbers are NaN or infinity in {tensor.dtype_name}. The "
            "source is damaged, or a dtype with a wider range is needed."
        )
