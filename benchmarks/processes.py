"""Measures in a new process: what a function there returns, its memory, its reads, and what the page cache holds."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch

SAMPLED_EVERY = 2e-3


def in_process(module: str, what: str, **given) -> dict:
    """Call a function of a module of this package in a new process.

    Args:
        module: its name.
        what: the function, which takes and returns what JSON can hold.
        **given: its arguments.

    Returns:
        what it returns; `{"skipped": reason}` if it fails.
    """
    words = [module, what, json.dumps(given), str(torch.get_num_threads())]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.processes", *words],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        return {"skipped": (done.stderr.strip().splitlines() or ["it ended"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


class Watch:
    """Samples the process's anonymous memory every two milliseconds and keeps the largest."""

    def __init__(self):
        self.highest = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopped.wait(SAMPLED_EVERY):
            self.highest = max(self.highest, status("RssAnon"))

    def stop(self) -> int:
        """Stop sampling; return the largest sample, in bytes."""
        self._stopped.set()
        self._thread.join()
        return max(self.highest, status("RssAnon"))


def status(field: str) -> int:
    """A field of this process's status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{field}:")[2].split()[0])


def bytes_read() -> int:
    """Bytes that the kernel read from drives for this process."""
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0])


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache, as far as nobody maps them."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Pages that were just written can be dropped once they are on the drive.
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    import importlib

    module, what, given, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    print(json.dumps(getattr(importlib.import_module(f"benchmarks.{module}"), what)(**json.loads(given))))
