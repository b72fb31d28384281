"""Side-by-side measurements of llamoe and transformers, on a CPU and on a CUDA device.

    python -m benchmarks.cpu                       # mini shapes, one thread; also `make bench`
    python -m benchmarks.gpu --output folder       # Scout- and Maverick-shaped layers in bfloat16
    python -m benchmarks.readme                    # the README's and docs/performance.md's figures, from the results

Reading order: bars (targets for the figures), hardware (machine, versions, measured rates), memory and clocks (what is
measured), harness (how), work (the least that a case must read and compute), shapes and pairs (models that share
their weights), routing (inputs for chosen experts), block, models, attention, parts and loading (the cases), report,
figure and readme (the output), session (the command line), then cpu and gpu. `conversion` is independent and is run
as a file.
"""

import os

# Read when torch is imported. Silences the profiler's start messages and its warnings about memory from before.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

REFERENCE = "stock"
"""The contestant that the others are compared with."""

OURS = "llamoe"
"""Our contestant."""

AGAIN = "stock again"
"""The reference, measured a second time; the distance of its ratio from one is noise."""


def is_of(name: str, *who: str) -> bool:
    """Whether a contestant is one of some, plain or in a mode ("llamoe, max-autotune")."""
    return name.partition(", ")[0] in who
