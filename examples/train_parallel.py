"""Train a text model on several devices, with one of four kinds of parallelism.

    torchrun --nproc-per-node 2 examples/train_parallel.py        # fsdp
    torchrun --nproc-per-node 2 examples/train_parallel.py ep

* ddp: every process has the whole model and a part of the batch's rows; gradients are averaged.
* fsdp: as ddp, but each process keeps a shard of every weight, and a layer is gathered while it runs (FSDP2).
* tp: tensor parallel: all processes work on the same rows; each has a slice of every weight matrix.
* ep: expert parallel: as tp, but each process has some of the experts, whole. The model must be a mixture.

The data are the same random tokens in every step, so the loss falls as the model memorises them. Processes use GPUs
if there are any, else the CPU.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

# The import registers llamoe's model types.
import llamoe  # noqa: F401

MODEL = str(Path(__file__).with_name("llamoe-tiny"))
PARALLEL = sys.argv[1] if len(sys.argv) > 1 else "fsdp"
STEPS = 4
ROWS, LENGTH = 4, 32
# A folder for the trained model; None: it is not saved.
SAVE = None


def train(model_folder: str, parallel: str, steps: int, save: str | None = None) -> list[float]:
    """Train in every process of an initialised group; return the losses, averaged over the processes."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    rank, processes = dist.get_rank(), dist.get_world_size()
    # `from_pretrained` distributes the model while it loads. DDP wraps a whole model afterwards.
    shared = {
        "ddp": None,
        "fsdp": DistributedConfig(fsdp_size=processes),
        "tp": DistributedConfig(tp_size=processes),
        "ep": DistributedConfig(tp_size=processes, ep_size=processes),
    }[parallel]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, distributed_config=shared)
    trained = model = model.to(device).train()
    if parallel == "ddp":
        trained = torch.nn.parallel.DistributedDataParallel(model)

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (ROWS * processes, LENGTH), generator=generator).to(device)
    if parallel in ("ddp", "fsdp"):
        ids = ids[rank * ROWS : (rank + 1) * ROWS]
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        loss = trained(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / processes)
        if rank == 0:
            print(f"{parallel} step {step}: loss {losses[-1]:.4f}", flush=True)
    if save:
        # All processes must call this; the first one writes whole weights.
        model.save_pretrained(save)
    return losses


if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    train(MODEL, PARALLEL, STEPS, SAVE)
    dist.destroy_process_group()
