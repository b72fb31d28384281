"""compressed-tensors' `float-quantized` weights: numbers of 8 bits, E4M3, times a scale.

`weight` `[O, I]` float8 and `weight_scale` `[O, 1]`, or `[1]` for a whole matrix. int4 cannot hold them: they are read
as plain weights.

Shapes: O outputs, I inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.utils import logging

from ..format import Sizes
from .layout import Layout, Unpacked, unread

logger = logging.get_logger("llamoe")


@dataclass(frozen=True)
class Float8(Layout):
    """Weights of 8 bits in the format `float-quantized`.

    Attributes:
        is_per_tensor: whether a matrix has one scale.
    """

    is_per_tensor: bool = False
    method = "compressed-tensors"
    kinds = ("weight", "weight_scale")
    is_int4: ClassVar[bool] = False

    @classmethod
    def from_scheme(cls, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> "Float8":
        """The layout of weights by their scheme in `config_groups`; warns of activations, which stay as they are.

        Raises:
            ConfigurationError: other weights.
        """
        kind = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
        if kind not in (("float", 8, "channel"), ("float", 8, "tensor")):
            raise unread("config_groups: weights", kind, "('float', 8) by 'channel' or 'tensor'")
        if activations:
            logger.warning(
                "The folder's weights in 8 bits are held in 16, and its scheme for activations (%s bits, %s) is not "
                "applied: logits differ from those of programs that do.",
                activations.get("num_bits"),
                "dynamic" if activations.get("dynamic") else "static",
            )
        return cls(None, kind[2] == "tensor")

    def holds(self, kind: str, dtype: str) -> bool:
        return kind == "weight_scale" or kind == "weight" and dtype.startswith("F8")

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {"weight": sizes, "weight_scale": (1,) if self.is_per_tensor else (sizes[0], 1)}

    def unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        scale = tensors["weight_scale"].float().expand(sizes[0], 1)
        return Unpacked(tensors["weight"], scale, torch.zeros_like(scale))
