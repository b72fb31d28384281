"""Side-by-side measurements of llamoe and transformers, peft, accelerate and llama.cpp.

    make bench                              # or python -m benchmarks.cpu: speed and memory on a CPU
    make bench CPU=avx2                     # as a processor without AVX-512
    make gpu                                # or python -m benchmarks.prove_gpu: a GPU against the CPU and limits
    python -m benchmarks.published_sizes    # Mixtral 8x7B at its published size, with drawn weights

Reading order: harness (how a case is compared and timed), machine, weights and random_models (models of both sides),
then the cases block, decoder (with llama_cpp_models and its script gguf_converter) and offload (with processes); cpu
runs them. prove_gpu (with proof, small_models and two_cards) and published_sizes use only harness, machine and
random_models. `results/` holds the committed results, with date, processor and versions.
"""

import os

# torch reads these when it is imported. They silence the profiler's start messages and its warnings about memory that
# was allocated before it began.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
