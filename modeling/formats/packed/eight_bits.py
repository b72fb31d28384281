"""8-bit weights with scales, float8 (E4M3) or int8, which are loaded as plain weights.

`weight` is `[O, I]`. There is a scale for the whole matrix, for each output, or for each block of outputs and inputs.
compressed-tensors (`float-quantized`, `int-quantized`) and fbgemm name it `weight_scale`; transformers' `fp8` names it
`weight_scale_inv`, although weights are multiplied by it, too.

Each expert has tensors of its own, or a tensor holds all experts (a stack): fbgemm stores Llama 4 as the stacks
`gate_up_proj` and `gate_up_proj_scale`. transformers' `fp8` stores Mixtral's codes expert by expert, but its scales in
stacks.

Shapes: O outputs, I inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from ..format import Format, Sizes
from ..int8 import Int8
from .layout import Layout, Unpacked, unread

logger = logging.get_logger("llamoe")

_BLOCKS = {"tensor": (0, 0), "channel": (1, 0)}


@dataclass(frozen=True)
class EightBits(Layout):
    """Weights of 8 bits.

    Attributes:
        block: how many outputs and inputs share a scale; 0 for all of them.
        method: the `quant_method` in config.json.
        kinds: the last parts of the names of codes and scales.
    """

    block: tuple[int, int] = (1, 0)
    method: str = "compressed-tensors"
    kinds: tuple[str, str] = ("weight", "weight_scale")
    group_size = None
    is_int4 = False

    @property
    def in_stacks(self) -> tuple[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "", self.kinds[1].removeprefix("weight")

    def holds(self, kind: str, dtype: str) -> bool:
        is_codes = kind.endswith(("weight", "_proj")) and dtype.startswith(("F8", "I8"))
        return is_codes or kind == self.kinds[1] or kind.endswith("_proj" + self.in_stacks[1])

    def num_groups(self, num_in: int) -> int:
        return -(-num_in // self.block[1]) if self.block[1] else 1

    def _unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        scale = tensors[self.kinds[1]].float()
        shape = [-(-sizes[0] // self.block[0]) if self.block[0] else 1, self.num_groups(sizes[1])]
        # Files may leave out axes of size 1.
        scale = scale.reshape(shape)
        # Attention masks keys that are NaN, so logits would be wrong without an error.
        if not scale.isfinite().all():
            raise ValueError(f"{self.kinds[1]} is NaN or infinite: copy the checkpoint again.")
        scale = scale.repeat_interleave(self.block[0] or sizes[0], 0)[: sizes[0]]
        groups = torch.arange(sizes[1]) // self.block[1] if self.block[1] else None
        return Unpacked(tensors["weight"], scale, torch.zeros_like(scale), groups)

    def parts_of(
        self, matrices: Sequence[Mapping[str, torch.Tensor]], sizes: Sizes, form: Format
    ) -> list[torch.Tensor] | None:
        """Return int8's parts if the codes are int8 with a scale for each output, else None."""
        is_int8 = matrices[0]["weight"].dtype == torch.int8 and self.block == _BLOCKS["channel"]
        if not (is_int8 and isinstance(form, Int8)):
            return None
        unpacked = [self.unpack(tensors, sizes) for tensors in matrices]
        scale = torch.cat([matrix.scale for matrix in unpacked])
        return [torch.cat([matrix.codes for matrix in unpacked]), scale[:, 0].bfloat16()]


def eight_bits(scheme: Mapping[str, Any], activations: Mapping[str, Any] | None) -> EightBits:
    """Return the layout of compressed-tensors' weights in 8 bits.

    Args:
        scheme: fields of `weights` in `config_groups`.
        activations: how activations are quantized; None if they are not.

    Raises:
        ConfigurationError: weights with zero points, or scales for other groups.
    """
    strategy = scheme["strategy"]
    block = scheme["block_structure"] if strategy == "block" else _BLOCKS.get(strategy)
    if scheme["num_bits"] != 8 or scheme["symmetric"] is False or block is None:
        raise unread("config_groups: weights", scheme, "symmetric 8 bits by 'channel', 'tensor' or 'block'")
    if activations:
        is_dynamic = "dynamic" if activations.get("dynamic") else "static"
        _warn(f"{activations.get('num_bits')} bits, {is_dynamic}")
    return EightBits(_pair("config_groups: weights.block_structure", block))


def fine_grained_fp8(config: Mapping[str, Any]) -> EightBits:
    """Return the layout of the method `fp8`, of transformers or AutoFP8."""
    _warn(f"8 bits, {config.get('activation_scheme', 'dynamic')}")
    # AutoFP8's configs have no such field.
    scale = "weight_scale_inv" if "weight_block_size" in config else "weight_scale"
    block = config.get("weight_block_size") or _BLOCKS["tensor"]
    return EightBits(_pair("weight_block_size", block), "fp8", ("weight", scale))


def fbgemm_fp8(config: Mapping[str, Any]) -> EightBits:
    """Return the layout of the method `fbgemm_fp8`."""
    _warn("8 bits, dynamic")
    return EightBits(method="fbgemm_fp8")


def _pair(key: str, block: Any) -> tuple[int, int]:
    if not isinstance(block, list | tuple) or [*map(type, block)] != [int, int]:
        raise unread(key, block, "a number of outputs and one of inputs")
    return (block[0], block[1])


def _warn(scheme: str) -> None:
    # Once, since a command may read a folder's config several times.
    logger.warning_once(
        "The folder's 8-bit weights become 16-bit weights, and activations are not quantized (%s in config.json): "
        "logits differ from those of programs that quantize them.",
        scheme,
    )
