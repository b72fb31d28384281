"""Memory that is given back to the system when that is asked for: pages of mapped files, and what was freed."""

import ctypes
import mmap
import sys

import torch

_MADV_DONTNEED = 4
# Fewer bytes are not worth a look at what is mapped, which takes a millisecond.
_WORTH_A_LOOK = 1 << 18


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
    if end - start >= _WORTH_A_LOOK and _is_mapped(start, end):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _is_mapped(start: int, end: int) -> bool:
    """Whether a range of addresses is within one safetensors file that this process has mapped."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith(".safetensors\n"):
                low, high = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
                if low <= start and end <= high:
                    return True
    return False


def return_freed_memory() -> None:
    """Give the system what was freed; glibc keeps it otherwise, in pieces between what lives on.

    Does nothing where the C library is another one.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
