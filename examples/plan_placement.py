r"""Plan on which device each part of a model goes, before anything is downloaded.

    python examples/plan_placement.py llama-4-scout --gpus 4 --gpu-memory 80 --context 8192 --save map.json

`llamoe.plan_placement` plans from the sizes of layers, routed experts and KV cache alone: no weights are needed. What
the accelerators cannot hold goes to memory, then to disk; routed experts first, since a token needs few of them. All
sizes are in GB of 10^9 bytes; a card sold with 80 GB has a little more.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
GB = 10**9


def fail(message: str) -> NoReturn:
    """Print one line and exit with status 2, as argparse does."""
    print(f"plan_placement: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def read_arguments() -> argparse.Namespace:
    """Read the command line, and exit where it asks for what cannot be."""
    parser = argparse.ArgumentParser(description="Plan on which device each part of a model goes.")
    parser.add_argument("model", help="a preset, a folder with config.json, or a config.json, ours or stock")
    parser.add_argument("--gpus", type=int, default=1, help="accelerators; default: %(default)s")
    parser.add_argument("--gpu-memory", type=float, default=80, metavar="GB", help="default: %(default)s")
    parser.add_argument("--cpu-memory", type=float, default=256, metavar="GB", help="default: %(default)s")
    parser.add_argument(
        "--headroom",
        type=float,
        default=4,
        metavar="GB",
        help="kept free of each; default: %(default)s",
    )
    parser.add_argument("--dtype", choices=list(BITS), default="bfloat16")
    parser.add_argument("--context", type=int, help="tokens in all; default: 8192, or what the model has")
    parser.add_argument("--batch", type=int, default=1, help="rows; default: %(default)s")
    parser.add_argument("--prefill", type=int, help="tokens of the prompt read in one pass; default: all")
    parser.add_argument("--save", metavar="FILE", help="write the device map as JSON")
    arguments = parser.parse_args()
    limits = {"gpus": 0, "batch": 1, "headroom": 0, "gpu_memory": 0, "cpu_memory": 0, "prefill": 1}
    for name, least in limits.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value < math.inf:
            fail(f"--{name.replace('_', '-')} must be at least {least} and finite, not {value}")
    if arguments.save and not Path(arguments.save).absolute().parent.is_dir():
        fail(f"--save {arguments.save}: there is no such folder")
    path = Path(arguments.model)
    if not path.exists() and (path.name == "config.json" or "/" in arguments.model):
        is_file = path.name == "config.json"
        fail(f"no such file: {path}" if is_file else f"no such folder or file: {arguments.model}")
    return arguments


if __name__ == "__main__":
    # Help and mistakes are shown before torch is imported, which takes seconds.
    read_arguments()

import transformers

import llamoe
from llamoe.planning import lines_of


def main() -> None:
    """Read the command line, plan and print."""
    arguments = read_arguments()
    transformers.logging.set_verbosity_error()
    try:
        plan: Any = llamoe.plan_placement(
            arguments.model,
            gpus=arguments.gpus,
            gpu_memory=int(arguments.gpu_memory * GB),
            ram=int(arguments.cpu_memory * GB),
            headroom=int(arguments.headroom * GB),
            bits=BITS[arguments.dtype],
            context=arguments.context,
            batch=arguments.batch,
            prefill=arguments.prefill,
        )
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(plan.device_map, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        fail(f"{arguments.model}: {error}")
    print("\n".join(lines_of(plan, arguments.model)))
    file = arguments.save or "map.json"
    hint = "" if arguments.save else f"   # --save {file}"
    memory = "" if plan.experts_memory is None else f", experts_memory={plan.experts_memory}"
    print(f'\nfrom_pretrained(folder, device_map=json.load(open("{file}")){memory}){hint}')


if __name__ == "__main__":
    main()
