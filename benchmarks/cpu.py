"""The benchmark on a CPU: mini shapes in float32, one thread, processor time.

    python -m benchmarks.cpu
    python -m benchmarks.cpu --cases block-16 dense
    LLAMA_CPP_CONVERTER=llama.cpp/convert_hf_to_gguf.py python -m benchmarks.cpu --cases llama.cpp

    make bench CPU=avx2 ARGS="--cases few-bits"

`--cases 7b` measures the sizes of 7B models, which runs only when it is named: twenty minutes, 12 GB of memory, and
20 GB in the folder for temporary files, or in the one that `LLAMOE_BENCH_FILES` names, where they stay.

The groups of llama.cpp run only when they are named; `--cases llama.cpp` names all of them. They need llama-cpp-python,
the converter of llama.cpp's sources, ten minutes, and 4 GB in the folder for temporary files, or in the one that
`LLAMOE_BENCH_FILES` names, where they stay. The cases of two threads need two processors that nobody else uses.
`CPU=avx2` shows a processor with fewer instructions (`benchmarks/held.py`); its results stand in files of their own.
"""

import sys
from functools import partial

import torch

from . import (
    block,
    command_line,
    few_bits,
    held,
    loading,
    mixtral,
    models,
    offload,
    saved_models,
    seven_billion,
    small_modules,
)
from .clocks import ProcessorClock
from .harness import Group
from .large_mixtures import LargeMixture
from .shapes import MANY_SMALL, MINI, MINI_8, MINI_128, Setting

SETTING = Setting(torch.device("cpu"), torch.float32)
BFLOAT16 = Setting(torch.device("cpu"), torch.bfloat16)
DECODE = (1, 2, 4, 8, 16, 32, 64, 128)
LAYERS = 4
# Copies of a block: one token reads more of them than a large cache holds.
COPIES = 4
# Experts of 6.3 MB, 2.4 GB of them.
ON_DISK = LargeMixture(hidden=1024, expert=1024, layers=6, experts=64)
SAVED = (saved_models.DENSE, saved_models.MIXTURE)
BY_NAME = (
    "7b-mistral",
    "7b-mixtral",
    "llama.cpp-token",
    "llama.cpp-context",
    "llama.cpp-prefill",
    "llama.cpp-threads",
)
"""Groups that run only when they are named: they need what this repository does not install."""

GROUPS: dict[str, Group] = {
    "block-16": partial(block.inference, SETTING, MINI, DECODE, (256, 512, 1024, 8192), (32, 1024), COPIES),
    "block-128": partial(block.inference, SETTING, MINI_128, DECODE, (256, 512, 1024), (32, 256), COPIES),
    "training-16": partial(block.training, SETTING, MINI, 256),
    "training-128": partial(block.training, SETTING, MINI_128, 256),
    "adapters-16": partial(block.lora, SETTING, MINI, (512, 4096)),
    "adapters-128": partial(block.lora, SETTING, MINI_128, (512, 4096)),
    "adapters-bfloat16": partial(block.lora, BFLOAT16, MINI, (512, 4096)),
    "adapters-decode": partial(block.lora_decoding, SETTING, MINI, LAYERS, (1, 8, 32)),
    "decoder": partial(
        models.mixture, SETTING, MINI, LAYERS, prefill=(128, 1024), decode=DECODE, training=(256,)
    ),
    "dense": partial(
        models.dense, SETTING, MINI, LAYERS, prefill=(128, 1024), decode=DECODE, training=(256,)
    ),
    "chunked": partial(
        models.chunked, SETTING, MINI, chunk=1024, counts=(2, 4, 8), long=65536, patience=60.0
    ),
    "window": partial(models.windowed, SETTING, MINI, 1024, (2, 16)),
    "mixtral": partial(block.mixtral, SETTING, MINI_8, (1, 32, 1024), 256),
    "mixtral-bfloat16": partial(block.mixtral, BFLOAT16, MINI_8, (1, 32, 1024), 256),
    "vision": partial(small_modules.vision, SETTING, hidden=512, layers=4, heads=8, output=512, tiles=(1, 2)),
    "parts": partial(small_modules.small, SETTING, MINI, 1024),
    "few-bits": partial(few_bits.few_bits, SAVED, 512),
    "llama.cpp-token": partial(few_bits.beside_llama_cpp, SAVED, "decode"),
    "llama.cpp-context": partial(few_bits.beside_llama_cpp, SAVED, "context"),
    "llama.cpp-prefill": partial(few_bits.beside_llama_cpp, SAVED, "prefill"),
    # After all others: idle threads wait actively for a moment, which counts as processor time.
    "llama.cpp-threads": partial(few_bits.beside_llama_cpp, SAVED, "threads"),
    "7b-mistral": partial(seven_billion.seven_billion, seven_billion.MISTRAL),
    "7b-mixtral": partial(seven_billion.seven_billion, seven_billion.MIXTRAL),
    "large": partial(mixtral.mixtral, SETTING, 4),
    "offload": partial(offload.offload, ON_DISK),
    "loading": partial(loading.loading, SETTING, MINI, LAYERS, "100MB"),
    "loading-many": partial(loading.loading, SETTING, MANY_SMALL, 12, "100KB", dense=True),
}


def main() -> int:
    """Run the groups named on the command line."""
    made = command_line.parser("cpu", GROUPS, __doc__, by_name=BY_NAME)
    options, budget = command_line.options(made, "cpu", GROUPS)
    name = "_".join(filter(None, ("cpu", held.is_held())))
    torch.set_num_threads(1)
    return command_line.run(
        name, GROUPS, options.cases, ProcessorClock(), SETTING.dtype, options.output, budget
    )


if __name__ == "__main__":
    sys.exit(main())
