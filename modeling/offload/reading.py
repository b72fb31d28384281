"""Threads that read experts from files in large requests, directly into the experts' slots of memory.

A file is opened once. After each request the reader checks that the path still refers to the opened file, with the same
size and modification time. So an expert never has bytes of two versions of a file.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch

from ...configuration.errors import CheckpointError
from ...configuration.json_files import stamp_of
from ..formats import Parts
from .memory import BLOCK, LEAST_BYTES_OF_DIRECT, open_direct, pages
from .pieces import Piece, StoredLayer

_THREADS = 8
# Bytes of one request: large enough for a drive's full speed, small enough that several threads read one expert.
_REQUEST_BYTES = 4 << 20


class _File:
    """An open file with its stamp (size, time, inode) when opened. It is closed when no object refers to it."""

    def __init__(self, path: str, is_direct: bool):
        self.path = path
        self.file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.file)
        self.stamp = stamp_of(os.fstat(self.file))
        if hasattr(os, "posix_fadvise"):
            # Disable read-ahead: the bytes around an expert are not needed.
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)
        # A second descriptor, for reads that bypass the page cache; None if these are not used or not supported.
        self.direct = open_direct(path) if is_direct else None
        if self.direct is not None:
            weakref.finalize(self, os.close, self.direct)

    def check(self, what: str) -> None:
        """Raise a `CheckpointError` if the path refers to another file, or the file has changed; `what` is needed."""
        try:
            now = stamp_of(os.stat(self.path))
        except OSError:
            now = None
        if now != self.stamp:
            raise CheckpointError(
                f"{self.path}: has changed or is gone, and {what} is needed. Load the model again."
            )

    def fill(self, memory: memoryview, begin: int, needed: int, what: str) -> int:
        """Read at least `needed` bytes of the file, from byte `begin` on; return the number of bytes read."""
        got = 0
        while got < needed:
            # Direct reads must begin at a block. After one that ended within a block, read through the page cache.
            is_direct = self.direct is not None and got % BLOCK == 0
            try:
                count = os.preadv(self.direct if is_direct else self.file, [memory[got:]], begin + got)
                if count <= 0:
                    raise OSError(f"{got:,} bytes came of {needed:,}: the file was cut short")
            except OSError as error:
                self.check(what)
                raise CheckpointError(
                    f"{self.path}: {what} cannot be read: {error.strerror or error} (bytes {begin:,} to "
                    f"{begin + needed:,}). Check the drive and the file, and try again."
                ) from error
            got += count
        return got


class Reader:
    """A pool of threads, and the files that they read."""

    def __init__(self):
        self.files: dict[str, _File] = {}
        self._buffers = threading.local()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="llamoe-experts")

    def open(self, layers: Mapping[str, StoredLayer]) -> None:
        """Open the files of these layers; raise a `CheckpointError` if one has changed since its header was read."""
        for layer in layers.values():
            pieces = [piece for stack in layer.pieces.values() for matrix in stack for piece in matrix]
            is_direct = max(piece.nbytes for piece in pieces) >= LEAST_BYTES_OF_DIRECT
            for path in {piece.path for piece in pieces} - self.files.keys():
                file = self.files[path] = _File(path, is_direct)
                if file.stamp != layer.files[path]:
                    raise CheckpointError(
                        f"{path}: has changed while the model was loaded. Load it again when nothing writes to it."
                    )

    def check(self) -> None:
        """Raise a `CheckpointError` if a file has changed, or the model is closed."""
        if not self.files:
            raise closed_error()
        for file in self.files.values():
            file.check("the model")

    def start(self, tasks: Iterable[Callable[[], None]]) -> "Reading":
        """Begin to run tasks, which are calls of `read` or `unpack`, in the threads."""
        jobs: list[Future] = []
        try:
            for task in tasks:
                jobs.append(self._pool.submit(task))
        except BaseException:
            # Wait for all threads, as the caller may then use the memory for another matrix.
            for job in jobs:
                if not job.cancel():
                    job.exception()
            raise
        return Reading(jobs)

    @torch.no_grad()
    def unpack(
        self,
        pieces: Sequence[Piece],
        convert: Callable[[list[torch.Tensor]], Parts],
        targets: Parts,
        what: str,
        count: Callable[[int], None],
    ) -> None:
        """Read tensors, convert them to parts, and copy these into `targets`; `what` and `count` are as in `read`."""
        tensors = [torch.empty(piece.shape, dtype=piece.dtype) for piece in pieces]
        for piece, tensor in zip(pieces, tensors, strict=True):
            self.read(piece.path, what, count, piece.begin, piece.nbytes, tensor, piece.dtype)
        try:
            parts = convert(tensors)
        except Exception as error:
            # Name the expert: torch's errors for tensors of wrong shapes do not.
            raise CheckpointError(f"{pieces[0].path}: {what} cannot be unpacked: {error}") from error
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def read(
        self,
        path: str,
        what: str,
        count: Callable[[int], None],
        begin: int,
        size: int,
        target: torch.Tensor,
        dtype: torch.dtype | None,
    ) -> None:
        """Read a part of a file into a tensor.

        Args:
            path: path of the file.
            what: name of the expert, for error messages.
            count: called with the number of bytes read.
            begin: first byte in the file.
            size: number of bytes.
            target: with a `dtype`, a tensor of as many elements, maybe of another dtype; without one, bytes, with room
                for whole disk blocks.
            dtype: dtype of the elements in the file; None to read bytes directly into the target.
        """
        file = self.files[path]
        block = 1 if file.direct is None else BLOCK
        if dtype is None:
            got = file.fill(memoryview(target[: -(-size // block) * block].numpy()), begin, size, what)
        else:
            around = begin % block
            buffer = self._buffer(-(-(around + size) // block) * block)
            got = file.fill(buffer, begin - around, around + size, what)
            stored = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=around)
            if stored.data_ptr() % dtype.itemsize:
                stored = stored.clone()
            target.copy_(stored.view(dtype).view(target.shape))
        file.check(what)
        count(got)

    def _buffer(self, size: int) -> memoryview:
        """Return the first `size` bytes of this thread's buffer, which begins at a memory page."""
        buffer = getattr(self._buffers, "memory", None)
        if buffer is None or len(buffer) < size:
            self._buffers.memory = buffer = pages(max(size, _REQUEST_BYTES + 2 * BLOCK))
        return buffer[:size]

    def end_threads(self, is_waiting: bool = True) -> None:
        """End the threads, and wait for their end if `is_waiting`; nothing can be read any more."""
        self._pool.shutdown(wait=is_waiting, cancel_futures=True)

    def close(self, is_waiting: bool = True) -> None:
        """End the threads; a file is closed when the last thread that reads it has ended.

        The garbage collector must not wait for threads: it may run in one that is just starting, which holds locks that
        `join` needs.
        """
        self.end_threads(is_waiting)
        self.files = {}


