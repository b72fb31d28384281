"""Side-by-side measurements of llamoe and transformers, peft, accelerate and llama.cpp.

    make bench                              # or python -m benchmarks.cpu: speed and memory on a CPU
    make bench CPU=avx2                     # the same without AVX-512 instructions
    make gpu                                # or python -m benchmarks.prove_gpu: checks and speed on a GPU
    python -m benchmarks.published_sizes    # Mixtral 8x7B at its published size, with random weights

Reading order: harness (compares and times the contestants of a case), machine, weights and random_models (which build
them), then the cases: block, decoder (with llama_cpp_models and its script gguf_converter) and offload (with
processes); cpu runs them. prove_gpu (with proof, small_models and two_cards) and published_sizes (with drawn_folders)
are separate programs. `results/` holds the committed results, with date, processor and versions.
"""

import os

# torch reads these when it is imported: they silence the profiler's start messages and its warnings about memory that
# was allocated before the profiler began.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
