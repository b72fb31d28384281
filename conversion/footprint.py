"""How many bytes the tensors of a model take: as they are stored, and as they would be to run.

The arithmetic of quantized weights is that of bitsandbytes, whose stored bytes are known from shapes alone.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ..configuration import LlamoeVisionConfig
from ..configuration.base import LlamoeBaseConfig
from ..modeling.checkpoints import part_of

# As bitsandbytes stores a linear layer: bytes of a weight with so many rows and numbers.
_LINEAR_BYTES: dict[str, Callable[[int, int], int]] = {
    "int8": lambda rows, numbers: numbers + 4 * rows,  # a float32 scale for each row
    "int4": lambda rows, numbers: -(-numbers // 2) + 4 * -(-numbers // 64),  # and for each 64 numbers
}
NOTE = (
    "int8 and int4: linear layers, as bitsandbytes stores them. Routed experts stay in bfloat16, since quantizers pass "
    "them over, and so do embeddings, routers, norms, the head and the tower's patch embedding."
)


class Header(Protocol):
    """What is asked of a tensor here; lazy tensors have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Need:
    """Bytes of memory that a model takes to run.

    Attributes:
        weights: of the weights; routed experts stay in bfloat16, as transformers' quantizers leave them.
        cache: keys and values in bfloat16, for the context and rows asked for.
    """

    weights: int
    cache: int


def needs_of(shapes: Mapping[str, tuple[int, ...]], cached: int) -> dict[str, Need]:
    """Count the memory that a model takes in bfloat16, int8 and int4; see `NOTE`.

    Args:
        shapes: stock key to shape, experts stacked.
        cached: bytes of the cache.
    """
    plain = sum(2 * math.prod(shape) for shape in shapes.values())
    needs = {"bfloat16": Need(plain, cached)}
    for name, size_of in _LINEAR_BYTES.items():
        weights = sum(
            size_of(shape[0], math.prod(shape)) if _is_linear(key, shape) else 2 * math.prod(shape)
            for key, shape in shapes.items()
        )
        needs[name] = Need(weights, cached)
    return needs


def _is_linear(key: str, shape: tuple[int, ...]) -> bool:
    others = ("embed_tokens.weight", "lm_head.weight", "router.weight", "patch_embedding.linear.weight")
    return len(shape) == 2 and key.endswith(".weight") and not key.endswith(others)


def split_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Give the keys and shapes with each stacked expert as linear layers, as `split_experts` does with tensors."""
    result = {}
    for key, shape in shapes.items():
        prefix, _, name = key.rpartition(".")
        if name not in ("gate_up_proj", "down_proj") or len(shape) != 3:
            result[key] = shape
            continue
        experts, inputs, outputs = shape
        parts = ["down_proj"] if name == "down_proj" else ["gate_proj", "up_proj"]
        for expert in range(experts):
            for part in parts:
                result[f"{prefix}.{expert}.{part}.weight"] = (outputs // len(parts), inputs)
    return result


def dtypes_of(tensors: Iterable[Header]) -> dict[str, tuple[int, int]]:
    """Give each dtype with its number of tensors and their bytes."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        count, size = found[name]
        found[name] = (count + 1, size + _nbytes(tensor))
    return dict(found)


def parts_of(config: LlamoeBaseConfig | None, tensors: Mapping[str, Header]) -> dict[str, tuple[int, int]]:
    """Give each part of the model with its numbers and bytes."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for key, tensor in tensors.items():
        part = "vision tower" if isinstance(config, LlamoeVisionConfig) else part_of(key)
        numbers, size = found[part]
        found[part] = (numbers + math.prod(tensor.shape), size + _nbytes(tensor))
    return dict(found)


def layers_of(config: LlamoeBaseConfig | None, tensors: Mapping[str, Header]) -> list[int]:
    """Give the bytes of each layer of the decoder; of a tower by itself, of the tower."""
    sizes: dict[int, int] = defaultdict(int)
    for key, tensor in tensors.items():
        of_tower = re.search(r"(^|\.)vision_model\.", key) and not isinstance(config, LlamoeVisionConfig)
        if not of_tower and (number := re.search(r"(?:^|\.)(?:layers|resblocks)\.(\d+)\.", key)):
            sizes[int(number[1])] += _nbytes(tensor)
    return [sizes[layer] for layer in sorted(sizes)]


def _nbytes(tensor: Header) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
