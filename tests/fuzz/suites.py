"""The two fuzzers, by name."""

import os
from functools import partial

import torch
import transformers

from . import differential
from .runner import Summary, run_cases

SUITES = {"differential": differential.run}


def run_suite(
    name: str, seeds: range, workers: int, seconds: float | None = None, kind: str | None = None, say=print
) -> Summary:
    """Run the cases of some seeds, in as many processes; the arguments are those of `runner.run_cases`."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    run = SUITES[name] if kind is None else partial(SUITES[name], kind=kind)
    return run_cases(name, run, seeds, workers, seconds, say)
