"""compressed-tensors' `pack-quantized` weights of 4 bits, which llm-compressor writes.

`weight_packed` `[O, I / 8]` has eight inputs a word, lowest bits first, as codes of 0 to 15. Signed codes are stored
plus 8, and so are zero points: symmetric weights have a zero of 8. Zero points are packed along outputs.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..format import Sizes
from .eight_bits import EightBits
from .layout import Layout, Unpacked, checked_size, groups_out_of_order, nibbles, unread


@dataclass(frozen=True)
class CompressedTensors(Layout):
    """Weights of 4 bits in the format `pack-quantized`.

    Attributes:
        is_symmetric: whether there are no zero points.
    """

    group_size: int | None
    is_symmetric: bool = True
    method = "compressed-tensors"
    kinds = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Layout:
        """Return the layout that a `quantization_config` describes.

        Raises:
            ConfigurationError: weights of other bits or kinds, several kinds, or quantized activations.
        """
        groups = [*(config.get("config_groups") or {}).values()]
        schemes = [group.get("weights") for group in groups]
        if not schemes or any(scheme != schemes[0] for scheme in schemes):
            raise unread("config_groups", sorted(config.get("config_groups") or ()), "one kind of weights")
        scheme = schemes[0] or {}
        # Transforms rotate the activations, so without them the layers' weights would be wrong.
        if transforms := (config.get("transform_config") or {}).get("config_groups"):
            raise unread("transform_config", sorted(transforms), "a model without transforms")
        formats = {group.get("format") or config.get("format") for group in groups}
        if formats <= {"float-quantized", "int-quantized"}:
            return EightBits.from_scheme(scheme, groups[0].get("input_activations"))
        if formats != {"pack-quantized"}:
            raise unread(
                "format", config.get("format"), "'pack-quantized', 'float-quantized' or 'int-quantized'"
            )
        for name in ("input_activations", "output_activations"):
            if any(group.get(name) for group in groups):
                raise unread(f"config_groups: {name}", schemes[0], "a model that quantizes weights alone")
        kind = scheme.get("type", "int"), scheme.get("num_bits")
        if kind != ("int", 4):
            raise unread("config_groups: weights of type and num_bits", kind, "('int', 4)")
        size, strategy = scheme.get("group_size"), scheme.get("strategy")
        strategy = strategy or ("channel" if size in (None, -1) else "group")
        if strategy not in ("group", "channel"):
            raise unread("config_groups: weights.strategy", strategy, "'group' or 'channel'")
        size = checked_size(None if strategy == "channel" else size)
        return cls(size, scheme.get("symmetric", True))

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        num_out, num_in = sizes
        groups = self.num_groups(num_in)
        shapes = {"weight_packed": (num_out, -(-num_in // 8)), "weight_scale": (num_out, groups)}
        return shapes if self.is_symmetric else shapes | {"weight_zero_point": (-(-num_out // 8), groups)}

    def unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        codes = nibbles(tensors["weight_packed"])[:, : sizes[1]]
        scale, groups = tensors["weight_scale"], tensors.get("weight_g_idx")
        if self.is_symmetric:
            zero = codes.new_full(scale.shape, 8)
        else:
            zero = nibbles(tensors["weight_zero_point"].T).T[: sizes[0]]
        return Unpacked(codes, scale, zero, groups_out_of_order(groups, self.group_size))
