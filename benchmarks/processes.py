"""Run a function in a new process, read a process's memory and reads, drop cached files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def in_process(module: str, what: str, **given) -> dict:
    """Call a function of this package in a new process, with arguments and a result that JSON can express.

    Returns:
        the function's result; `{"failed": reason}` if it fails.
    """
    words = [module, what, json.dumps(given), str(torch.get_num_threads())]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.processes", *words],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["it ended"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def status(field: str) -> int:
    """Return a memory field of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{field}:")[2].split()[0])


def bytes_read() -> int:
    """Return the bytes that the kernel read from drives for this process."""
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0])


def counted(model: Any, name: str) -> int:
    """Sum one of the counts of `experts_statistics` over all layers."""
    return sum(layer[name] for layer in model.experts_statistics().values())


def forget(folder: Path) -> None:
    """Drop the safetensors files of a folder from the page cache, except for pages that a process maps."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Pages can be dropped only after they are written to the drive.
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    import importlib

    module, what, given, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    print(json.dumps(getattr(importlib.import_module(f"benchmarks.{module}"), what)(**json.loads(given))))
