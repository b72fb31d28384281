"""GPTQ's weights of 4 bits, as AutoGPTQ and GPTQModel write them.

`qweight` `[I / 8, O]` has eight inputs a word, `qzeros` `[G, O / 8]` eight outputs, lowest bits first; `scales` is
`[G, O]`. The first version of the format stores zero points minus 1, `gptq_v2` unchanged. `g_idx` `[I]` is the group of
each input: with `desc_act` the inputs of a group are usually not consecutive.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..format import Sizes
from .layout import Layout, Unpacked, checked_size, groups_out_of_order, nibbles, unread

_ONES = 0x11111111


@dataclass(frozen=True)
class Gptq(Layout):
    """Weights of 4 bits in one of GPTQ's two versions.

    Attributes:
        has_true_zeros: zero points are stored unchanged, not minus 1.
    """

    group_size: int | None
    has_true_zeros: bool = False
    method = "gptq"
    kinds = ("qweight", "qzeros", "scales", "g_idx")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Gptq":
        """Return the layout that a `quantization_config` describes.

        Raises:
            ConfigurationError: other bits or formats, or layers that differ in them.
        """
        if config.get("bits") != 4:
            raise unread("bits", config.get("bits"), "4")
        if config.get("is_marlin_format"):
            raise unread("is_marlin_format", True, "GPTQ's own format")
        version = config.get("checkpoint_format") or config.get("format") or "gptq"
        if version not in ("gptq", "gptq_v2"):
            raise unread("checkpoint_format", version, "'gptq' or 'gptq_v2'")
        # A rule without settings only names layers that are not quantized.
        if rules := [rule for rule in (config.get("dynamic") or {}).values() if rule]:
            raise unread("dynamic", rules, "one kind of weights")
        return cls(checked_size(config.get("group_size", 128)), version == "gptq_v2")

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        num_out, num_in = sizes
        groups = self.num_groups(num_in)
        return {
            "qweight": (-(-num_in // 8), num_out),
            "qzeros": (groups, -(-num_out // 8)),
            "scales": (groups, num_out),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        codes = nibbles(tensors["qweight"].T)[:, : sizes[1]]
        zeros = tensors["qzeros"]
        if not self.has_true_zeros:
            # Add 1 to the whole words, as GPTQ subtracted it from them: a zero point of 0 borrowed from its neighbour.
            zeros = zeros + _ONES
        zero = nibbles(zeros)[:, : sizes[0]].T
        groups = groups_out_of_order(tensors.get("g_idx"), self.group_size)
        return Unpacked(codes, tensors["scales"].T, zero, groups)
