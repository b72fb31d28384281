"""Side-by-side measurements of llamoe and transformers, on a CPU and on a CUDA device.

    python -m benchmarks.cpu                       # mini shapes, one thread; also `make bench`
    python -m benchmarks.cpu --cases llama.cpp     # beside llama.cpp, where that is installed
    make bench CPU=avx2                            # as a processor without AVX-512
    python -m benchmarks.bars cpu                  # the targets, and an exit status
    python -m benchmarks.gpu --output folder       # Scout- and Maverick-shaped layers in bfloat16
    python -m benchmarks.prove_gpu                 # whether a card does what the pages say, with exit status
    python -m benchmarks.readme                    # the README's and docs/performance.md's figures, from the results
    python -m benchmarks.conversion                # conversions beside a plain copy
    python -m benchmarks.quality                   # what few bits cost the small model's answers
    python -m benchmarks.offload_large           # a mixture that is larger than its memory
    python -m benchmarks.qlora                     # adapters of a Scout in 4 bits, on a CUDA device

Reading order: bars (targets for the figures), held (a machine as a lesser one), hardware (machine, versions, measured
rates), memory and clocks (what is measured), harness (how a case runs), shapes and roofline (sizes, and the least that
a case must read and compute), routing (inputs for chosen experts), shared_weights (models of both libraries on the same
parameters), then the cases: block, models, small_modules; in processes of their own loading, and offload on a
large_mixture; with models in folders saved_models, gguf_files (and its script gguf_converter), few_bits, seven_billion
and mixtral; report, plot and readme write the results, command_line reads the options, cpu and gpu are the commands;
prove_gpu proves a card right.
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
