"""One of the processes that run a shared model while its collectives are counted; test_traffic.py starts it.

Each run in the folder's runs.json has the model's folder, the sizes of a `DistributedConfig`, the shape of the rows,
whether pictures come with them and whether they are trained on. Each process writes what it counted to
counted-RANK.json: the name and bytes of each collective, the bytes of its part of the weights, and how far the logits
are from those of the whole model, in deviations of these; where stages meet tensor parallelism, the generated tokens
that differ, too.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.models import IMAGE_TOKEN, TOKENS_PER_TILE, VISION
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig

import llamoe  # noqa: F401  (registers its model types)

NAMES = {
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "send": "send",
    "broadcast_": "broadcast",
    # They receive, or send nothing.
    "recv_": None,
    "_wrap_tensor_autograd": None,
    "wait_tensor": None,
    "barrier": None,
}


class Counting(TorchDispatchMode):
    """Notes every collective of this process, and the bytes of the largest of its tensors, which is the whole one."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            # One that is not named here ends the process.
            name = NAMES[func.__name__.partition(".")[0]]
            leaves = tree_leaves((args, kwargs, result))
            sizes = [leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if name:
                self.calls.append((name, max(sizes)))
        return result


def rows_of(run):
    ids = torch.randint(3, 90, run["rows"])
    if not run.get("pictures"):
        return {"input_ids": ids}
    ids[:, 1 : 1 + TOKENS_PER_TILE] = IMAGE_TOKEN
    size = VISION["image_size"]
    return {"input_ids": ids, "pixel_values": torch.randn(len(ids), 3, size, size)}


def main(folder: Path) -> None:
    """Do all runs of the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    counted = {}
    for name, run in json.loads((folder / "runs.json").read_text()).items():
        torch.manual_seed(0)
        auto = AutoModelForImageTextToText if run["model"] == "multimodal" else AutoModelForCausalLM
        model = auto.from_pretrained(
            folder / run["model"], dtype=torch.float32, distributed_config=DistributedConfig(**run["sizes"])
        )
        inputs = rows_of(run)
        parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        weights = sum(part.nbytes for part in parts)
        with Counting() as counting:
            if run["is_trained"]:
                model.train()(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
            else:
                with torch.no_grad():
                    logits = model.eval()(**inputs, use_cache=False).logits
        counted[name] = {"calls": counting.calls, "weights": weights}
        if not run["is_trained"]:
            whole = auto.from_pretrained(folder / run["model"], dtype=torch.float32).eval()
            with torch.no_grad():
                expected = whole(**inputs, use_cache=False).logits
            difference = (logits - expected).abs().max() / expected.std()
            counted[name]["difference"] = difference.item()
            if {"tp_size", "pp_size"} <= run["sizes"].keys():
                options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
                tokens, others = model.generate(**inputs, **options), whole.generate(**inputs, **options)
                counted[name]["other tokens"] = (tokens != others).sum().item()
    (folder / f"counted-{dist.get_rank()}.json").write_text(json.dumps(counted))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
