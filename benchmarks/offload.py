"""Cases of a mixture whose experts are on disk: a token with room for a part of them, and the rate at which they come.

Contestants are processes of their own on the same folder. What the page cache has of it is dropped before each one, and
before each token of those that have no memory but the page cache for experts, so that it does not stand in for memory
which they do not have. Time is wall time, bytes are those that the kernel counts for the process.
"""

import ctypes
import hashlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from unittest import mock

import torch
from accelerate import dispatch_model
from transformers import DynamicCache, PreTrainedModel

import llamoe
from llamoe.modeling.moe import Experts
from llamoe.modeling.offload import reading
from llamoe.modeling.offload.matrix_cache import MatrixCache
from llamoe.modeling.offload.memory import pages

from . import OURS
from .clocks import WallClock
from .harness import IN_BFLOAT16, ROUNDS, Cases, beyond, difference, summarize
from .large_mixtures import LargeMixture, ask, counted, draw_routing, passes_of, simulate
from .processes import Watch, bytes_read, forget, in_process, status

RESIDENT = "in memory"
CACHED = f"{OURS}, page cache"
MAPPED = "mapped, with advice"
ACCELERATE = "accelerate"
DRIVE = "drive"
WITH_PRODUCTS = f"{OURS}, with products"
CONTESTANTS = (RESIDENT, OURS, CACHED, MAPPED, ACCELERATE)
IN_TURN = (OURS, CACHED, MAPPED)
"""Contestants that are close to each other, and so run in every round."""
OTHERS = {CACHED: "page_cache", MAPPED: "mapped", ACCELERATE: "accelerate"}
"""Contestants whose time ours is compared with, and their word in the results."""
LAWS = {"zipf": "Zipf", "even": "even"}
REQUEST = 4 << 20
READERS = 8
TINY = LargeMixture(64, 64, 2, 2)


def offload(
    mixture: LargeMixture, shares: tuple[float, ...] = (0.25, 0.5), warm: int = 96, tokens: int = 64
) -> Cases:
    """Decode one row with room for shares of the experts, `tokens` behind `warm` that fill it; then read them all."""
    with tempfile.TemporaryDirectory() as name:
        folder, small = Path(name) / "mixture", Path(name) / "small"
        for shape, place in ((mixture, folder), (TINY, small)):
            place.mkdir()
            shape.save(place)
        given = {"folder": str(folder), "small": str(small), "warm": warm, "tokens": tokens}
        for law in LAWS:
            for share in shares:
                yield lambda budget, law=law, share=share: _tokens(
                    mixture, law, share, given, budget.least or ROUNDS
                )
        yield lambda budget: _rate(mixture, folder, budget.least or ROUNDS)


