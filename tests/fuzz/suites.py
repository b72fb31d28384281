"""The two fuzzers, by name."""

import os
from collections.abc import Callable

import torch
import transformers

from . import corruption, differential
from .originals import originals
from .runner import Summary, run_cases

SUITES = {
    "differential": (differential.run, differential.kind_of),
    "corruption": (corruption.run, corruption.kind_of),
}


def run_suite(
    name: str,
    seeds: range,
    workers: int,
    seconds: float | None = None,
    kinds: set[str] | None = None,
    say: Callable[[str], None] = print,
) -> Summary:
    """Run the cases of some seeds.

    Args:
        name: a key of `SUITES`.
        seeds: the seeds.
        workers: as in `run_cases`, like `seconds` and `say`.
        kinds: only run the seeds of these kinds.
    """
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if name == "corruption":
        # Built once, for all processes.
        originals()
    run, kind_of = SUITES[name]
    chosen = [seed for seed in seeds if kinds is None or kind_of(seed) in kinds]
    return run_cases(name, run, chosen, workers, seconds, say) if chosen else Summary()
