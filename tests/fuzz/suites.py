"""Runs the cases of some seeds."""

import os
from collections.abc import Callable

import torch
import transformers

from . import differential
from .runner import Summary, run_cases


def run_suite(
    seeds: range,
    workers: int,
    seconds: float | None = None,
    kinds: set[str] | None = None,
    say: Callable[[str], None] = print,
) -> Summary:
    """Run the cases of some seeds.

    Args:
        seeds: the seeds.
        workers: as in `run_cases`, like `seconds` and `say`.
        kinds: only run the seeds of these kinds.
    """
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chosen = [seed for seed in seeds if kinds is None or differential.kind_of(seed) in kinds]
    return run_cases(differential.run, chosen, workers, seconds, say) if chosen else Summary()
