r"""Plan on which device each part of a model goes, before anything is downloaded.

    python examples/plan_placement.py llama-4-scout --gpus 4 --gpu-memory 80 --context 8192 --save map.json

The model is built without weights (on the meta device), each layer's size includes its KV cache, and accelerate's
`infer_auto_device_map` fills one device after the other. What the accelerators cannot hold goes to memory, then to
disk. In every pass it is brought to the first accelerator, where its cache stays. All sizes are in GB of 10^9 bytes; a
card sold with 80 GB has a little more.
"""

import argparse
import json
import logging
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


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
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16", "int8", "int4"], default="bfloat16"
    )
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

import torch
import transformers
from accelerate import infer_auto_device_map
from torch import nn

import llamoe
from llamoe.configuration import cache_bytes, cache_tokens

GB = 10**9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Bytes of a linear layer, or of an expert's matrix, as bitsandbytes stores it, from its rows and its number of weights.
QUANTIZED = {
    # A float32 scale for each row.
    "int8": lambda rows, numbers: numbers + 4 * rows,
    # Half a byte for each weight, and a float32 scale for each 64 weights.
    "int4": lambda rows, numbers: -(-numbers // 2) + 4 * -(-numbers // 64),
}
NOTE = (
    "{0}: linear layers and routed experts, as bitsandbytes stores them. Embeddings, head, routers, norms and the "
    "tower's patch embedding stay in bfloat16."
)


@dataclass
class Plan:
    """Placement of a model.

    Attributes:
        device_map: argument for `from_pretrained`.
        weights: device to bytes of weights.
        cache: device to bytes of keys and values.
        parts: part of the model to its parameters and bytes.
    """

    device_map: dict[str, Any]
    weights: dict[Any, int]
    cache: dict[Any, int]
    parts: dict[str, tuple[int, int]]


def read_config(name: str):
    """The configuration of a preset, a folder or a config.json, ours or stock."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    try:
        if path.is_file():
            return llamoe.from_stock(json.loads(path.read_text(encoding="utf-8")))
        if path.name == "config.json":
            fail(f"no such file: {path}")
        return llamoe.preset(name)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        fail(f"{name}: {error}")


def build(config, dtype: str) -> nn.Module:
    """The model without weights; a quantized weight is replaced by as many bytes as it will take."""
    model_class = {
        llamoe.LlamoeConfig: llamoe.LlamoeForConditionalGeneration,
        llamoe.LlamoeTextConfig: llamoe.LlamoeForCausalLM,
        llamoe.LlamoeDenseConfig: llamoe.LlamoeDenseForCausalLM,
        llamoe.LlamoeMixtralConfig: llamoe.LlamoeMixtralForCausalLM,
        llamoe.LlamoeVisionConfig: llamoe.LlamoeVisionModel,
    }[type(config)]
    with torch.device("meta"):
        model = model_class(config).to(DTYPES.get(dtype, torch.bfloat16))
    if dtype in QUANTIZED:
        for name, module in model.named_modules():
            is_kept = module is model.get_output_embeddings() or "patch_embedding" in name
            if isinstance(module, nn.Linear) and not is_kept:
                module.weight = meta_bytes(QUANTIZED[dtype](len(module.weight), module.weight.numel()))
            elif name.endswith(".experts"):
                pack_experts(module, QUANTIZED[dtype])
    return model


def pack_experts(experts: Any, size_of: Callable[[int, int], int]) -> None:
    """Replace the stacks of routed experts by as many bytes as their matrices take, each by itself."""
    count, hidden_size, intermediate_size = experts.num_experts, *experts.hidden_and_intermediate_size
    numbers = hidden_size * intermediate_size
    experts.gate_up_proj = meta_bytes(2 * count * size_of(intermediate_size, numbers))
    experts.down_proj = meta_bytes(count * size_of(hidden_size, numbers))


def meta_bytes(count: int) -> nn.Parameter:
    """A parameter of this many bytes, without data."""
    return nn.Parameter(torch.empty(count, dtype=torch.uint8, device="meta"), requires_grad=False)


def place_of(name: str, device_map: dict[str, Any]) -> Any:
    """The device of a parameter."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name]


def part_of(name: str) -> str:
    """The row of the printed table that a parameter counts in."""
    parts = r"embed_tokens|lm_head|self_attn|feed_forward\.experts|feed_forward|mlp"
    name = re.sub(r"\.\d+\.", ".*.", name)
    if name.startswith(("vision_model.", "multi_modal_projector.")):
        return name.partition(".")[0]
    if "norm" in name:
        return "norms"
    found = re.match(rf".*?({parts})", name)
    return found[0] if found else name.partition(".")[0]


def plan(
    config, room: dict[Any, int], dtype: str, context: int, batch_size: int = 1, piece: int | None = None
) -> Plan:
    """Place the model on the devices, filling them in order.

    Args:
        config: configuration of any of llamoe's models.
        room: device to bytes for weights and cache, accelerators (0, 1, ...) before "cpu"; disk has no limit.
        dtype: a key of `DTYPES` or `QUANTIZED`.
        context: tokens of prompt and answer together.
        batch_size: number of rows.
        piece: tokens of the prompt in one pass; by default all of them.

    Raises:
        ValueError: a context beyond the model's limit, or a cache larger than the first device.
    """
    counts = {name: tensor.numel() for name, tensor in build(config, "bfloat16").named_parameters()}
    model = build(config, dtype)
    sizes = {name: tensor.nbytes for name, tensor in model.named_parameters()}
    caches: dict[str, int] = {}
    if not isinstance(config, llamoe.LlamoeVisionConfig):
        layers: Any = model.get_decoder().layers
        names = {module: name for name, module in model.named_modules()}
        element_size = DTYPES.get(dtype, torch.bfloat16).itemsize
        per_layer = cache_bytes(config, context, batch_size, element_size, piece or context)
        for layer, size in zip(layers, per_layer, strict=True):
            caches[names[layer]] = size
            layer.cache = meta_bytes(size)

    main = next(iter(room))
    # Bytes of cache for layers that are brought to the first device only when they run.
    borrowed = 0
    while True:
        limits = {**room, main: room[main] - borrowed}
        if limits[main] <= 0:
            raise ValueError(
                f"the cache of {context} tokens in {batch_size} rows takes {sum(caches.values()) / GB:.1f} GB, and "
                f"device {main} has {room[main] / GB:.1f}: take more or larger devices, or a smaller context"
            )
        device_map = dict(
            infer_auto_device_map(model, limits, no_split_module_classes=list(model._no_split_modules))
        )
        offloaded = {"cpu", "disk"} - {main}
        needed = sum(size for name, size in caches.items() if place_of(name, device_map) in offloaded)
        if needed <= borrowed:
            break
        borrowed = needed

    weights, cache, parts = defaultdict(int), defaultdict(int), defaultdict(lambda: (0, 0))
    for name, size in sizes.items():
        weights[place_of(name, device_map)] += size
        part = part_of(name)
        count, total = parts[part]
        parts[part] = (count + counts[name], total + size)
    for name, size in caches.items():
        place = place_of(name, device_map)
        cache[main if place in offloaded else place] += size
    return Plan(device_map, dict(weights), dict(cache), dict(parts))


def summarize(names: list[str]) -> str:
    """The names with runs in short: `layers.0`, `layers.1`, `layers.2` become `layers.0-2`."""
    runs: list[list[Any]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        if not number.isdigit():
            runs.append([name, None, None])
        elif runs and runs[-1][0] == stem and runs[-1][2] == int(number) - 1:
            runs[-1][2] = int(number)
        else:
            runs.append([stem, int(number), int(number)])
    texts = [
        stem if first is None else f"{stem}.{first}" if first == last else f"{stem}.{first}-{last}"
        for stem, first, last in runs
    ]
    return ", ".join(texts)


def show(config, result: Plan, room: dict[Any, int], arguments: argparse.Namespace, piece: int) -> None:
    """Print the sizes and the table of devices."""
    total, count = sum(result.weights.values()), sum(count for count, _ in result.parts.values())
    print(f"{arguments.model}: {count:,} parameters, {total / GB:.2f} GB in {arguments.dtype}")
    for part, (numbers, size) in result.parts.items():
        print(f"  {part:<52}{numbers:>16,} x {size / numbers:<5.4g} bytes = {size / GB:>8.3f} GB")
    if arguments.dtype in QUANTIZED:
        print(NOTE.format(arguments.dtype))
    if result.cache:
        text = config.get_text_config()
        tokens = cache_tokens(config, arguments.context, piece)
        held = ", ".join(
            f"{tokens.count(n)} layers x {n:,} tokens" for n in sorted(set(tokens), reverse=True)
        )
        size = DTYPES.get(arguments.dtype, torch.bfloat16).itemsize
        print(
            f"cache: ({held}) x 2 x {text.num_key_value_heads} heads x {text.head_dim} x {size} bytes x "
            f"{arguments.batch} rows = {sum(result.cache.values()) / GB:.3f} GB"
        )
    print(f"room: the device's memory less {arguments.headroom:g} GB for what a pass computes with")
    print(f"\n{'device':<8}{'weights':>10}{'cache':>10}{'together':>10}{'room':>10}   holds")
    for device in [*room, "disk"]:
        weights, cache = result.weights.get(device, 0), result.cache.get(device, 0)
        limit = f"{room[device] / GB:.2f}" if device in room else "-"
        held = [name for name, place in result.device_map.items() if place == device and name]
        what = "the whole model" if result.device_map.get("") == device else summarize(held)
        numbers = "".join(f"{size / GB:>10.2f}" for size in (weights, cache, weights + cache))
        print(f"{device!s:<8}{numbers}{limit:>10}   {what or 'nothing'}")
    outside = total - sum(result.weights.get(device, 0) for device in room if device != "cpu")
    if arguments.gpus and outside:
        print(
            f"\n{outside / GB:.2f} GB are on no accelerator: every pass moves them to device 0"
            f"{', and bitsandbytes refuses that' if arguments.dtype in QUANTIZED else ''}."
        )


def main() -> None:
    """Read the command line, plan and print."""
    arguments = read_arguments()
    own = arguments.gpu_memory if arguments.gpus else arguments.cpu_memory
    if not own > arguments.headroom:
        fail(f"a device of {own:g} GB has no room beside a headroom of {arguments.headroom:g} GB")

    config = read_config(arguments.model)
    if arguments.context is None:
        arguments.context = min(8192, getattr(config.get_text_config(), "max_position_embeddings", 8192))
    piece = arguments.context if arguments.prefill is None else arguments.prefill
    devices = list(range(arguments.gpus)) or ["cpu"]
    room: dict[Any, int] = dict.fromkeys(devices, int((own - arguments.headroom) * GB))
    if arguments.gpus:
        room["cpu"] = int(max(0, arguments.cpu_memory - arguments.headroom) * GB)
    transformers.logging.set_verbosity_error()
    # accelerate would warn that the planned devices are missing.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    try:
        result = plan(config, room, arguments.dtype, arguments.context, arguments.batch, piece)
        show(config, result, room, arguments, piece)
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(result.device_map, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        fail(f"{arguments.model}: {error}")
    file = arguments.save or "map.json"
    hint = "" if arguments.save else f"   # --save {file}"
    print(f'\nfrom_pretrained(folder, device_map=json.load(open("{file}"))){hint}')


if __name__ == "__main__":
    main()
