"""Side-by-side measurements of llamoe and transformers, on a CPU and on a CUDA device.

    python -m benchmarks.cpu                       # mini shapes, one thread; also `make bench`
    python -m benchmarks.gpu --output folder       # Scout- and Maverick-shaped layers in bfloat16
    python -m benchmarks.readme                    # the README's section on speed, from the results

Reading order: bars (what is wanted of the figures), hardware (machine, versions, measured rates), memory and clocks
(what is measured), harness (how), work (the least that a case must read and compute), shapes and pairs (models that
share their weights), routing (how inputs reach chosen experts), block, models, attention, parts and loading (the
cases), report, figure and readme (what is written), session (the command line), then cpu and gpu.
`conversion` stands for itself and is run as a file.
"""

import os

# Read when torch is imported. The profiler announces each of its starts, and warns of memory that it did not see begin.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

REFERENCE = "stock"
"""Name of the contestant that the others are compared with."""

OURS = "llamoe"
"""Name of ours."""

AGAIN = "stock again"
"""The reference once more, against itself: how far its ratio lies from one is noise."""


def is_of(name: str, *who: str) -> bool:
    """Whether a contestant is one of some, as it comes or in a mode ("llamoe, max-autotune")."""
    return name.partition(", ")[0] in who
