"""Cases of `from_pretrained`: time and peak memory of loading a sharded checkpoint, in a process for each contestant.

On a CPU, transformers memory-maps the files and reads a weight when it is first used. So each weight is summed once,
and two times are measured: until `from_pretrained` returns, and until the sums are done.

Peak memory is the process's high-water mark above its memory after the imports and a first small load. Mapped pages of
the checkpoint's files count, although the system could reclaim them; the sampled high-water mark of anonymous memory
is reported beside it. The files are in the page cache for all contestants. Each process loads a few times: time is
measured for every load, memory for the first.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from transformers import Llama4ForCausalLM

import llamoe

from . import AGAIN, OURS, REFERENCE
from .harness import ROUNDS, Budget, Cases, Tolerance, quartiles
from .shapes import Setting, Shape
from .shared_weights import text_config

CLASSES = {REFERENCE: Llama4ForCausalLM, OURS: llamoe.LlamoeForCausalLM, AGAIN: Llama4ForCausalLM}
LOADS = 9
"""Loads in a process, since its start takes longer than a load. Memory is that of the first."""
SMALL = Shape(64, 32, 2, 2, 1, 32, 64)
SAMPLED_EVERY = 2e-3


def loading(setting: Setting, shape: Shape, layers: int, shard_size: str, dense: bool = False) -> Cases:
    """Load a checkpoint that transformers saved, with a mixture in every layer or in none."""
    with tempfile.TemporaryDirectory() as name:
        folder, small = Path(name) / "checkpoint", Path(name) / "small"
        save(setting, shape, layers, folder, shard_size, dense)
        save(setting, SMALL, 1, small, shard_size)
        yield lambda budget: _measure(setting, folder, small, shard_size, budget)


def _measure(setting: Setting, folder: Path, small: Path, shard_size: str, budget: Budget) -> dict:
    """Run the processes in turn for the number of rounds asked for, however long they take."""
    shards = list(folder.glob("*.safetensors"))
    nbytes = 0
    for path in shards:
        # Reads the file into the page cache.
        nbytes += len(path.read_bytes())
    runs: dict[str, list[dict]] = {who: [] for who in CLASSES}
    for round_ in range(ROUNDS if budget.least is None else budget.least):
        for who in list(CLASSES)[:: 1 if round_ % 2 == 0 else -1]:
            runs[who].append(load_in_process(who, folder, small, setting))
    checksums = {who: runs[who][0]["checksum"] for who in CLASSES}
    failures = [f"the loaded weights differ: {checksums}"] if len(set(checksums.values())) > 1 else []
    rows = {}
    for who, its in runs.items():
        seconds = [one for run in its for one in run["seconds"]]
        returned = [one for run in its for one in run["returned_seconds"]]
        rows[who] = {
            "seconds": seconds,
            "median": statistics.median(seconds),
            "quartiles": quartiles(seconds),
            "returned_seconds": returned,
            "returned": statistics.median(returned),
            "peak_bytes": max(run["peak_bytes"] for run in its),
            "anonymous_bytes": max(run["anonymous_bytes"] for run in its),
            "device_bytes": max(run["device_bytes"] for run in its),
        }
    for row in rows.values():
        ratios = [a / b for a, b in zip(rows[REFERENCE]["seconds"], row["seconds"], strict=True)]
        row["ratio"] = statistics.median(ratios)
        row["ratio_quartiles"] = quartiles(ratios)
        returns = zip(rows[REFERENCE]["returned_seconds"], row["returned_seconds"], strict=True)
        row["returned_ratio"] = statistics.median(a / b for a, b in returns)
    return {
        "case": f"{nbytes / 1e6:.3g} MB in {len(shards)} shards of {shard_size}",
        "phase": "loading",
        "nbytes": nbytes,
        "clock": "wall clock",
        "contestants": rows,
        "tolerance": vars(Tolerance(0, 0, "the same weights")),
        "failures": failures,
    }


def save(
    setting: Setting, shape: Shape, layers: int, folder: Path, shard_size: str, dense: bool = False
) -> None:
    """Save a checkpoint in shards with transformers."""
    config = text_config(shape, layers, **({"moe_layers": []} if dense else {}))
    with torch.device(setting.device):
        model = Llama4ForCausalLM._from_config(config, dtype=setting.dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)


def load_in_process(who: str, folder: Path, small: Path, setting: Setting) -> dict:
    """Run `child` in a new process."""
    words = [who, str(folder), str(small), str(setting.device), str(torch.get_num_threads())]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loading", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"loading {who} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child(who: str, folder: str, small: str, device: str, threads: str) -> dict:
    """Load and read in this process; return seconds, bytes above the base, and a sum that identifies the weights."""
    torch.set_num_threads(int(threads))
    options = {"dtype": "auto"} | ({} if device == "cpu" else {"device_map": {"": device}})
    # Pays for imports, threads and the device's context.
    CLASSES[who].from_pretrained(small, **options)
    base, anonymous = status("VmRSS"), status("RssAnon")
    watched = Watch()
    seconds, returned, bytes_ = [], [], {}
    for number in range(LOADS):
        # Frees the previous model.
        model = None
        begun = time.perf_counter()
        model = CLASSES[who].from_pretrained(folder, **options)
        returned.append(time.perf_counter() - begun)
        for parameter in model.parameters():
            parameter.detach().sum().item()
        seconds.append(time.perf_counter() - begun)
        if number == 0:
            highest, peak = watched.stop(), status("VmHWM")
            bytes_ = {
                "peak_bytes": max(peak - base, 0),
                "anonymous_bytes": max(highest - anonymous, 0),
                "device_bytes": 0 if device == "cpu" else torch.cuda.max_memory_allocated(),
            }
    return {
        "seconds": seconds,
        "returned_seconds": returned,
        **bytes_,
        "checksum": sum(p.double().abs().sum().item() for p in model.parameters()),
    }


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


if __name__ == "__main__":
    print(json.dumps(child(*sys.argv[1:])))
