"""Threads that read experts from files, in large requests, directly into their slots.

A file is opened once. After each request its path must still refer to the opened file, with the same size and
modification time, so that data of two versions is never mixed.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from ...configuration.errors import CheckpointError
from ...configuration.json_files import stamp_of
from ..formats import Parts
from .memory import BLOCK, LEAST_BYTES_OF_DIRECT, open_direct, pages
from .pieces import Piece, StoredLayer

_THREADS = 8
# Bytes of one request: large enough for a drive's full rate, small enough that several threads share an expert.
_REQUEST_BYTES = 4 << 20


class _File:
    """An open file with its size and times at opening. It is closed when nothing refers to it any more."""

    file = -1
    direct: int | None = None

    def __init__(self, path: str, is_direct: bool):
        self.path = path
        self.file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self.stamp = stamp_of(os.fstat(self.file))
        if hasattr(os, "posix_fadvise"):
            # Disable read-ahead: the bytes around an expert are not needed.
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)
        self.direct = open_direct(path) if is_direct else None

    def check(self, what: str) -> None:
        """Raise a `CheckpointError` if the path does not refer to this file, unchanged."""
        try:
            now = stamp_of(os.stat(self.path))
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read any more while {what} is needed ({error.strerror}). Bring the file back, "
                "and load the model again."
            ) from error
        if now != self.stamp:
            raise CheckpointError(
                f"{self.path}: has changed since the model was loaded ({self.stamp.size:,} bytes then, "
                f"{now.size:,} now), and {what} is needed. Load the model again."
            )

    def fill(self, memory: memoryview, begin: int, needed: int, what: str) -> int:
        """Read until `needed` bytes are there, and return how many came."""
        got = 0
        while got < needed:
            # A direct read covers whole blocks and is short at the end of a file; a buffered read gets the rest.
            is_direct = self.direct is not None and got % BLOCK == 0
            try:
                count = os.preadv(self.direct if is_direct else self.file, [memory[got:]], begin + got)
                if count <= 0:
                    raise OSError(f"{got:,} bytes came of {needed:,}: the file was cut short")
            except OSError as error:
                self.check(what)
                raise CheckpointError(
                    f"{self.path}: {what} cannot be read: {error.strerror or error} (bytes {begin:,} to "
                    f"{begin + needed:,}). Check the drive and the file, and ask again."
                ) from error
            got += count
        return got

    def close(self) -> None:
        """Close the file."""
        descriptors = self.file, self.direct
        self.file, self.direct = -1, None
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)

    __del__ = close


class Reader:
    """A pool of threads with the files that they read."""

    def __init__(self):
        self.files: dict[str, _File] = {}
        self._buffers = threading.local()
        self.is_closed = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="llamoe-experts")

    def open(self, layers: Mapping[str, StoredLayer]) -> None:
        """Open the files of layers; raises a `CheckpointError` if one has changed since its header was read."""
        for layer in layers.values():
            pieces = [piece for stack in layer.pieces.values() for each in stack for piece in each]
            is_direct = max(piece.nbytes for piece in pieces) >= LEAST_BYTES_OF_DIRECT
            for path in {piece.path for piece in pieces} - self.files.keys():
                file = self.files[path] = _File(path, is_direct)
                if file.stamp != layer.files[path]:
                    raise CheckpointError(
                        f"{path}: has changed while the model was loaded. Load it again when nothing writes to it."
                    )

    def check(self) -> None:
        """Raise a `CheckpointError` if a file has changed, or the model is closed."""
        if self.is_closed:
            raise closed("the model")
        for file in self.files.values():
            file.check("the model")

    def start(
        self,
        pieces: list[tuple[Piece, torch.Tensor, torch.Tensor | None]],
        what: str,
        count: Callable[[int], None],
    ) -> "Reading":
        """Begin to read pieces; raises a `CheckpointError` if the model is closed.

        Args:
            pieces: each with its target, a tensor of the piece's shape, and optionally the whole blocks around it: the
                target has the same offset within a block as in the file, and the other bytes may be overwritten.
            what: name of the expert, for error messages.
            count: called by each request's thread with the number of bytes read.
        """
        jobs: list[Future] = []
        try:
            with self._unless_closed(what):
                for piece, target, blocks in pieces:
                    file = self.files[piece.path]
                    for request in _requests(piece, target, blocks):
                        jobs.append(self._pool.submit(self._read, file, what, count, *request))
        except BaseException:
            # Wait for all threads before the memory is used for another matrix.
            for job in jobs:
                if not job.cancel():
                    job.exception()
            raise
        return Reading(jobs, what)

    def start_unpacking(
        self,
        pieces: Sequence[Piece],
        unpack: Callable[[list[torch.Tensor]], Parts],
        targets: Parts,
        what: str,
        count: Callable[[int], None],
    ) -> "Reading":
        """Begin to read tensors and write the results of `unpack` into targets; otherwise as `start`."""
        with self._unless_closed(what):
            return Reading([self._pool.submit(self._unpack, pieces, unpack, targets, what, count)], what)

    @contextmanager
    def _unless_closed(self, what: str) -> Iterator[None]:
        """Raise that the model was closed in place of an error that follows from it."""
        try:
            yield
        except BaseException as error:
            if self.is_closed:
                raise closed(what) from error
            raise

    @torch.no_grad()
    def _unpack(
        self,
        pieces: Sequence[Piece],
        unpack: Callable[[list[torch.Tensor]], Parts],
        targets: Parts,
        what: str,
        count: Callable[[int], None],
    ) -> None:
        tensors = []
        for piece in pieces:
            tensors.append(torch.empty(piece.shape, dtype=piece.dtype))
            self._read(
                self.files[piece.path], what, count, piece.begin, piece.nbytes, tensors[-1], piece.dtype
            )
        try:
            parts = unpack(tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{pieces[0].path}: {what}: {error}") from error
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def _read(
        self,
        file: _File,
        what: str,
        count: Callable[[int], None],
        begin: int,
        size: int,
        target: torch.Tensor,
        dtype: torch.dtype | None,
    ) -> None:
        """Read bytes of a file into a tensor.

        With a `dtype`, the bytes are numbers of that dtype: they go through a buffer of this thread, since they may
        have to be cast or transposed for the target. Without, the target is memory for whole disk blocks, which are
        read straight into it.
        """
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
        """Return this thread's buffer, which begins at a page."""
        buffer = getattr(self._buffers, "memory", None)
        if buffer is None or len(buffer) < size:
            self._buffers.memory = buffer = pages(max(size, _REQUEST_BYTES + 2 * BLOCK))
        return buffer[:size]

    def end_threads(self, is_waiting: bool = True) -> None:
        """End the threads; nothing can be read any more."""
        self._pool.shutdown(wait=is_waiting, cancel_futures=True)

    def close(self, is_waiting: bool = True) -> None:
        """End the threads; a file is closed when the last thread that reads it has ended.

        The garbage collector does not wait. It may run in a thread that is just starting, which holds locks that `join`
        needs.
        """
        self.is_closed = True
        self.end_threads(is_waiting)
        self.files = {}


