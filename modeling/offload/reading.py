"""Threads that read experts from files, in large requests, straight to where they are needed.

A file is opened once. Before and after each matrix is read, the path must still lead to the file that was opened, with
the same size and time of change: what is read is never half of one version and half of another.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from ...configuration.errors import CheckpointError
from .memory import BLOCK, LEAST_BYTES_OF_DIRECT, open_direct, pages
from .pieces import Identity, Piece, identity_of

# Bytes of one request: large enough for a drive's full rate, small enough that several threads share an expert.
_REQUEST_BYTES = 4 << 20


class _File:
    """An open file, and what it was when it was opened."""

    def __init__(self, path: str, is_direct: bool):
        self.path = path
        try:
            self.file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be opened ({error.strerror}), and experts are read from it. Bring the file back, and "
                "load the model again."
            ) from error
        self.direct: int | None = None
        try:
            self.identity = identity_of(os.fstat(self.file))
            if hasattr(os, "posix_fadvise"):
                # What lies around an expert is not needed.
                os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)
            if is_direct:
                self.direct = open_direct(path)
        except BaseException:
            self.close()
            raise

    def check(self, what: str) -> None:
        """Raise a `CheckpointError` if the path does not lead to this file as it was."""
        try:
            now = identity_of(os.stat(self.path))
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read any more while {what} is needed ({error.strerror}). Bring the file back, "
                "and load the model again."
            ) from error
        if now != self.identity:
            raise CheckpointError(
                f"{self.path}: has changed since the model was loaded ({self.identity[2]:,} bytes then, {now[2]:,} "
                f"now), and {what} is needed. Load the model again."
            )

    def close(self) -> None:
        for descriptor in (self.file, self.direct):
            if descriptor is not None:
                os.close(descriptor)


class Readers:
    """A pool of threads with the files that they read."""

    def __init__(self, threads: int, direct: bool | None):
        self._direct = direct
        self._threads = threads
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()
        self._buffers = threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._is_closed = False

    def open(self, path: str, largest: int, identity: Identity | None = None) -> None:
        """Open a file.

        Args:
            path: of the file.
            largest: bytes of the largest matrix that is read from it.
            identity: what the file was when its header was read; None: not known.

        Raises:
            CheckpointError: the file is gone, or is not what it was.
        """
        with self._lock:
            if path not in self._files:
                is_direct = largest >= LEAST_BYTES_OF_DIRECT if self._direct is None else self._direct
                file = self._files[path] = _File(path, is_direct)
                if identity not in (None, file.identity):
                    raise CheckpointError(
                        f"{path}: has changed while the model was loaded. Load it again when nothing writes to it."
                    )

    @property
    def reads_directly(self) -> bool:
        """Whether files are read past the page cache."""
        return any(file.direct is not None for file in self._files.values())

    def check(self) -> None:
        """Raise a `CheckpointError` if a file is not what it was, or the model is closed."""
        if self._is_closed:
            raise closed("the model")
        for file in list(self._files.values()):
            file.check("the model")

    def start(
        self,
        pieces: list[tuple[Piece, torch.Tensor, torch.Tensor | None]],
        what: str,
        count: Callable[[int], None],
    ) -> "Reading":
        """Begin to read pieces into memory.

        Args:
            pieces: each with its place, a tensor of the piece's shape, and the bytes of whole blocks around it, where
                the place is as far from the beginning of a block as in the file, and those bytes are free.
            what: name of the expert, for errors.
            count: called with the bytes of each request.

        Raises:
            CheckpointError: a file has changed, or is gone; or the model is closed.
        """
        with self._lock:
            if self._is_closed:
                raise closed(what)
            files = {piece.path: self._files[piece.path] for piece, *_ in pieces}
            for file in files.values():
                file.check(what)
            if self._pool is None or self._process != os.getpid():
                # A forked process has the files, but none of the threads.
                self._process = os.getpid()
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="llamoe-experts")
            pool = self._pool
            jobs: list[Future] = []
            try:
                for piece, place, blocks in pieces:
                    for read, *where in self._requests(files[piece.path], piece, place, blocks):
                        jobs.append(pool.submit(read, files[piece.path], what, count, *where))
            except BaseException:
                # The memory is somebody else's next.
                for job in jobs:
                    job.cancel()
                    _outcome(job)
                raise
        return Reading(jobs, list(files.values()), what)

    def _requests(
        self, file: _File, piece: Piece, place: torch.Tensor, blocks: torch.Tensor | None
    ) -> Iterator[tuple]:
        """Each request of a piece: a method and its last arguments."""
        if blocks is not None and file.direct is not None:
            whole = piece.begin % BLOCK + piece.nbytes
            step = _request_bytes(whole)
            for first in range(0, whole, step):
                size = min(step, whole - first)
                yield self._read_blocks, piece.begin // BLOCK * BLOCK + first, size, blocks[first:]
            return
        row = piece.nbytes // piece.shape[0]
        step = max(1, _request_bytes(piece.nbytes) // row)
        for first in range(0, piece.shape[0], step):
            rows = place[first : first + step]
            yield self._read, piece.begin + first * row, len(rows) * row, rows, piece.dtype

    def _read_blocks(
        self,
        file: _File,
        what: str,
        count: Callable[[int], None],
        begin: int,
        size: int,
        blocks: torch.Tensor,
    ) -> None:
        """Read so many bytes, and the rest of their last block, straight to their place."""
        memory = memoryview(blocks[: -(-size // BLOCK) * BLOCK].numpy())
        with _told(file, what, begin, size):
            count(_fill(file, memory, begin, size, True))

    def _read(
        self,
        file: _File,
        what: str,
        count: Callable[[int], None],
        begin: int,
        size: int,
        rows: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Read rows to wherever they are, through memory of this thread if they are cast, turned or not in blocks."""
        with _told(file, what, begin, size):
            is_direct = file.direct is not None
            if not is_direct and rows.dtype == dtype and rows.is_contiguous() and rows.is_cpu:
                target = memoryview(rows.view(-1).view(torch.uint8).numpy())
                count(_fill(file, target, begin, size, False))
                return
            block = BLOCK if is_direct else 1
            first = begin // block * block
            length = -(-(begin + size - first) // block) * block
            buffer = self._buffer(length)
            count(_fill(file, buffer[:length], first, begin + size - first, is_direct))
            stored = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=begin - first)
            if stored.data_ptr() % dtype.itemsize:
                stored = stored.clone()
            rows.copy_(stored.view(dtype).view(rows.shape))

    def _buffer(self, size: int) -> memoryview:
        """Memory of this thread, which begins at a page."""
        buffer = getattr(self._buffers, "memory", None)
        if buffer is None or len(buffer) < size:
            self._buffers.memory = buffer = pages(max(size, _REQUEST_BYTES + 2 * BLOCK))
        return buffer

    def end_threads(self) -> None:
        """End the threads until something is read again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            # Python waits for threads at its own end, where the last reference may be dropped by one of them.
            is_own = threading.current_thread().name.startswith("llamoe-experts")
            pool.shutdown(wait=not is_own and not sys.is_finalizing(), cancel_futures=True)

    def close(self) -> None:
        """End the threads and close the files."""
        with self._lock:
            self._is_closed = True
            files, self._files = self._files, {}
        self.end_threads()
        for file in files.values():
            file.close()


def _request_bytes(size: int) -> int:
    """Bytes of each request for so many: whole blocks, and each about as large as the others."""
    requests = max(1, round(size / _REQUEST_BYTES))
    return -(-size // (requests * BLOCK)) * BLOCK


class Reading:
    """A matrix that is being read (`matrix_cache.Job`)."""

    is_for_each = False

    def __init__(self, jobs: list[Future], files: list[_File], what: str):
        self._jobs, self._files, self._what = jobs, files, what
        self._process = os.getpid()

    def is_done(self) -> bool:
        """Whether no thread writes any more."""
        return self._process != os.getpid() or all(job.done() for job in self._jobs)

    def finish(self) -> None:
        """Wait for all threads, also after an error: memory that one still writes cannot be used again.

        Raises:
            CheckpointError: a file could not be read, or changed meanwhile; the model was closed; or this process was
                forked while the matrix was read.
        """
        if self._process != os.getpid() and not all(job.done() for job in self._jobs):
            # The threads are in the other process only.
            raise CheckpointError(
                f"{self._what} was being read when this process was forked from another one: ask again."
            )
        for error in [_outcome(job) for job in self._jobs]:
            if isinstance(error, CancelledError):
                raise closed(self._what)
            if error is not None:
                raise error
        # A file that changed while it was read may have given half of each version.
        for file in self._files:
            file.check(self._what)


def _outcome(job: Future) -> BaseException | None:
    """Wait for a job, and return its error if it has one.

    `concurrent.futures.wait` never learns of jobs that the end of their pool cancels.
    """
    try:
        return job.exception()
    except CancelledError as error:
        return error


@contextmanager
def _told(file: _File, what: str, begin: int, size: int) -> Iterator[None]:
    """Context in which errors of reading say which expert they are of."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{file.path}: {what} cannot be read: {error.strerror or error} (bytes {begin:,} to {begin + size:,}). "
            "Check the drive, and ask again."
        ) from error
    except _Short as short:
        raise CheckpointError(
            f"{file.path}: {what} cannot be read: {short.got:,} bytes came of {short.wanted:,} from byte {begin:,} "
            "on. The file was cut short; copy it again, and load the model again."
        ) from None


class _Short(Exception):
    def __init__(self, got: int, wanted: int):
        super().__init__()
        self.got, self.wanted = got, wanted


def _fill(file: _File, memory: memoryview, begin: int, needed: int, is_direct: bool) -> int:
    """Read until `needed` bytes are there, and return how many came.

    Direct reads ask for whole blocks, and get fewer at the end of a file. What is left of a block comes by another way.
    """
    got = 0
    while got < needed:
        descriptor = file.direct if is_direct and got % BLOCK == 0 else file.file
        count = os.preadv(descriptor, [memory[got:]], begin + got)
        if count <= 0:
            raise _Short(got, needed)
        got += count
    return got


def closed(what: str) -> CheckpointError:
    """The error of a model that was closed."""
    return CheckpointError(
        f"{what} is needed, but the model was closed by model.close(), and so were its files. Load it again."
    )
