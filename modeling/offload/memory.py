"""Memory for experts: pinned for accelerators, and aligned to blocks, so that drives write to it without a copy.

A matrix begins at the same offset within a block in its slot as in its file. So whole blocks of the file, including the
bytes around the matrix, are read directly into the slot. The matrix also has the alignment of a memory map of the file;
with another one products may differ in their last bits.
"""

import logging
import mmap
import os
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger("llamoe")

BLOCK = 4096
"""Direct reads begin and end at multiples of this, in the file and in memory."""
ALIGNMENT = 64
"""Bytes to which memory of torch's own is aligned."""
LEAST_BYTES_OF_DIRECT = 1 << 20
"""Smaller matrices would be read with much around them."""
_HUGE_PAGE = 2 << 20
# Private memory: a forked process must not see what this one reads into a slot later.
_PRIVATE: Any = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def slots_of(count: int, size: int, device: torch.device, is_pinned: bool) -> torch.Tensor:
    """Allocate slots for matrices of `size` bytes, `[count, bytes]`, each padded to whole blocks."""
    unit = unit_of(size)
    row = -(-size // unit) * unit + unit
    if is_pinned:
        return pinned(count * row).view(count, row)
    if device.type != "cpu":
        # An accelerator's allocator aligns memory sufficiently, and files are not read into it directly.
        return torch.empty(count, row, dtype=torch.uint8, device=device)
    return torch.frombuffer(pages(count * row), dtype=torch.uint8, count=count * row).view(count, row)


def pinned(size: int) -> torch.Tensor:
    """Allocate pinned memory of this many bytes, beginning at a page.

    torch rounds sizes of pinned memory up to powers of two, up to twice the request. Here CUDA pins existing pages, as
    many as needed.
    """
    if torch.version.cuda is None or not size:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # Map shared pages: a fork would duplicate private ones, and the accelerator might use the wrong copy.
    memory = _Pinned(-1, size)
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=size)
    cudart: Any = torch.cuda.cudart()
    if error := int(cudart.cudaHostRegister(tensor.data_ptr(), size, 0)):
        logger.warning(
            "CUDA refuses to pin %d bytes (error %d): torch's pinned memory takes their place.", size, error
        )
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory.address = tensor.data_ptr()
    return tensor


class _Pinned(mmap.mmap):
    """Pages that CUDA has pinned; they are unpinned before they are freed."""

    address: int | None = None

    def __del__(self):
        if self.address is not None:
            with suppress(Exception):
                # Wait for running copies.
                torch.cuda.synchronize()
            with suppress(Exception):
                cudart: Any = torch.cuda.cudart()
                cudart.cudaHostUnregister(self.address)


def unit_of(size: int) -> int:
    """Return the alignment of slots in bytes: `BLOCK` for matrices from `LEAST_BYTES_OF_DIRECT` on."""
    return BLOCK if size >= LEAST_BYTES_OF_DIRECT else ALIGNMENT


def pages(size: int) -> memoryview:
    """Allocate memory that begins at a page; the system provides pages when they are written.

    Drives write to huge pages almost twice as fast, since a request lists fewer of them.
    """
    if size < _HUGE_PAGE:
        return memoryview(mmap.mmap(-1, max(size, 1), **_PRIVATE))
    memory = mmap.mmap(-1, size + _HUGE_PAGE, **_PRIVATE)
    first = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Some systems lack huge pages. Request only whole ones, so that none is mostly unused.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, first, size // _HUGE_PAGE * _HUGE_PAGE)
    return memoryview(memory)[first : first + size]


def open_direct(path: str) -> int | None:
    """Open a file for direct reads (without page cache); None if the system or file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, BLOCK) as memory:
            os.preadv(descriptor, [memory], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
