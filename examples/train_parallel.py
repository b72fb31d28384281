"""Train a text model on several devices, with one of four kinds of parallelism.

    python examples/train_parallel.py --processes 2 --parallel fsdp
    torchrun --nproc-per-node 2 examples/train_parallel.py --parallel fsdp     # the same

* ddp: every process has the whole model and its own rows of the batch; gradients are averaged.
* fsdp: as ddp, but each process keeps a shard of every weight, and a layer is gathered while it runs (FSDP2).
* tp: tensor parallel: all processes work on the same rows; each has a slice of every layer's heads and widths.
* ep: expert parallel: as tp, but each process has some of the experts, whole.

The data are the same random tokens in every step, so the loss falls as the model memorises them. Processes use
GPUs if there are any, else the CPU.
"""

import argparse
import os
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NoReturn

TINY = str(Path(__file__).with_name("llamoe-tiny"))
NOWHERE = "no such folder, nor such a model in reach"
IS_FIRST = os.environ.get("RANK", "0") == "0"


def read_arguments() -> argparse.Namespace:
    """Read the command line; what is wrong with it ends the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=TINY, help="folder of a checkpoint; default: llamoe-tiny beside this file"
    )
    parser.add_argument(
        "--parallel", choices=("ddp", "fsdp", "tp", "ep"), default="fsdp", help="default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=4, help="of training; default: %(default)s")
    parser.add_argument("--save", metavar="FOLDER", help="where to write the trained model")
    parser.add_argument("--processes", type=int, default=2, help="without torchrun; default: %(default)s")
    arguments = parser.parse_args()
    for name in ("processes", "steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"argument --{name}: must be at least 1, not {getattr(arguments, name)}")
    if not Path(arguments.model).exists() and "/" not in arguments.model:
        # A model on the Hub has its owner's name.
        stop(f"{arguments.model}: {NOWHERE}")
    return arguments


def stop(reason: str) -> NoReturn:
    """End the program with a sentence and exit status 2."""
    print(f"train_parallel: {reason}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    # Help and mistakes are shown before torch is imported, which takes seconds. Each process finds the same mistake;
    # the first one tells.
    with nullcontext() if IS_FIRST else redirect_stderr(StringIO()):
        read_arguments()

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

# The import registers llamoe's model types.
import llamoe  # noqa: F401

ROWS, LENGTH = 4, 32


def check_model(folder: str, parallel: str) -> None:
    """Stop where there is no model, or none that can be shared in this way."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        is_there = Path(folder).exists()
        reason = " ".join(str(error).split()) if is_there else NOWHERE
        stop(f"{folder}: {reason}")
    if parallel == "ep" and not getattr(config.get_text_config(), "moe_layers", ()):
        stop(f"{folder}: --parallel ep shares experts, and this model has none: choose ddp, fsdp or tp")


def distributed_config(parallel: str, processes: int) -> DistributedConfig | None:
    """The configuration for sharding the model while it loads; None for ddp, which wraps the loaded model."""
    if parallel == "fsdp":
        return DistributedConfig(fsdp_size=processes)
    if parallel == "tp":
        return DistributedConfig(tp_size=processes)
    if parallel == "ep":
        return DistributedConfig(tp_size=processes, ep_size=processes)
    return None


def train(model_folder: str, parallel: str, steps: int, save: str | None = None) -> list[float]:
    """Train in every process of an initialised group; return the losses, averaged over the processes."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    rank, processes = dist.get_rank(), dist.get_world_size()
    config = distributed_config(parallel, processes)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, distributed_config=config)
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
        # Every process takes part, and the first one writes whole weights.
        model.save_pretrained(save)
    return losses


def main() -> None:
    """Read the arguments, join the group that torchrun describes, train; without torchrun, start it first."""
    with nullcontext() if IS_FIRST else redirect_stderr(StringIO()):
        arguments = read_arguments()
        check_model(arguments.model, arguments.parallel)
    if "RANK" not in os.environ:
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes)]
        raise SystemExit(subprocess.call([sys.executable, "-m", *launch, __file__, *sys.argv[1:]]))
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    dist.init_process_group()
    train(arguments.model, arguments.parallel, arguments.steps, arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
