"""Compare a mixture that two processes share, each with its own GPU, with the whole model on one GPU.

    torchrun --nproc-per-node 2 -m benchmarks.two_cards FOLDER RESULTS.json
    torchrun --nproc-per-node 2 -m benchmarks.two_cards FOLDER RESULTS.json --cpu

`benchmarks.prove_gpu` starts them. FOLDER has a small model. RESULTS.json gets, for each kind of parallelism, the
largest difference of logits before and after a step of training, and the largest share of weights in a process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import llamoe

KINDS = {
    "tensor parallel": DistributedConfig(tp_size=2),
    "expert parallel": DistributedConfig(tp_size=2, ep_size=2),
    "FSDP2": DistributedConfig(fsdp_size=2),
}
ROWS, LENGTH, LEARNING_RATE = 4, 29, 0.5


def compare(folder: str, device: torch.device) -> dict[str, dict[str, float]]:
    """Return the differences of logits and the share of weights by kind of parallelism."""

    def load(**options: Any) -> Any:
        return llamoe.LlamoeForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).to(device)

    one = load()
    whole = sum(weight.numel() for weight in one.parameters())
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, one.config.vocab_size, (ROWS, LENGTH), generator=generator).to(device)
    expected = _before_and_after(one, ids)
    found = {}
    for kind, shared in KINDS.items():
        model = load(distributed_config=shared)
        kept = sum(_own(weight).numel() for weight in model.parameters()) / whole
        # Only under FSDP2 do processes compute different rows; it averages their gradients.
        some = slice(None) if kind != "FSDP2" else slice(dist.get_rank(), None, dist.get_world_size())
        pairs = zip(_before_and_after(model, ids[some]), expected, strict=True)
        errors = [(logits - its[some]).abs().max() for logits, its in pairs]
        largest = torch.stack([*errors, errors[0].new_tensor(kept)])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        found[kind] = dict(zip(("before", "after", "kept"), largest.tolist(), strict=True))
    return found


def _before_and_after(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return logits before and after a training step."""
    # Built first: after a forward pass without gradients FSDP2 leaves some weights gathered, and an optimizer
    # built then would train the gathered copies.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    before = _logits(model, ids)
    model.train()(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    return [before, _logits(model, ids)]


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.eval()(ids, use_cache=False).logits


def _own(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def main() -> None:
    """Compare in each process; the first one writes the results."""
    folder, results, *options = sys.argv[1:]
    device = torch.device("cpu")
    if "--cpu" not in options:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    found = compare(folder, device)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
