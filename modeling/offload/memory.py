"""Memory in which experts lie: pinned for accelerators, and in whole blocks, to which a drive writes without a copy.

A matrix begins at the same byte of a block in its slot as in its file. So blocks of the file are read straight into
the slot, with what stands around the matrix. The matrix also keeps the alignment that a memory map of the file would
give it; with another one products may differ in their last bits.
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
# A forked process must not multiply by what this one reads into a slot later.
_PRIVATE: Any = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def slots_of(count: int, size: int, device: torch.device, is_pinned: bool) -> torch.Tensor:
    """Allocate slots for matrices of `size` bytes, `[count, bytes]`, each padded to whole blocks."""
    unit = unit_of(size)
    row = -(-size // unit) * unit + unit
    if is_pinned:
        return pinned(count * row).view(count, row)
    if device.type != "cpu":
        # Its allocator aligns memory to more than a kernel needs, and no file is read to it.
        return torch.empty(count, row, dtype=torch.uint8, device=device)
    return torch.frombuffer(pages(count * row), dtype=torch.uint8, count=count * row).view(count, row)


def pinned(size: int) -> torch.Tensor:
    """Return so many bytes in RAM from which an accelerator copies by itself, beginning at a page.

    torch's own pinned memory has sizes of powers of two, up to twice what was asked. Here CUDA pins pages that are
    there already, as many as needed.
    """
    if torch.version.cuda is None or not size:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # Shared: of a private page a fork makes two, and the accelerator would go on with either.
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
    """Pages that CUDA knows, and unpins before they go."""

    address: int | None = None

    def __del__(self):
        if self.address is not None:
            with suppress(Exception):
                # Copies may be on their way.
                torch.cuda.synchronize()
            with suppress(Exception):
                cudart: Any = torch.cuda.cudart()
                cudart.cudaHostUnregister(self.address)


def unit_of(size: int) -> int:
    """Return the alignment of slots in bytes: `BLOCK` for matrices from `LEAST_BYTES_OF_DIRECT` on."""
    return BLOCK if size >= LEAST_BYTES_OF_DIRECT else ALIGNMENT


def pages(size: int) -> memoryview:
    """Allocate memory that begins at a page; the system gives it pages when they are written.

    Drives write to huge pages almost twice as fast, since they name fewer of them.
    """
    if size < _HUGE_PAGE:
        return memoryview(mmap.mmap(-1, max(size, 1), **_PRIVATE))
    memory = mmap.mmap(-1, size + _HUGE_PAGE, **_PRIVATE)
    first = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Some kernels lack huge pages. Only whole ones are advised: the rest of the last would be wasted.
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
