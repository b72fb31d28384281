"""Measure the time of a token of a mixture whose experts are on disk, with memory for a part of them.

Each contestant is a process on the same folder: one with all experts in memory, ours with offloaded experts, and
accelerate's offloading of the same experts, which keeps none in memory. The folder's files are dropped from the page
cache before each process, and for accelerate before each token. Time is wall time; bytes are those that the kernel read
for the process. Experts are drawn by Zipf's law, since random routers would choose all equally often.
"""

import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import dispatch_model
from safetensors.torch import save_file
from transformers import DynamicCache, PreTrainedModel

import llamoe
from llamoe.modeling.moe import Experts, Router

from .harness import BFLOAT16, OURS, difference
from .processes import bytes_read, counted, forget, in_process, status

RESIDENT, ACCELERATE = "in memory", "accelerate"
CONTESTANTS = (RESIDENT, OURS, ACCELERATE)
# Exponent of Zipf's law: the expert of rank r is chosen in proportion to r ** -ZIPF.
ZIPF = 1.2


@dataclass(frozen=True)
class LargeMixture:
    """The sizes of a Llama-4-style text model in bfloat16 with a top-1 mixture in every layer.

    Attributes:
        hidden: hidden size.
        expert: intermediate size of an expert, also of the shared one.
        layers: number of layers.
        experts: number of experts in each layer.
        vocabulary: number of rows of embedding and head.
    """

    hidden: int
    expert: int
    layers: int
    experts: int
    vocabulary: int = 4096

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one expert."""
        return 3 * self.hidden * self.expert * 2

    def config(self) -> llamoe.LlamoeTextConfig:
        """Return the configuration of the model."""
        return llamoe.LlamoeTextConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.expert,
            intermediate_size_mlp=2 * self.expert, num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64), num_key_value_heads=max(1, self.hidden // 256), head_dim=64,
            num_local_experts=self.experts, num_experts_per_tok=1, moe_layers=list(range(self.layers)),
            pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype="bfloat16", architectures=["LlamoeForCausalLM"],
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write a checkpoint of random weights, one shard for each layer, with one layer in memory at a time."""
        config = self.config()
        config.save_pretrained(folder)
        with torch.device("meta"):
            weights = llamoe.LlamoeForCausalLM(config).state_dict()
        shards: dict[str, list[str]] = {}
        for name in weights:
            shards.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
        generator = torch.Generator().manual_seed(0)
        files = {}
        for number, names in enumerate(shards.values(), start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = {name: torch.ones(weights[name].shape, dtype=torch.bfloat16) for name in names}
            for name, tensor in tensors.items():
                if "norm" not in name:
                    tensor.normal_(0, 0.5 if "router" in name else 0.03, generator=generator)
            save_file(tensors, folder / file, metadata={"format": "pt"})
            files |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": sum(2 * weight.numel() for weight in weights.values())}}
        (folder / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": files}))


def offload(
    mixture: LargeMixture, share: float = 0.25, warm: int = 96, tokens: int = 64, rounds: int = 3
) -> Iterator[dict]:
    """Yield the result of decoding `tokens` tokens after `warm` untimed ones, with memory for a share of experts."""
    room = int(share * mixture.layers * mixture.experts) * mixture.expert_bytes
    with tempfile.TemporaryDirectory() as folder:
        mixture.save(Path(folder))
        given = {"folder": folder, "budget": room, "warm": warm, "tokens": tokens}
        runs: dict[str, list[dict]] = {who: [] for who in CONTESTANTS}
        for number in range(rounds):
            for who in CONTESTANTS[:: 1 if number % 2 == 0 else -1]:
                if number == 0 or who != ACCELERATE:
                    runs[who].append(in_process("offload", "decode", who=who, **given))
    rows, failures = {}, []
    for who, its in runs.items():
        if reason := next((run["failed"] for run in its if "failed" in run), None):
            failures.append(f"{who}: {reason}")
            continue
        # Take each token's fastest round, since wall time includes other load on the machine.
        seconds = [min(rounds) for rounds in zip(*(run["seconds"] for run in its), strict=True)]
        rows[who] = {**its[0], "seconds": seconds, "median": statistics.median(seconds)}
    for row in rows.values():
        row["ratio"] = sum(row["seconds"]) / sum(rows.get(RESIDENT, row)["seconds"])
    if {RESIDENT, OURS} <= rows.keys():
        ours = rows[OURS]
        if ours["digest"] != rows[RESIDENT]["digest"]:
            failures.append(f"{OURS} computes other bits than {RESIDENT}")
        over = max(ours["read_bytes"], ours["counted_bytes"]) / max(
            1.0, ours["missed"] * mixture.expert_bytes
        )
        ours["read_over_missed"] = over
        if over > 1.02:
            failures.append(f"bytes read over bytes of missed experts are {over:.3f}, at most 1.02")
    if {RESIDENT, ACCELERATE} <= rows.keys():
        # Modules with accelerate's hooks do not use our kernels, so that results are rounded differently.
        given, expected = ([torch.tensor(rows[who]["first"])] for who in (ACCELERATE, RESIDENT))
        if difference(given, expected)[0] > BFLOAT16.largest:
            failures.append(f"{ACCELERATE} differs from {RESIDENT}")
    at_most = {OURS: 0.5 * rows[ACCELERATE]["ratio"]} if ACCELERATE in rows else {}
    experts = f"{mixture.layers} x {mixture.experts} experts of {mixture.expert_bytes / 1e6:.1f} MB"
    yield {
        "case": f"a token, room for {share:.0%} of {experts}",
        "reference": RESIDENT,
        "rows": rows,
        "at_most": at_most,
        "memory_at_most": {},
        "failures": failures,
    }


def load(who: str, folder: Path, budget: int) -> PreTrainedModel:
    """Load a contestant's model; `budget`, for ours, is the memory for experts in bytes."""
    load_model = llamoe.LlamoeForCausalLM.from_pretrained
    if who == OURS:
        return load_model(folder, device_map={"experts": "disk"}, experts_memory=budget).eval()
    model = load_model(folder).eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    if who == RESIDENT:
        for experts in layers.values():
            for parameter in experts.parameters():
                # Loaded weights are mapped from the file: copy them into memory.
                parameter.data = parameter.data.clone()
        return model
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    index = {
        name: {"safetensors_file": str(folder / file), "weight_name": name, "dtype": "bfloat16"}
        for name, file in files.items()
        if ".experts." in name
    }
    device_map = {"": "cpu", **dict.fromkeys(layers, "disk")}
    dispatch_model(model, device_map, main_device="cpu", offload_index=index, force_hooks=True)
    return model


def draw_routing(model: PreTrainedModel) -> None:
    """Replace the routers' choices by experts drawn by Zipf's law; each layer has its own frequent experts."""
    generator = torch.Generator().manual_seed(1)
    for router in model.modules():
        if isinstance(router, Router):
            weights = torch.arange(1, router.num_experts + 1).float() ** -ZIPF
            weights = weights[torch.randperm(router.num_experts, generator=generator)]

            def forward(x, weights=weights, plain=router.forward):
                logits, _, _ = plain(x)
                chosen = torch.multinomial(weights, len(x), replacement=True, generator=generator)[:, None]
                return logits, logits.gather(1, chosen).float().sigmoid().to(logits.dtype), chosen

            router.forward = forward


@torch.no_grad()
def decode(who: str, folder: str, budget: int, warm: int, tokens: int) -> dict:
    """Decode random tokens; return each one's seconds, means of bytes read and misses, and the peak memory."""
    base = status("VmRSS")
    forget(Path(folder))
    model = load(who, Path(folder), budget)
    draw_routing(model)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, model.config.vocab_size, (warm + tokens, 1, 1), generator=generator)
    cache, seconds, read = DynamicCache(config=model.config), [], []
    digest, first, before = hashlib.sha256(), [], {}
    for number, token in enumerate(ids):
        if who == ACCELERATE:
            forget(Path(folder))
        if number == warm and who == OURS:
            before = {name: counted(model, name) for name in ("hits", "misses", "bytes_read")}
        begun, at = time.perf_counter(), bytes_read()
        logits = model(input_ids=token, past_key_values=cache).logits
        if number >= warm:
            seconds.append(time.perf_counter() - begun)
            read.append(bytes_read() - at)
        digest.update(logits.float().numpy().tobytes())
        first = first or logits.float().flatten().tolist()
    row = {"seconds": seconds, "read_bytes": sum(read) / tokens, "peak_bytes": status("VmHWM") - base}
    row |= {"digest": digest.hexdigest(), "first": first}
    if before:
        hits, misses, nbytes = (counted(model, name) - then for name, then in before.items())
        row |= {
            "hit_rate": hits / (hits + misses),
            "missed": misses / tokens,
            "counted_bytes": nbytes / tokens,
        }
    return row
