"""Bytes that a model's tensors take: as stored, and in memory when the model runs.

The sizes of quantized weights follow bitsandbytes' storage formats and need shapes only.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from ...configuration import LlamoeVisionConfig
from ...configuration.base import LlamoeBaseConfig
from ...modeling.checkpoints import part_of
from ..hf import PackedWeight, split_experts
from ..io import LazyTensor, from_tensor

# Bytes of a linear layer as bitsandbytes stores it, from its rows and its number of weights.
_LINEAR_BYTES: dict[str, Callable[[int, int], int]] = {
    # A float32 scale for each row.
    "int8": lambda rows, numbers: numbers + 4 * rows,
    # Half a byte for each weight, and a float32 scale for each 64 weights.
    "int4": lambda rows, numbers: -(-numbers // 2) + 4 * -(-numbers // 64),
}
NOTE = (
    "int8 and int4: linear layers and routed experts, as bitsandbytes stores them. Embeddings, routers, norms, the "
    "head and the tower's patch embedding stay in bfloat16."
)


@dataclass(frozen=True)
class Need:
    """Bytes of memory that a running model takes.

    Attributes:
        weights: bytes of the weights.
        cache: bytes of keys and values in bfloat16, for the context and batch asked for.
    """

    weights: int
    cache: int


def needs_of(
    shapes: Mapping[str, tuple[int, ...]], cached: int, packed: Mapping[str, PackedWeight] | None = None
) -> dict[str, Need]:
    """Memory that a model takes in bfloat16, int8 and int4, with `cached` bytes of cache; see `NOTE`.

    If `packed` are given, weights that are stored in few bits, it is the memory in that format alone.
    """
    if packed:
        weights = sum(
            sum(math.prod(part) * dtype.itemsize for part, dtype in packed[key].parts.values())
            if key in packed
            else 2 * math.prod(shape)
            for key, shape in shapes.items()
        )
        return {next(iter(packed.values())).form.key.partition(":")[0]: Need(weights, cached)}
    plain = sum(2 * math.prod(shape) for shape in shapes.values())
    needs = {"bfloat16": Need(plain, cached)}
    for name, size_of in _LINEAR_BYTES.items():
        weights = sum(
            size_of(shape[0], math.prod(shape)) if _is_linear(key, shape) else 2 * math.prod(shape)
            for key, shape in split_shapes(shapes).items()
        )
        needs[name] = Need(weights, cached)
    return needs


def _is_linear(key: str, shape: tuple[int, ...]) -> bool:
    others = ("embed_tokens", "lm_head", "router", "mlp.gate", "moe.gate", "patch_embedding.linear")
    name, _, kind = key.rpartition(".")
    return len(shape) == 2 and kind == "weight" and not name.endswith(others)


def split_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Keys and shapes with each stacked expert as linear layers, as `split_experts` makes them."""
    stacked = {key: from_tensor(torch.empty(shape, device="meta")) for key, shape in shapes.items()}
    return {key: tensor.shape for key, tensor in split_experts(stacked).items()}


def dtypes_of(tensors: Iterable[LazyTensor]) -> dict[str, tuple[int, int]]:
    """Dtype to the number of its tensors and their bytes."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        count, size = found[name]
        found[name] = (count + 1, size + tensor.nbytes)
    return dict(found)


def parts_of(
    config: LlamoeBaseConfig | None, tensors: Mapping[str, LazyTensor], in_files: Mapping[str, LazyTensor]
) -> dict[str, tuple[int, int]]:
    """Part of the model to its number of parameters and their bytes.

    Packed weights have parameters that they mean, `tensors`, and bytes of what stands for them, `in_files`.
    """
    numbers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    is_tower = isinstance(config, LlamoeVisionConfig)
    for key, tensor in tensors.items():
        numbers["vision tower" if is_tower else part_of(key)] += tensor.numel
    for key, tensor in in_files.items():
        sizes["vision tower" if is_tower else part_of(key)] += tensor.nbytes
    return {part: (count, sizes[part]) for part, count in numbers.items()}


def layers_of(config: LlamoeBaseConfig | None, tensors: Mapping[str, LazyTensor]) -> list[int]:
    """Bytes of each decoder layer; for a tower alone, of each of the tower's layers."""
    sizes: dict[int, int] = defaultdict(int)
    for key, tensor in tensors.items():
        of_tower = re.search(r"(^|\.)vision_model\.", key) and not isinstance(config, LlamoeVisionConfig)
        if not of_tower and (number := re.search(r"(?:^|\.)(?:layers|resblocks)\.(\d+)\.", key)):
            sizes[int(number[1])] += tensor.nbytes
    return [sizes[layer] for layer in sorted(sizes)]
