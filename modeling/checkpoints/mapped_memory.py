"""Memory that is given back to the system when that is asked for: pages of mapped files, and what was freed."""

import ctypes
import mmap
import sys
from typing import NamedTuple

import torch

_MADV_DONTNEED = 4


def forget_pages(tensor: torch.Tensor) -> None:
    """Drop the pages of a tensor that was read from a mapped safetensors file; the file keeps its numbers.

    Loading a checkpoint otherwise leaves all of it in this process' resident memory until the system needs the memory.
    Does nothing for other tensors, and on other systems than Linux.
    """
    if (
        sys.platform != "linux"
        or not tensor.is_cpu
        or not tensor.nbytes
        or type(tensor).__name__ == "DTensor"
    ):
        return
    storage = tensor.untyped_storage()
    first = tensor.data_ptr()
    last = (
        first
        + (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.itemsize
    )
    assert storage.data_ptr() <= first <= last <= storage.data_ptr() + storage.nbytes()
    start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    # Memory that is not backed by a file would lose its content.
    if start < end and _file_at(start, end) is not None:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


class MappedFile(NamedTuple):
    """The file that memory is a map of.

    Attributes:
        path: as the system knows it.
        begin: the first byte's number in the file.
        inode: of the file, which may have another path by now.
    """

    path: str
    begin: int
    inode: int


def mapped_file(tensor: torch.Tensor) -> MappedFile | None:
    """The safetensors file that a tensor is a map of; None for other tensors, and on other systems than Linux."""
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.nbytes:
        return None
    return _file_at(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def _file_at(start: int, end: int) -> MappedFile | None:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, _, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
            low, high = (int(part, 16) for part in addresses.split("-"))
            if low <= start and end <= high:
                is_file = bool(path) and path[0].endswith(".safetensors")
                return MappedFile(path[0], int(offset, 16) + start - low, int(inode)) if is_file else None
    return None


def return_freed_memory() -> None:
    """Give the system what was freed; glibc keeps it otherwise, in pieces between what lives on.

    Does nothing where the C library is another one.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
