"""The benchmark on one CUDA device: Scout- and Maverick-shaped layers in bfloat16.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --cases block-scout block-maverick --output folder
    python -m benchmarks.gpu --output folder --cases decoder dense     # adds to what the folder has

A Maverick-shaped layer is 32.5 GB, and stock needs about 80 GB more at T = 8192 tokens. Devices smaller than 139 GiB
skip such cases and say so.
"""

import sys
from dataclasses import replace
from functools import partial

import torch

from . import block, command_line, loading, models, small_modules
from .clocks import DeviceClock
from .harness import Cases, Group
from .memory import available_bytes
from .shapes import MANY_SMALL, MAVERICK, SCOUT, Setting, Shape

SETTING = Setting(torch.device("cuda", 0), torch.bfloat16)
DECODE = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILL = (512, 1024, 2048, 8192)
# Compiling takes most of the time, so few sizes.
GRAPHS = replace(SETTING, compile_modes=("reduce-overhead",), compiled_tokens=(1, 8, 32, 128))
# The width of LLaMA 2 13B, with its vocabulary of 32000 rows.
DENSE = replace(SCOUT, vocabulary=32000)
LEFT_FOR_ACTIVATIONS = 40e9
MOST_LAYERS = 16


def decoder(setting: Setting, shape: Shape, **what) -> Cases:
    """The mixture with as many layers as fit into memory, up to `MOST_LAYERS`."""
    layer = 3 * shape.hidden * shape.expert * (shape.experts + 1) * setting.dtype.itemsize
    room = available_bytes(setting.device) - LEFT_FOR_ACTIVATIONS
    yield from models.mixture(setting, shape, max(1, min(MOST_LAYERS, int(room // layer))), **what)


GROUPS: dict[str, Group] = {
    "block-scout": partial(block.inference, GRAPHS, SCOUT, DECODE, PREFILL, (8, 32, 8192)),
    "block-maverick": partial(block.inference, GRAPHS, MAVERICK, DECODE, PREFILL, (8, 32, 8192)),
    "training-scout": partial(block.training, SETTING, SCOUT, 256),
    "training-scout-long": partial(block.training, SETTING, SCOUT, 4096),
    "training-maverick": partial(block.training, SETTING, MAVERICK, 256),
    "decoder": partial(
        decoder, SETTING, SCOUT, prefill=(512, 8192), decode=DECODE, training=(), generate=(1, 8)
    ),
    "dense": partial(
        models.dense, SETTING, DENSE, 8, prefill=(512, 4096), decode=DECODE, training=(2048,), generate=(1,)
    ),
    "chunked": partial(models.chunked, SETTING, SCOUT, chunk=8192, counts=(2, 4), long=65536, patience=30.0),
    "vision": partial(
        small_modules.vision, SETTING, hidden=1408, layers=34, heads=16, output=4096, tiles=(1, 8)
    ),
    "parts": partial(small_modules.small, SETTING, SCOUT, 8192),
    "loading": partial(loading.loading, SETTING, SCOUT, 1, "1GB"),
    "loading-many": partial(loading.loading, SETTING, MANY_SMALL, 12, "50KB", dense=True),
}


def main() -> int:
    """Run the groups named on the command line."""
    made = command_line.parser("gpu", GROUPS, __doc__, seconds=0.5)
    options, budget = command_line.options(made, "gpu", GROUPS)
    if not torch.cuda.is_available():
        print(
            "benchmarks.gpu needs a CUDA device, and torch finds none; `python -m benchmarks.cpu` needs none.",
            file=sys.stderr,
        )
        return 2
    torch.cuda.set_device(SETTING.device)
    return command_line.run(
        "gpu", GROUPS, options.cases, DeviceClock(SETTING.device), SETTING.dtype, options.output, budget
    )


if __name__ == "__main__":
    sys.exit(main())
