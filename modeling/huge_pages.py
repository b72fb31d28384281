"""Large zeros on the host, in memory that the system hands out in huge pages.

The gradient of a stack of experts is as large as the stack, and new in each step. Where few tokens reach each expert,
most of a step on a CPU went into the system's mapping of that memory, page by page of 4 KiB: four times as long as in
pages of 2 MiB, which Linux gives to who asks (https://docs.kernel.org/admin-guide/mm/transhuge.html). torch's allocator
does not ask, unless the environment tells it to. Memory that nobody writes to, here of experts without tokens, is never
mapped at all.
"""

import math
import mmap

import torch

# Bytes; the system's allocator keeps smaller pieces when they are given back, so that they are new only once.
_LEAST = 32 << 20


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Give zeros on the CPU; in huge pages where that pays and the system has them.

    Args:
        *shape: of the tensor.
        dtype: of the tensor.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them: the pages are small ones
    return torch.frombuffer(memory, dtype=dtype).view(shape)
