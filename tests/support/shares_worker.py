"""One of the processes that run a shared model; test_shares.py starts it.

Each run in the folder's runs.json has the model's folder, the sizes of a `DistributedConfig` and the shape of the rows.
Each process writes what it counted to counted-RANK.json: the bytes of its part of the weights, and how far the logits
are from those of the whole model, in deviations of these; where stages meet tensor parallelism, the generated tokens
that differ, too.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import llamoe  # noqa: F401  (registers its model types)


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
        model = AutoModelForCausalLM.from_pretrained(
            folder / run["model"], dtype=torch.float32, distributed_config=DistributedConfig(**run["sizes"])
        )
        inputs = {"input_ids": torch.randint(3, 90, run["rows"])}
        parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        weights = sum(part.nbytes for part in parts)
        whole = AutoModelForCausalLM.from_pretrained(folder / run["model"], dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model.eval()(**inputs, use_cache=False).logits
            expected = whole(**inputs, use_cache=False).logits
        difference = (logits - expected).abs().max() / expected.std()
        counted[name] = {"weights": weights, "difference": difference.item()}
        if {"tp_size", "pp_size"} <= run["sizes"].keys():
            options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
            tokens, others = model.generate(**inputs, **options), whole.generate(**inputs, **options)
            counted[name]["other tokens"] = (tokens != others).sum().item()
    (folder / f"counted-{dist.get_rank()}.json").write_text(json.dumps(counted))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