def requests(piece: Piece, target: torch.Tensor, blocks: torch.Tensor | None) -> Iterator[tuple]:
    """Yield `begin`, `size`, `target` and `dtype` of `Reader.read` for each request for a piece of a file.

    Args:
        piece: the piece to read.
        target: a tensor of the piece's shape.
        blocks: memory of whole disk blocks around the target, which is at the same offset within a block as in the
            file; its other bytes may be overwritten. None: read whole rows of the target.
    """
    if blocks is not None:
        around = piece.begin % BLOCK
        size = around + piece.nbytes
        for first in range(0, size, _REQUEST_BYTES):
            length = min(_REQUEST_BYTES, size - first)
            yield piece.begin - around + first, length, blocks[first:], None
        return
    row = piece.nbytes // piece.shape[0]
    for number, rows in enumerate(target.split(step := max(1, _REQUEST_BYTES // row))):
        yield piece.begin + number * step * row, len(rows) * row, rows, piece.dtype


class Reading:
    """A matrix that several threads are reading; the `arrival` of an `Entry` of `MatrixCache`."""

    def __init__(self, jobs: list[Future]):
        self._jobs = jobs

    def done(self) -> bool:
        """Return True if no thread reads this matrix any more."""
        return all(job.done() for job in self._jobs)

    def failed(self) -> bool:
        """Return True if no thread reads this matrix any more, and a read failed."""
        return self.done() and any(job.cancelled() or job.exception() for job in self._jobs)

    def result(self) -> None:
        """Wait until no thread reads this matrix any more, then raise the first error.

        After an error wait, too: the memory can be used again only when no thread writes to it.
        """
        first: BaseException | None = None
        for job in self._jobs:
            # `concurrent.futures.wait` would hang on jobs that are cancelled when their pool shuts down.
            try:
                error = job.exception()
            except CancelledError as cancelled:
                error = cancelled
            first = first or error
        if first is not None:
            raise first


def closed_error() -> CheckpointError:
    """Return the error that is raised if a closed model is used."""
    return CheckpointError(
        "The model was closed by model.close(), and so were the files of its experts. Load it again."
    )