def _requests(piece: Piece, target: torch.Tensor, blocks: torch.Tensor | None) -> Iterator[tuple]:
    """Yield the reads for a piece: first byte, number of bytes, target, and dtype (None: read whole disk blocks)."""
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
    """A matrix that is being read by several threads (`matrix_cache.Entry.arrival`)."""

    def __init__(self, jobs: list[Future], what: str):
        self._jobs, self._what = jobs, what

    def done(self) -> bool:
        """Return whether no thread writes any more."""
        return all(job.done() for job in self._jobs)

    def failed(self) -> bool:
        """Return whether no thread writes any more and a read failed."""
        return self.done() and any(job.cancelled() or job.exception() for job in self._jobs)

    def result(self) -> None:
        """Wait for all threads, also after an error: memory that one still writes cannot be used again."""
        first: BaseException | None = None
        for job in self._jobs:
            # `concurrent.futures.wait` would hang on jobs that are cancelled when their pool shuts down.
            try:
                error = job.exception()
            except CancelledError:
                error = closed(self._what)
            first = first or error
        if first is not None:
            raise first


def closed(what: str) -> CheckpointError:
    """Return the error of a model that was closed."""
    return CheckpointError(
        f"{what} is needed, but the model was closed by model.close(), and so were its files. Load it again."
    )
