"""One of the processes that run a model together, and compare it with the model in one process.

process_worker.py FOLDER [CHECK…] runs the named checks, by default all. The first process writes the checks' figures
of all processes to FOLDER/results.json. A check "share …" is `process_checks.share`.
"""

import json
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from support import process_saves  # noqa: F401
from support.process_checks import share
from support.process_models import CHECKS, FOLDER


def main():
    """Run the checks in the same order as the other processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{FOLDER / 'rendezvous'}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=90),
    )
    results = {}
    for key in sys.argv[2:] or CHECKS:
        torch.manual_seed(0)
        try:
            is_share = key.startswith("share ")
            figures = share(key.removeprefix("share ")) if is_share else CHECKS[key]()
        except Exception:
            figures = {"error": traceback.format_exc()}
            print(key, figures["error"], flush=True)
        both = [None] * dist.get_world_size()
        dist.all_gather_object(both, figures)
        results[key] = both
    if dist.get_rank() == 0:
        (FOLDER / "results.json").write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
