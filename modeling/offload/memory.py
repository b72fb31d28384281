"""Memory for experts: pinned for accelerators, or aligned to disk blocks, so that drives write to it directly.

In its slot a matrix begins at the same offset within a block as in its file. So whole blocks of the file, including the
bytes around the matrix, can be read directly into the slot. The matrix also has the alignment of a memory map of the
file, which matters as products may differ in their last bits with another alignment.
"""

import logging
import mmap
import os
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger("llamoe")

BLOCK = 4096
"""Bytes: direct reads begin and end at multiples of this in file and memory."""
ALIGNMENT = 64
"""Bytes to which torch aligns memory."""
LEAST_BYTES_OF_DIRECT = 1 << 20
"""Smaller matrices are not read directly: most of the bytes read might be those around them."""
_HUGE_PAGE = 2 << 20


def slots_of(count: int, size: int, device: torch.device, is_pinned: bool) -> torch.Tensor:
    """Allocate slots for `count` matrices of `size` bytes, `[count, bytes]` uint8.

    A slot is one unit (`unit_of`) longer than the matrix, which may begin anywhere in the first unit.
    """
    unit = unit_of(size)
    row = -(-size // unit) * unit + unit
    if is_pinned:
        return pinned(count * row).view(count, row)
    if device.type != "cpu":
        # An accelerator's allocator aligns sufficiently, as files are not read directly into its memory.
        return torch.empty(count, row, dtype=torch.uint8, device=device)
    return torch.frombuffer(pages(count * row), dtype=torch.uint8, count=count * row).view(count, row)


def pinned(size: int) -> torch.Tensor:
    """Allocate pinned memory of `size` bytes, beginning at a page.

    torch rounds sizes of pinned memory up to powers of two, so that up to half of it is unused. So the pages are mapped
    here, as many as needed, and CUDA pins them.
    """
    if torch.version.cuda is None or not size:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # Map shared pages: a fork would duplicate private ones, and the accelerator might use the fork's.
    memory = _Pinned(-1, size)
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=size)
    cudart: Any = torch.cuda.cudart()
    if error := int(cudart.cudaHostRegister(tensor.data_ptr(), size, 0)):
        logger.warning(
            "CUDA refuses to pin %d bytes (error %d); torch's pinned memory is used instead.", size, error
        )
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory.address = tensor.data_ptr()
    return tensor


class _Pinned(mmap.mmap):
    """Memory pages that CUDA has pinned; they are unpinned before they are freed."""

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
    """Return the alignment in bytes of slots for matrices of `size` bytes: `BLOCK` if they are read directly."""
    return BLOCK if size >= LEAST_BYTES_OF_DIRECT else ALIGNMENT


def pages(size: int) -> memoryview:
    """Allocate `size` bytes that begin at a page; the system provides the pages when they are written.

    Large memory has huge pages if possible: drives write to them almost twice as fast.
    """
    # Private memory: forked processes must not see what this one later reads into it.
    memory = mmap.mmap(-1, size + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Systems without huge pages raise an error. Request only whole huge pages, to leave none mostly unused.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, first, size // _HUGE_PAGE * _HUGE_PAGE)
    return memoryview(memory)[first : first + size]


def open_direct(path: str) -> int | None:
    """Open a file for reads that bypass the page cache; return None if system or file system do not support them."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, BLOCK) as memory:
            os.preadv(descriptor, [memory], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
