"""AWQ's weights of 4 bits in the format `gemm`, as AutoAWQ writes them.

`qweight` `[I, O / 8]` and `qzeros` `[G, O / 8]` have eight outputs a word, lowest bits first in the order 0, 2, 4, 6,
1, 3, 5, 7; `scales` is `[G, O]`.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..format import Sizes
from .layout import Layout, Unpacked, checked_size, unread

# Position in the word of each of eight outputs.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq(Layout):
    """Weights of 4 bits in the format `gemm`."""

    group_size: int | None
    method = "awq"
    kinds = ("qweight", "qzeros", "scales")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Awq":
        """Return the layout that a `quantization_config` describes.

        Raises:
            ConfigurationError: other bits or formats.
        """
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise unread("bits", bits, "4")
        version = config.get("version") or config.get("format") or config.get("checkpoint_format") or "gemm"
        if str(version).lower() != "gemm":
            raise unread("version", version, "'gemm'")
        return cls(checked_size(config.get("group_size", config.get("q_group_size", 128))))

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        num_out, num_in = sizes
        groups, words = self.num_groups(num_in), -(-num_out // 8)
        return {"qweight": (num_in, words), "qzeros": (groups, words), "scales": (groups, num_out)}

    def unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        codes, zero = (_outputs_first(tensors[kind]) for kind in ("qweight", "qzeros"))
        return Unpacked(codes, tensors["scales"].T, zero)


def _outputs_first(words: torch.Tensor) -> torch.Tensor:
    """Unpack words `[n, O / 8]` to codes `[O, n]`."""
    words = words.T.contiguous()
    return torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in _PLACES], 1).flatten(0, 1)
