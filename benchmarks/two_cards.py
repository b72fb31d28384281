"""Compare a mixture that two processes share, each with its own GPU, with the whole model on one GPU.

    torchrun --nproc-per-node 2 -m benchmarks.two_cards FOLDER RESULTS.json
    torchrun --nproc-per-node 2 -m benchmarks.two_cards FOLDER RESULTS.json --cpu

`benchmarks.prove_gpu` calls `cards_together`, which starts the two processes. FOLDER has a small model. RESULTS.json
gets, for each kind of parallelism, the largest differences from the whole model's logits, before and after a training
step, and the largest share of the weights that a process holds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import llamoe

from .harness import free
from .proof import Proof, nbytes
from .small_models import inputs_of, saved

KINDS = {
    "tensor parallel": DistributedConfig(tp_size=2),
    "expert parallel": DistributedConfig(tp_size=2, ep_size=2),
    "FSDP2": DistributedConfig(fsdp_size=2),
}
ROWS, LENGTH, LEARNING_RATE = 4, 29, 0.5


@torch.no_grad()
def cards_together(proof: Proof) -> None:
    """Compare two GPUs with one: `device_map="auto"`, tensor and expert parallelism, FSDP2."""
    count = torch.cuda.device_count() if proof.is_cuda else 0
    proof.say("cards", count)
    if proof.is_cuda and count < 2:
        return
    folder = saved(proof.folder, "llama4")
    if proof.is_cuda:
        inputs = {name: tensor.to(proof.device) for name, tensor in inputs_of("llama4").items()}
        one = llamoe.LlamoeForCausalLM.from_pretrained(folder, device_map={"": proof.device}).eval()
        half = nbytes(one) // 2 + (1 << 20)
        two = llamoe.LlamoeForCausalLM.from_pretrained(
            folder, device_map="auto", max_memory={0: half, 1: 8 * half}
        ).eval()
        places = {str(weight.device) for weight in two.parameters()}
        proof.judge("cards that have weights", len(places), least=2)
        error = (one(**inputs).logits - two(**inputs).logits.to(proof.device)).abs().max().item()
        proof.judge("largest difference from one card", error, most=1e-4)
        del one, two
        free(proof.device)
    results = proof.folder / "two_cards.json"
    words = ["-m", "benchmarks.two_cards", str(folder), str(results), *([] if proof.is_cuda else ["--cpu"])]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"two processes: {done.stderr.strip()[-200:]}")
    for kind, found in json.loads(results.read_text()).items():
        proof.judge(f"{kind}: largest difference of logits from one process", found["before"], most=1e-4)
        proof.judge(f"{kind}: the same after a step of training", found["after"], most=1e-3)
        proof.judge(f"{kind}: share of the weights that a process has", found["kept"], most=0.75)


def compare(folder: str, device: torch.device) -> dict[str, dict[str, float]]:
    """Return by kind of parallelism the differences from the whole model's logits, and a process's share of weights."""

    def load(**options: Any) -> Any:
        return llamoe.LlamoeForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).to(device)

    one = load()
    whole = sum(weight.numel() for weight in one.parameters())
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, one.config.vocab_size, (ROWS, LENGTH), generator=generator).to(device)
    expected = _before_and_after(one, ids)
    results = {}
    for kind, shared in KINDS.items():
        model = load(distributed_config=shared)
        kept = sum(_local(weight).numel() for weight in model.parameters()) / whole
        # Under FSDP2 each process computes other rows, and gradients are averaged.
        rows = slice(None) if kind != "FSDP2" else slice(dist.get_rank(), None, dist.get_world_size())
        pairs = zip(_before_and_after(model, ids[rows]), expected, strict=True)
        errors = [(logits - whole_logits[rows]).abs().max() for logits, whole_logits in pairs]
        largest = torch.stack([*errors, errors[0].new_tensor(kept)])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        results[kind] = dict(zip(("before", "after", "kept"), largest.tolist(), strict=True))
    return results


def _before_and_after(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return logits before and after a training step."""
    # Build the optimizer first: after a forward without gradients, FSDP2 leaves some weights gathered, and it would
    # train the gathered copies.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    before = _logits(model, ids)
    model.train()(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    return [before, _logits(model, ids)]


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.eval()(ids, use_cache=False).logits


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def main() -> None:
    """Compare in each process; the first one writes the results."""
    folder, results, *options = sys.argv[1:]
    device = torch.device("cpu")
    if "--cpu" not in options:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    figures = compare(folder, device)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
