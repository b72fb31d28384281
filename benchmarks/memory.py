"""Peak memory of one pass: the largest amount held above the amount before the pass.

On a CPU it is the running sum of allocations and frees of torch's allocator, as the profiler records them. It includes
scratch space inside operators, which a look at tensors alone would miss. It excludes the allocator's caches and files,
which the process's memory would include. A result's memory from elsewhere (large gradients of experts) is added.
Allocations inside oneDNN and BLAS are not seen. On CUDA it is the counter of torch's allocator.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """Run once and measure the peak memory.

    Args:
        run: function to run; its result counts as held.
        device: device that it uses.

    Returns:
        its result, and the peak in bytes above what was held before.
    """
    return _peak_on_cuda(run, device) if device.type == "cuda" else _peak_on_cpu(run)


def _peak_on_cuda(run: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    torch.cuda.synchronize(device)
    base = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - base


def _peak_on_cpu(run: Callable[[], Any]) -> tuple[Any, int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    # As they were recorded: the profiler's own tables of operators take longer than most passes.
    events = recorded.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = peak = 0
    # A stable sort: events of one instant keep their order.
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        held += nbytes
        peak = max(peak, held)
    return result, peak + _bytes_from_elsewhere(result)


def _bytes_from_elsewhere(result: Any) -> int:
    tensors = result if isinstance(result, list) else [result]
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    foreign = {storage.data_ptr(): storage.nbytes() for storage in storages if not storage.resizable()}
    return sum(foreign.values())


def available_bytes(device: torch.device) -> int:
    """Memory that is still free, in bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
