"""How much memory holds experts, and for how many of each kind there is room; what `ExpertsMemory` takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch

from ...configuration.sizes import bytes_of
from ..moe import Experts

# Of the memory that is available when a model is loaded, the share that experts may take where nobody names a size.
_SHARE_OF_AVAILABLE = 0.5


@dataclass(frozen=True)
class ExpertsMemory:
    """What `from_pretrained(experts_memory=…)` takes where a size alone does not say enough.

    Attributes:
        size: bytes, or a text like "8GB" or "8GiB": memory for recently used experts. Of experts on disk it is RAM, of
            experts in RAM memory of the accelerator. None: half of what is available, at most all of these experts.
        readers: threads that read from files.
        direct: whether files are read past the system's page cache; None: for matrices from 1 MiB, where the file
            system can.
        misses: "compute" computes rows of an expert that is not on the accelerator where it lies; "bring" copies it;
            "auto" computes few rows, and copies for more.
    """

    size: int | str | None = None
    readers: int = 8
    direct: bool | None = None
    misses: Literal["auto", "compute", "bring"] = "auto"

    def __post_init__(self):
        """Raise a `ValueError` for values that mean nothing."""
        if self.size is not None:
            object.__setattr__(self, "size", bytes_of("experts_memory", self.size, least=1))
        if self.misses not in ("auto", "compute", "bring"):
            raise ValueError(f"ExpertsMemory(misses={self.misses!r}): give 'auto', 'compute' or 'bring'.")


def default_size(device: torch.device) -> int:
    """Bytes for experts where nobody names a size: half of the device's memory that is available now."""
    import psutil

    if device.type == "cpu":
        available = psutil.virtual_memory().available
    else:
        available, _ = torch.accelerator.get_memory_info(device)
    return int(available * _SHARE_OF_AVAILABLE)


def bytes_of_expert(experts: Experts) -> int:
    """Bytes of one expert's matrices in memory."""
    return sum(tensor[0].nbytes for tensor in [*experts.parameters(), *experts.buffers()])


def divide(layers: Mapping[str, Experts], budget: int) -> list[tuple[list[str], int]]:
    """Layers whose experts have the same sizes, and may use the same slots, and for how many experts there is room.

    Each kind has room for one expert at least, and shares what is left with the others by their sizes.

    Raises:
        ValueError: there is not room for one expert of each kind.
    """
    found: dict[tuple, list[str]] = {}
    for layer, experts in layers.items():
        tensors = [*experts.named_parameters(), *experts.named_buffers()]
        found.setdefault(tuple((name, each.shape, each.dtype) for name, each in tensors), []).append(layer)
    kinds = list(found.values())
    sizes = [bytes_of_expert(layers[kind[0]]) for kind in kinds]
    if budget < sum(sizes):
        largest = max(range(len(kinds)), key=sizes.__getitem__)
        raise ValueError(
            f"experts_memory={budget:,} bytes: one expert of {kinds[largest][0]} takes {sizes[largest]:,} bytes"
            f"{f', and there are {len(kinds)} kinds of experts' if len(kinds) > 1 else ''}. Give at least "
            f"{sum(sizes):,}."
        )
    more = [sum(layers[layer].num_experts for layer in kind) - 1 for kind in kinds]
    rest = sum(count * size for count, size in zip(more, sizes, strict=True))
    share = min(1, Fraction(budget - sum(sizes), rest)) if rest else 0
    return [(kind, 1 + int(share * count)) for kind, count in zip(kinds, more, strict=True)]
