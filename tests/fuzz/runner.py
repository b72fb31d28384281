"""Run the cases of many seeds, in several processes or in this one."""

import importlib
import multiprocessing
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable

import torch
import transformers

from .judge import JudgeIsWrong, TooClose, Wrong

# Kinds of cases, by the names of their files, with the weights by which they are drawn.
KINDS = {"forward": 22, "cached": 18, "training": 14, "generation": 8}
# Errors for inputs that are not supported. All other errors are faults.
REFUSALS = [
    r"the KV cache has forgotten tokens that may still be needed",
    r"position_ids of a row with padding behind cached tokens",
    r"transformers' llama needs a multiple of num_attention_heads",
]
FAULTS = ("failed", "judge")


def kind_of(seed: int) -> str:
    """Return the kind of a seed's case."""
    return random.Random(f"kind {seed}").choices(list(KINDS), list(KINDS.values()))[0]


def run_case(seed: int) -> tuple[str, str]:
    """Run the case of a seed.

    Returns:
        "passed", "refused", "too close", "failed" or "judge" (a fault of the fuzzer), and the text of a fault.
    """
    torch.manual_seed(seed)
    notes, kind = {}, kind_of(seed)
    try:
        importlib.import_module(f"fuzz.kinds.{kind}").case(random.Random(seed), seed, notes)
        return "passed", ""
    except TooClose:
        return "too close", ""
    except (JudgeIsWrong, Wrong) as error:
        verdict, text = "judge" if isinstance(error, JudgeIsWrong) else "failed", str(error)
    except Exception as error:
        if isinstance(error, ValueError) and any(re.search(refusal, str(error)) for refusal in REFUSALS):
            return "refused", ""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        verdict, text = "failed", f"{type(error).__name__}: {error} [{frame.filename}:{frame.lineno}]"
    return verdict, f"{verdict}: {kind}: {text} {notes}\n    make fuzz SEED={seed}"


def run_seeds(
    seeds: range,
    workers: int = 0,
    kinds: set[str] | None = None,
    say: Callable[[str], None] = print,
) -> Counter:
    """Run the cases of seeds, and count their verdicts.

    Args:
        seeds: one seed a case.
        workers: number of processes; 0 runs the cases in this one.
        kinds: skip cases of other kinds; None runs all.
        say: called with the text of each fault, and at the end with a line of counts.
    """
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    begun, counts = time.monotonic(), Counter()
    chosen = [seed for seed in seeds if kinds is None or kind_of(seed) in kinds]
    # Fork before this process computes anything, as torch's threads would be lost in the forked ones.
    pool = multiprocessing.get_context("fork").Pool(workers) if workers else None
    for verdict, text in pool.imap_unordered(run_case, chosen) if pool else map(run_case, chosen):
        counts[verdict] += 1
        if verdict in FAULTS:
            say(text)
    if pool:
        pool.terminate()
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    say(f"{counts.total()} cases from seed {seeds[0]} on: {words}; {time.monotonic() - begun:.0f} s")
    return counts
