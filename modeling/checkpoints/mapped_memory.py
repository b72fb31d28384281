"""Memory that is given back to the system when that is asked for: pages of mapped files, and what was freed."""

import ctypes
import mmap
import sys
from bisect import bisect_right
from typing import NamedTuple

import torch

_MADV_DONTNEED = 4
# Fewer bytes are not worth a look at what is mapped, which takes a millisecond.
_WORTH_A_LOOK = 1 << 18


def forget_pages(tensor: torch.Tensor, maps: "MappedFiles | None" = None) -> None:
    """Drop the pages of a tensor that was read from a mapped safetensors file; the file keeps its numbers.

    Loading a checkpoint otherwise leaves all of it in this process' resident memory until the system needs the memory.
    Does nothing for other tensors, and on other systems than Linux.

    Args:
        tensor: of any device.
        maps: what is mapped, where that is known already.
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
    if end - start >= _WORTH_A_LOOK and (maps or MappedFiles())._at(start, end) is not None:
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


class MappedFiles:
    """The safetensors files that this process has mapped now; none on other systems than Linux."""

    def __init__(self):
        self._lows: list[int] = []
        self._maps: list[tuple[int, MappedFile]] = []
        if sys.platform != "linux":
            return
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.endswith(".safetensors\n"):
                    addresses, _, offset, _, inode, path = line[:-1].split(maxsplit=5)
                    low, high = (int(part, 16) for part in addresses.split("-"))
                    self._lows.append(low)
                    self._maps.append((high, MappedFile(path, int(offset, 16), int(inode))))

    def file_of(self, tensor: torch.Tensor) -> MappedFile | None:
        """The file that a tensor is a map of, as a whole; None for other tensors."""
        if not self._lows or tensor.device.type != "cpu" or not tensor.nbytes:
            return None
        first = tensor.data_ptr()
        return self._at(first, first + tensor.nbytes)

    def _at(self, start: int, end: int) -> MappedFile | None:
        number = bisect_right(self._lows, start) - 1
        if number < 0 or self._maps[number][0] < end:
            return None
        file = self._maps[number][1]
        return file._replace(begin=file.begin + start - self._lows[number])


def return_freed_memory() -> None:
    """Give the system what was freed; glibc keeps it otherwise, in pieces between what lives on.

    Does nothing where the C library is another one.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