def _tokens(mixture: LargeMixture, law: str, share: float, given: dict, rounds: int) -> dict:
    """The case of one share and one law. Of each token the fastest round counts: there is other load in wall time."""
    room = int(share * mixture.all_bytes)
    found: dict[str, list[dict]] = {who: [] for who in CONTESTANTS}
    for number in range(rounds):
        for who in CONTESTANTS[:: 1 if number % 2 == 0 else -1]:
            if number == 0 or who in IN_TURN:
                found[who].append(in_process("offload", "decode", who=who, law=law, budget=room, **given))
    rows = {who: _joined(its) for who, its in found.items()}
    details = {who: row.pop("details", {}) for who, row in rows.items()}
    expected, failures = details[RESIDENT], []
    for who, its in details.items():
        if its and expected and who != ACCELERATE and its["digest"] != expected["digest"]:
            failures.append(f"{who} computes other bits than {RESIDENT}")
        elif its and expected:
            # Modules that accelerate has hooked are multiplied by other kernels, which round otherwise.
            rows[who]["difference"] = difference(
                [torch.tensor(its["first"])], [torch.tensor(expected["first"])]
            )
            if problem := beyond(rows[who]["difference"], IN_BFLOAT16):
                failures.append(f"{who} differs from {RESIDENT}: {problem}")
    facts = {"phase": "decode", "routing": law, "share": share, "budget_bytes": room}
    facts["expert_bytes"] = mixture.expert_bytes
    ours = rows[OURS]
    if expected and "seconds" in ours:
        passes = [[(layer, expert) for layer, expert in asked] for asked in expected["passes"]]
        counts = simulate(passes, room // mixture.expert_bytes)[given["warm"] :]
        hits, misses = (sum(count[index] for count in counts) for index in (0, 1))
        facts["simulated_hit_rate"] = hits / (hits + misses)
        facts["hit_rate_error"] = abs(ours["hit_rate"] - facts["simulated_hit_rate"])
    if "seconds" in ours:
        facts["megabytes_beyond"] = (ours["peak_bytes"] - room - mixture.expert_bytes) / 1e6
        if ours["missed"]:
            facts["read_over_missed"] = max(ours["read_bytes"], ours["counted_bytes"]) / (
                ours["missed"] * mixture.expert_bytes
            )
        facts |= {
            f"over_{word}": sum(ours["seconds"]) / sum(rows[who]["seconds"])
            for who, word in OTHERS.items()
            if "seconds" in rows[who]
        }
    name = f"a token, {LAWS[law]} routing, room for {share:.0%} of the experts"
    return _finished(name, rows, failures, RESIDENT, **facts)


def _joined(runs: list[dict]) -> dict:
    """Runs of one contestant: the fastest time of each token, the largest peak."""
    for run in runs:
        if "skipped" in run:
            return run
    seconds = [min(its) for its in zip(*(run["seconds"] for run in runs), strict=True)]
    peaks = {name: max(run[name] for run in runs) for name in ("peak_bytes", "anonymous_bytes")}
    return {**runs[0], **peaks, "seconds": seconds}


def _rate(mixture: LargeMixture, folder: Path, rounds: int) -> dict:
    """The case of passes that need every expert, beside large reads of the same files, in turns in one process."""
    found = in_process(
        "offload", "rate", folder=str(folder), budget=mixture.all_bytes // 4, rounds=4 * rounds
    )
    rows = found if "skipped" not in found else {OURS: found}
    name = f"reading {mixture.all_bytes / 1e9:.2f} GB of experts"
    result = _finished(name, rows, [], DRIVE, phase="rate", nbytes=mixture.all_bytes)
    if "seconds" in rows[OURS]:
        # The fastest rounds: with other load a drive's rate falls by half, and a median would judge that.
        result["share_of_drive"] = min(rows[DRIVE]["seconds"]) / min(rows[OURS]["seconds"])
    return result


def _finished(name: str, rows: dict[str, dict], failures: list[str], reference: str, **facts) -> dict:
    failures += [
        f"{who} failed: {rows[who]['skipped']}" for who in (OURS, CACHED) if "skipped" in rows.get(who, {})
    ]
    result = {"case": name, **facts, "clock": WallClock.unit, "contestants": rows}
    summarize(result, reference)
    return {**result, "tolerance": vars(IN_BFLOAT16), "failures": failures}


class Advised:
    """Experts that stay mapped as `from_pretrained` left them: the kernel is told which come, and which go.

    The rule is that of the store; what goes leaves the page cache, too.
    """

    WILLNEED, PAGEOUT = mmap.MADV_WILLNEED, 21

    def __init__(self, model: PreTrainedModel, budget: int):
        self._libc = ctypes.CDLL(None, use_errno=True)
        # Of each slot, which here is no memory.
        self._matrices: dict[int, list[torch.Tensor]] = {}
        self.hits = self.misses = 0
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        for layer, experts in enumerate(layers):
            stacks = experts.gate_up_proj.data, experts.down_proj.data
            self._cache = MatrixCache(budget // sum(stack[0].nbytes for stack in stacks))
            experts.register_forward_pre_hook(
                lambda _, args, layer=layer, stacks=stacks: self._before(layer, stacks, args[1])
            )

    def _before(self, layer: int, stacks: tuple[torch.Tensor, ...], chosen: torch.Tensor) -> None:
        for expert in chosen.unique().tolist():
            slot, is_hit = ask(self._cache, (layer, expert))
            self.hits += is_hit
            self.misses += not is_hit
            if not is_hit:
                self._advise(self._matrices.get(slot, []), self.PAGEOUT)
                self._matrices[slot] = [stack[expert] for stack in stacks]
                self._advise(self._matrices[slot], self.WILLNEED)

    def _advise(self, matrices: list[torch.Tensor], advice: int) -> None:
        for matrix in matrices:
            # Whole pages: those that two matrices share stay.
            inward = mmap.PAGESIZE - 1 if advice == self.PAGEOUT else 0
            first = (matrix.data_ptr() + inward) // mmap.PAGESIZE * mmap.PAGESIZE
            size = matrix.data_ptr() + matrix.nbytes - first
            if advice == self.PAGEOUT:
                size = max(0, size) // mmap.PAGESIZE * mmap.PAGESIZE
            if self._libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice):
                raise OSError(ctypes.get_errno(), "madvise")


def load(
    who: str, folder: Path, budget: int
) -> tuple[PreTrainedModel, Callable[[], tuple[int, int, int]] | None]:
    """The model of a contestant, and what tells its hits, misses and bytes, where it has memory for experts."""
    load_model = llamoe.LlamoeForCausalLM.from_pretrained
    if who in (OURS, CACHED):
        # Past the system's page cache, or through it.
        open_file = reading.open_direct if who == OURS else lambda path: None
        with mock.patch.object(reading, "open_direct", open_file):
            model = load_model(folder, device_map={"experts": "disk"}, experts_memory=budget)

        def counts() -> tuple[int, int, int]:
            return tuple(counted(model, name) for name in ("hits", "misses", "bytes_read"))

        return model.eval(), counts
    model = load_model(folder).eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    if who == RESIDENT:
        for experts in layers.values():
            for parameter in experts.parameters():
                parameter.data = parameter.data.clone()
    elif who == MAPPED:
        advised = Advised(model, budget)
        return model, lambda: (advised.hits, advised.misses, 0)
    elif who == ACCELERATE:
        files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        index = {
            name: {"safetensors_file": str(folder / file), "weight_name": name, "dtype": "bfloat16"}
            for name, file in files.items()
            if ".experts." in name
        }
        device_map = {"": "cpu", **dict.fromkeys(layers, "disk")}
        dispatch_model(model, device_map, main_device="cpu", offload_index=index, force_hooks=True)
    return model, None


@torch.no_grad()
def decode(who: str, folder: str, small: str, law: str, budget: int, warm: int, tokens: int) -> dict:
    """Decode drawn tokens in this process; seconds of each, bytes, hits, and the peak above all else."""
    # Pays for imports and threads.
    model, _ = load(RESIDENT, Path(small), 0)
    model(input_ids=torch.ones(1, 1, dtype=torch.long))
    del model
    base, anonymous = status("VmRSS"), status("RssAnon")
    watched = Watch()
    forget(Path(folder))
    model, counts = load(who, Path(folder), budget)
    rest = sum(tensor.nbytes for name, tensor in model.named_parameters() if ".experts." not in name)
    draw_routing(model, law)
    ids = torch.randint(
        3, model.config.vocab_size, (warm + tokens, 1, 1), generator=torch.Generator().manual_seed(2)
    )
    cache, seconds, read = DynamicCache(config=model.config), [], []
    digest, first = hashlib.sha256(), []
    before = 0, 0, 0
    with llamoe.trace_experts(model) as trace:
        for number, token in enumerate(ids):
            if who in (CACHED, ACCELERATE):
                forget(Path(folder))
            if number == warm and counts:
                before = counts()
            begun, at = time.perf_counter(), bytes_read()
            out = model(input_ids=token, past_key_values=cache).logits
            if number >= warm:
                seconds.append(time.perf_counter() - begun)
                read.append(bytes_read() - at)
            digest.update(out.float().numpy().tobytes())
            first = first or out.float().flatten().tolist()
    row = {
        "seconds": seconds,
        "read_bytes": sum(read) / tokens,
        "peak_bytes": status("VmHWM") - base - rest,
        "anonymous_bytes": watched.stop() - anonymous,
        "details": {"digest": digest.hexdigest(), "first": first, "passes": passes_of(trace.experts())},
    }
    if counts:
        hits, misses, counted = (now - then for now, then in zip(counts(), before, strict=True))
        row |= {
            "hit_rate": hits / (hits + misses),
            "missed": misses / tokens,
            "counted_bytes": counted / tokens,
        }
    return row


@torch.no_grad()
def rate(folder: str, budget: int, rounds: int) -> dict:
    """Seconds in which every expert comes, without products and in a pass, and of large reads of as many bytes."""
    model, _ = load(OURS, Path(folder), budget)
    draw_routing(model, "in turn")
    num_experts = model.config.num_local_experts
    ids = torch.arange(num_experts)[None] % (model.config.vocab_size - 3) + 3
    paths = sorted(Path(folder).glob("*.safetensors"))

    def whole_pass() -> int:
        model.experts_statistics(reset=True)
        model(input_ids=ids, use_cache=False)
        return counted(model, "bytes_read")

    def all_matrices() -> int:
        model.experts_statistics(reset=True)
        for store in model._stores():
            for layer in store.layers:
                for stack in ("gate_up_proj", "down_proj"):
                    for _ in store.walk(layer, stack, dict.fromkeys(range(num_experts), ((0, 1),))):
                        pass
        return counted(model, "bytes_read")

    nbytes = whole_pass()
    drive = LargeReads(paths)
    drive.read()
    runs = {DRIVE: drive.read, OURS: all_matrices, WITH_PRODUCTS: whole_pass}
    rows: dict[str, dict] = {who: {"seconds": [], "read_bytes": nbytes} for who in runs}
    for number in range(rounds):
        for who in list(runs)[:: 1 if number % 2 == 0 else -1]:
            forget(Path(folder))
            begun, at = time.perf_counter(), bytes_read()
            got = runs[who]()
            rows[who]["seconds"].append((time.perf_counter() - begun) * nbytes / got)
            rows[who]["read_bytes"] = bytes_read() - at
    return rows


class LargeReads:
    """Direct reads of files in large requests by several threads, which are there with their buffers before."""

    def __init__(self, paths: list[Path]):
        self._pool = ThreadPoolExecutor(READERS)
        self._buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(READERS):
            # Huge pages, which a drive fills faster.
            buffer = pages(REQUEST)
            # The system gives memory when it is first written.
            buffer[:] = bytes(REQUEST)
            self._buffers.put(buffer)
        self._requests = []
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            self._requests += [(descriptor, at) for at in range(0, path.stat().st_size, REQUEST)]

    def read(self) -> int:
        """Read all of the files once; bytes that came."""
        return sum(self._pool.map(self._read, self._requests))

    def _read(self, request: tuple[int, int]) -> int:
        descriptor, at = request
        buffer = self._buffers.get()
        try:
            return os.preadv(descriptor, [buffer], at)
        finally:
            self._buffers.put(buffer)
