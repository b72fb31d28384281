"""The memory for offloaded experts, and its division into slots for experts."""

from collections.abc import Mapping

import torch

from ..moe import Experts

# Default share of the available memory that slots for experts may use.
_SHARE_OF_AVAILABLE = 0.5


def default_size(device: torch.device) -> int:
    """Return the default size in bytes of all slots: half of the device's memory that is available now."""
    import psutil

    if device.type == "cpu":
        available = psutil.virtual_memory().available
    else:
        available, _ = torch.accelerator.get_memory_info(device)
    return int(available * _SHARE_OF_AVAILABLE)


def bytes_of_expert(experts: Experts) -> int:
    """Return the bytes of one expert's matrices."""
    return sum(tensor[0].nbytes for tensor in [*experts.parameters(), *experts.buffers()])


def divide(layers: Mapping[str, Experts], budget: int) -> list[tuple[list[str], int]]:
    """Group layers whose experts have equal shapes and dtypes; return each group with its number of slots.

    Each group gets one slot for an expert; the rest of `budget` (bytes) is shared in proportion to the groups' sizes.

    Raises:
        ValueError: the budget has no room for one expert of each group.
    """
    of_kind: dict[tuple, list[str]] = {}
    for layer, experts in layers.items():
        tensors = [*experts.named_parameters(), *experts.named_buffers()]
        of_kind.setdefault(tuple((name, it.shape, it.dtype) for name, it in tensors), []).append(layer)
    kinds = list(of_kind.values())
    sizes = [bytes_of_expert(layers[kind[0]]) for kind in kinds]
    if budget < sum(sizes):
        raise ValueError(
            f"experts_memory={budget:,} bytes has no room for one expert of each size. Give at least {sum(sizes):,}."
        )
    more = [sum(layers[layer].num_experts for layer in kind) - 1 for kind in kinds]
    rest = sum(count * size for count, size in zip(more, sizes, strict=True))
    spare = min(budget - sum(sizes), rest)
    return [(kind, 1 + (count and count * spare // rest)) for kind, count in zip(kinds, more, strict=True)]
