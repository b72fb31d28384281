"""Peak memory of one pass: what is held at most above what was held before it.

On a CPU it is the running sum of all that torch's allocator gives out and takes back, as the profiler records it:
also the scratch space inside of operators, which a look at tensors alone would miss, and nothing of the allocator's
caches or of files, which a look at the process would count. Memory that a result has from elsewhere (large gradients
of experts) is added. Not seen is what oneDNN and BLAS allocate for themselves.
On CUDA it is the counter of torch's allocator.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """Run once and watch the memory.

    Args:
        run: what to run; what it returns counts as held.
        device: where it works.

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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        result = run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for _, nbytes in sorted(
        changes, key=lambda change: change[0]
    ):  # stable: events of one instant in their order
        held += nbytes
        peak = max(peak, held)
    return result, peak + _bytes_from_elsewhere(result)


def _bytes_from_elsewhere(result: Any) -> int:
    tensors = result if isinstance(result, list) else [result]
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    foreign = {storage.data_ptr(): storage.nbytes() for storage in storages if not storage.resizable()}
    return sum(foreign.values())


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
