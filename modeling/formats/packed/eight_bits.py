"""8-bit weights, float8 (E4M3) or int8, with scales, which are loaded as plain or int8 weights.

`weight` is `[O, I]`. There is a scale for the whole matrix, for each output, or for each block of outputs and inputs.
compressed-tensors (`float-quantized`, `int-quantized`) and fbgemm name it `weight_scale`; transformers' `fp8` names it
`weight_scale_inv`, although it is a factor, too.

Experts are stored one by one, or in the model's stacks: fbgemm's of Llama 4 with `gate_up_proj_scale` beside
`gate_up_proj`. transformers stores Mixtral's `fp8` codes one by one, and their scales in stacks.

Shapes: O outputs, I inputs, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from ....configuration.errors import CheckpointError
from ..format import Sizes
from .layout import Layout, Unpacked, unread

logger = logging.get_logger("llamoe")

# How the names of codes end: of a linear layer, and of a stack of experts.
_CODES = ("weight", "_proj")
_BLOCKS = {"tensor": (0, 0), "channel": (1, 0)}


@dataclass(frozen=True)
class EightBits(Layout):
    """Weights of 8 bits.

    Attributes:
        block: outputs and inputs that share a scale; 0 for all of them.
        dtype: prefix of the weights' dtype in safetensors' spelling.
        method: the `quant_method` in config.json.
        kinds: the last parts of the names of codes and scales.
    """

    block: tuple[int, int] = (1, 0)
    dtype: str = "F8"
    method: str = "compressed-tensors"
    kinds: tuple[str, str] = ("weight", "weight_scale")
    group_size = None
    is_int4 = False

    @classmethod
    def from_scheme(cls, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> "EightBits":
        """Return the layout for a scheme of weights in `config_groups`.

        Raises:
            ConfigurationError: other weights.
        """
        strategy, kind = weights.get("strategy"), weights.get("type")
        block = weights.get("block_structure") if strategy == "block" else _BLOCKS.get(str(strategy))
        is_known = (
            kind in ("float", "int") and weights.get("num_bits") == 8 and weights.get("symmetric", True)
        )
        if not is_known or not _is_block(block):
            found = {name: weights.get(name) for name in ("type", "num_bits", "symmetric", "strategy")}
            raise unread(
                "config_groups: weights", found, "symmetric 8 bits by 'channel', 'tensor' or 'block'"
            )
        if activations:
            is_dynamic = "dynamic" if activations.get("dynamic") else "static"
            _warn(f"{activations.get('num_bits')} bits, {is_dynamic}")
        return cls(tuple(block), "F8" if kind == "float" else "I8")

    @property
    def is_by_output(self) -> bool:
        """True if the format int8 can hold the codes and scales unchanged."""
        return self.dtype == "I8" and self.block == (1, 0)

    @property
    def in_stacks(self) -> tuple[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What follows a stack's name in the names of its codes and scales."""
        return "", self.kinds[1].removeprefix("weight")

    @property
    def stacked_scales(self) -> tuple[str, ...]:
        return ("_proj" + self.in_stacks[1],)

    def holds(self, kind: str, dtype: str) -> bool:
        is_codes = kind.endswith(_CODES) and dtype.startswith(self.dtype)
        return is_codes or kind == self.kinds[1] or kind.endswith(self.stacked_scales)

    def nbytes_loaded(self, kind: str, nbytes: int) -> int:
        return 2 * nbytes if kind.endswith(_CODES) else 0

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        scales = tuple(-(-size // each) if each else 1 for size, each in zip(sizes, self.block, strict=True))
        return {"weight": sizes, self.kinds[1]: scales}

    def unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        scale = tensors[self.kinds[1]].float().reshape(self.shapes(sizes)[self.kinds[1]])
        # Check here: attention masks NaN keys out, so logits would be wrong without an error.
        if not scale.isfinite().all():
            raise CheckpointError(f"{self.kinds[1]} is NaN or infinite: copy the checkpoint again.")
        scale = scale.repeat_interleave(self.block[0] or sizes[0], 0)[: sizes[0]]
        groups = torch.arange(sizes[1]) // self.block[1] if self.block[1] else None
        return Unpacked(tensors["weight"], scale, torch.zeros_like(scale), groups)

    def weight_in_stack(
        self, codes: Sequence[torch.Tensor], scale: torch.Tensor, is_transposed: bool
    ) -> torch.Tensor:
        """Return an expert's matrix as the model's stack has it, `[O, I]` or transposed.

        Args:
            codes: the matrix, or gate and up, in the stack's order of axes.
            scale: in the same order.
            is_transposed: whether that is `[I, O]`.
        """
        matrix = torch.cat([each.view(torch.uint8) for each in codes]).view(codes[0].dtype)
        if is_transposed:
            matrix, scale = matrix.T, scale.T
        weight = self.weight_of({"weight": matrix, self.kinds[1]: scale}, (matrix.shape[0], matrix.shape[1]))
        return weight.T if is_transposed else weight


def fine_grained_fp8(config: Mapping[str, Any]) -> EightBits:
    """Return the layout of the method `fp8`, of transformers or AutoFP8.

    Raises:
        ConfigurationError: invalid blocks, or experts in another dtype.
    """
    block = config.get("weight_block_size") or _BLOCKS["tensor"]
    if not _is_block(block):
        raise unread("weight_block_size", block, "a number of outputs and one of inputs")
    if config.get("expert_dtype", "fp8") != "fp8":
        raise unread("expert_dtype", config["expert_dtype"], "'fp8'")
    _warn(f"8 bits, {config.get('activation_scheme', 'dynamic')}")
    # AutoFP8's configs have no such field.
    scale = "weight_scale_inv" if "weight_block_size" in config else "weight_scale"
    return EightBits(tuple(block), method="fp8", kinds=("weight", scale))


def fbgemm_fp8(config: Mapping[str, Any]) -> EightBits:
    """Return the layout of the format `fbgemm_fp8`."""
    _warn("8 bits, dynamic")
    return EightBits(method="fbgemm_fp8")


def _is_block(block: Any) -> bool:
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    return is_pair and all(type(size) is int and size >= 0 for size in block)


def _warn(scheme: str) -> None:
    # A command may read one folder's config several times.
    logger.warning_once(
        "The folder's weights in 8 bits are held in 16, and its scheme for activations (%s) is not applied: logits "
        "differ from those of programs that do.",
        scheme,
    )
