"""GPUs that people have: what torch's kernels and ours do on them by compute capability, and how fast they read.

Capabilities, memory and bandwidths are the makers'. What is expected is reasoned from torch's source and from our own
limits, not measured: `prove_gpu` compares a card with it.
"""

from typing import NamedTuple

import torch


class Card(NamedTuple):
    """A GPU.

    Attributes:
        name: as torch names it, or a part of that.
        capability: compute capability.
        gigabytes: memory, of 1e9 bytes.
        bandwidth: of the memory, in terabytes (1e12 bytes) a second.
        processors: multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    gigabytes: float
    bandwidth: float
    processors: int

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the card multiplies a dtype in hardware."""
        return dtype in (torch.float16, torch.float32) or (
            dtype == torch.bfloat16 and self.capability >= (8, 0)
        )

    def sdpa_kernel(
        self, dtype: torch.dtype, head_dim: int, shares_keys: bool, is_square: bool, has_mask: bool
    ) -> str:
        """The kernel that torch's `scaled_dot_product_attention` takes (ATen/native/transformers/cuda/sdp_utils.cpp).

        cuDNN's, which torch prefers on some cards, has the limits of "flash" here and counts as that.

        Args:
            dtype: of queries, keys and values.
            head_dim: size of a head.
            shares_keys: whether there are fewer key heads than query heads.
            is_square: whether it is not causal, or has as many keys as queries.
            has_mask: whether a mask is given.
        """
        is_half = dtype in (torch.float16, torch.bfloat16)
        if self.capability >= (8, 0) and is_half and head_dim <= 256 and is_square and not has_mask:
            return "flash"
        if self.takes(dtype) and not shares_keys:
            return "efficient"
        return "math"

    def grouped_product_waits(self, dtype: torch.dtype) -> bool:
        """Whether torch's `grouped_mm` asks the host for the groups (ATen/native/cuda/GroupedBlas.cpp)."""
        return dtype != torch.bfloat16 or self.capability[0] not in (9, 10)

    def expects(self) -> dict[str, str]:
        """What llamoe expects of the card, in words."""
        is_ampere = self.capability >= (8, 0)
        groups = (
            "on the device"
            if not self.grouped_product_waits(torch.bfloat16)
            else "by the host, one wait a product"
        )
        return {
            "dtype": "bfloat16" if is_ampere else "float16: bfloat16 has no hardware here",
            "attention": "flash"
            if is_ampere
            else "memory-efficient, with keys repeated for every query head",
            "few rows of experts": "llamoe's kernels" if is_ampere else "a loop over the hit experts",
            "many rows of experts": f"torch's grouped product, groups counted {groups}"
            if is_ampere
            else "a loop over the hit experts",
        }


CARDS = {
    card.name: card
    for card in (
        Card("T4", (7, 5), 16, 0.320, 40),
        Card("A100", (8, 0), 80, 2.039, 108),
        Card("RTX 3090", (8, 6), 24, 0.936, 82),
        Card("RTX 4090", (8, 9), 24, 1.008, 128),
        Card("H100", (9, 0), 80, 3.35, 132),
        Card("H200", (9, 0), 141, 4.8, 132),
        Card("RTX 5090", (12, 0), 32, 1.792, 170),
    )
}


def card_named(name: str, capability: tuple[int, int]) -> Card | None:
    """The card whose name is part of torch's; None for one that is not in the table."""
    return next(
        (card for card in CARDS.values() if card.name in name and card.capability == capability), None
    )
