"""Cases of `from_pretrained`: time and peak memory of loading a sharded checkpoint, in a process for each contestant.

On a CPU, transformers memory-maps the files and reads a weight when it is first used. So each weight is summed once,
and two times are measured: until `from_pretrained` returns, and until the sums are done.

Peak memory is the process's high-water mark above its memory after the imports and a first small load. Mapped pages of
the checkpoint's files count, although the system could reclaim them; the sampled high-water mark of anonymous memory
is reported beside it. The files are in the page cache for all contestants. Each process loads a few times: time is
measured for every load, memory for the first.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import Llama4ForCausalLM

import llamoe

from . import AGAIN, OURS, REFERENCE
from .harness import ROUNDS, Budget, Cases, Tolerance, summarize
from .processes import Watch, in_process, status
from .shapes import Setting, Shape
from .shared_weights import text_config

CLASSES = {REFERENCE: Llama4ForCausalLM, OURS: llamoe.LlamoeForCausalLM, AGAIN: Llama4ForCausalLM}
LOADS = 9
"""Loads in a process, since its start takes longer than a load. Memory is that of the first."""
SMALL = Shape(64, 32, 2, 2, 1, 32, 64)


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
    # Reads the files into the page cache.
    nbytes = sum(len(path.read_bytes()) for path in shards)
    runs: dict[str, list[dict]] = {who: [] for who in CLASSES}
    for round_ in range(ROUNDS if budget.least is None else budget.least):
        for who in list(CLASSES)[:: 1 if round_ % 2 == 0 else -1]:
            given = dict(who=who, folder=str(folder), small=str(small), device=str(setting.device))
            runs[who].append(in_process("loading", "load", **given))
    for who, its in runs.items():
        if broken := [run["skipped"] for run in its if "skipped" in run]:
            raise RuntimeError(f"loading {who} failed: {broken[0]}")
    checksums = {who: its[0]["checksum"] for who, its in runs.items()}
    rows: dict[str, dict] = {}
    for who, its in runs.items():
        rows[who] = {
            name: [one for run in its for one in run[name]] for name in ("seconds", "returned_seconds")
        }
        rows[who]["returned"] = statistics.median(rows[who]["returned_seconds"])
        rows[who] |= {name: max(run[name] for run in its) for name in its[0] if name.endswith("bytes")}
    result = {
        "case": f"{nbytes / 1e6:.3g} MB in {len(shards)} shards of {shard_size}",
        "phase": "loading",
        "nbytes": nbytes,
        "clock": "wall clock",
        "contestants": rows,
        "tolerance": vars(Tolerance(0, 0, "the same weights")),
        "failures": [f"the loaded weights differ: {checksums}"] if len(set(checksums.values())) > 1 else [],
    }
    summarize(result, REFERENCE)
    for row in rows.values():
        returns = zip(rows[REFERENCE]["returned_seconds"], row["returned_seconds"], strict=True)
        row["returned_ratio"] = statistics.median(a / b for a, b in returns)
    return result


def save(
    setting: Setting, shape: Shape, layers: int, folder: Path, shard_size: str, dense: bool = False
) -> None:
    """Save a checkpoint in shards with transformers."""
    config = text_config(shape, layers, **({"moe_layers": []} if dense else {}))
    with torch.device(setting.device):
        model = Llama4ForCausalLM._from_config(config, dtype=setting.dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)


def load(who: str, folder: str, small: str, device: str) -> dict:
    """Load and read in this process; return seconds, bytes above the base, and a sum that identifies the weights."""
    options = {"dtype": "auto"} | ({} if device == "cpu" else {"device_map": {"": device}})
    # Pays for imports, threads and the device's context.
    CLASSES[who].from_pretrained(small, **options)
    base, anonymous = status("VmRSS"), status("RssAnon")
    watched = Watch()
    found: dict = {"seconds": [], "returned_seconds": []}
    for number in range(LOADS):
        # Frees the previous model.
        model = None
        begun = time.perf_counter()
        model = CLASSES[who].from_pretrained(folder, **options)
        found["returned_seconds"].append(time.perf_counter() - begun)
        for parameter in model.parameters():
            parameter.detach().sum().item()
        found["seconds"].append(time.perf_counter() - begun)
        if number == 0:
            highest, peak = watched.stop(), status("VmHWM")
            found |= {"peak_bytes": max(peak - base, 0), "anonymous_bytes": max(highest - anonymous, 0)}
            found["device_bytes"] = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
    found["checksum"] = sum(p.double().abs().sum().item() for p in model.parameters())
    return found
