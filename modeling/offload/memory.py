"""Reads past the page cache, and memory that a drive writes to, in whole blocks, without a copy in between.

A matrix begins at the same byte of a block in its slot as in its file. So blocks of the file are read straight into
the slot, with what stands around the matrix. The matrix also keeps the alignment that a memory map of the file would
give it; with another one products may differ in their last bits.
"""

import mmap
import os
from contextlib import suppress

import torch

BLOCK = 4096
"""Direct reads begin and end at multiples of this, in the file and in memory."""
ALIGNMENT = 64
"""Bytes to which memory of torch's own is aligned."""
LEAST_BYTES_OF_DIRECT = 1 << 20
"""Smaller matrices would be read with much around them."""
_HUGE_PAGE = 2 << 20


def slots_of(count: int, size: int, device: torch.device, is_pinned: bool) -> torch.Tensor:
    """Memory for so many matrices of `size` bytes, `[count, bytes]`, each with room for the rest of its blocks."""
    unit = unit_of(size)
    row = -(-size // unit) * unit + unit
    if device.type != "cpu" or is_pinned:
        memory = torch.empty(count * row + unit, dtype=torch.uint8, device=device, pin_memory=is_pinned)
        first = -memory.data_ptr() % unit
        return memory[first : first + count * row].view(count, row)
    return torch.frombuffer(pages(count * row), dtype=torch.uint8, count=count * row).view(count, row)


def unit_of(size: int) -> int:
    """Alignment in bytes of slots for matrices of so many bytes: `BLOCK` from `LEAST_BYTES_OF_DIRECT` on."""
    return BLOCK if size >= LEAST_BYTES_OF_DIRECT else ALIGNMENT


def pages(size: int) -> memoryview:
    """Memory that begins at a page, and takes pages only where it is written.

    Drives write to huge pages almost twice as fast, since they name fewer of them.
    """
    # A forked process has its own: it may put other matrices into the slots.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    if size < _HUGE_PAGE:
        return memoryview(mmap.mmap(-1, max(size, 1), **private))
    memory = mmap.mmap(-1, size + _HUGE_PAGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # There are kernels without them.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    first = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE
    return memoryview(memory)[first : first + size]


def open_direct(path: str) -> int | None:
    """A descriptor that reads past the page cache; None where the system or the file system has no such reads."""
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
