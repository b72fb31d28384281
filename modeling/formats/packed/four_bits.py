"""4-bit weights of compressed-tensors, GPTQ and AWQ, in words of eight codes, and their conversion to int4.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional as F
from transformers.utils import logging

from ....configuration.quantization import GROUP_SIZES
from ...kernels import cpp_pack_words
from ..format import Format, Sizes
from ..int4 import Int4
from ..int4_layout import pack
from .eight_bits import eight_bits
from .layout import REMEDY, Layout, Unpacked, unread

logger = logging.get_logger("llamoe")

# The fields of compressed-tensors' `weights` that say what the numbers mean.
_FIELDS = ("type", "num_bits", "symmetric", "strategy", "group_size", "block_structure")
_ONES = 0x11111111


@dataclass(frozen=True)
class FourBits(Layout):
    """Codes of 4 bits, 0 to 15, eight in a 32-bit word.

    Attributes:
        positions: None if words are `[O, I / 8]` with eight inputs each, lowest bits first. If words are `[O / 8, I]`
            with eight outputs each, the position of each output in its word.
    """

    group_size: int | None
    positions: ClassVar[tuple[int, ...] | None] = None

    def num_groups(self, num_in: int) -> int:
        return 1 if self.group_size is None else -(-num_in // self.group_size)

    def shape_of_codes(self, sizes: Sizes) -> tuple[int, ...]:
        num_out, num_in = sizes
        return (num_out, -(-num_in // 8)) if self.positions is None else (-(-num_out // 8), num_in)

    def codes_of(self, stored: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        codes = _nibbles(stored) if self.positions is None else _nibbles(stored.T, self.positions).T
        return codes[: sizes[0], : sizes[1]]

    def parts_of(
        self, matrices: Sequence[Mapping[str, torch.Tensor]], sizes: Sizes, form: Format
    ) -> list[torch.Tensor] | None:
        """Convert matrices to int4's parts: keep the codes, round scales and offsets to bfloat16.

        A scale of a whole output is repeated for each of int4's groups. int4's groups are consecutive inputs; weights
        with other groups are quantized again.
        """
        if not isinstance(form, Int4):
            return None
        unpacked = [self.unpack(tensors, sizes) for tensors in matrices]
        if any(matrix.group_of_input is not None for matrix in unpacked):
            logger.warning_once(
                "Weights whose groups are not consecutive inputs (desc_act) are quantized again, which loses some "
                "precision: int4 has no such groups."
            )
            return form.quantize(torch.cat([self._weight_of(matrix, sizes) for matrix in unpacked]))
        words = [matrix.codes for matrix in unpacked]
        (shape, dtype), _ = form.parts((len(matrices) * sizes[0], sizes[1]))
        packed = torch.empty(shape, dtype=dtype, device=words[0].device)
        rows = zip(words, packed.split(sizes[0]), strict=True)
        if not all(cpp_pack_words(matrix, self.positions, target) for matrix, target in rows):
            packed = pack_for(form, torch.cat([self.codes_of(matrix, sizes) for matrix in words]))
        scale, zero = (torch.cat([matrix[part] for matrix in unpacked]).float() for part in (1, 2))
        return [packed, scales_for(form, sizes[1], scale, scale * (8 - zero))]

    def _groups_out_of_order(self, groups: torch.Tensor | None) -> torch.Tensor | None:
        """Return the stored group of each input, `[I]`; None if it is missing, or if groups are consecutive inputs."""
        if groups is None or self.group_size is None or (groups < 0).all():
            return None
        in_order = torch.arange(len(groups), device=groups.device) // self.group_size
        return None if torch.equal(groups, in_order.to(groups.dtype)) else groups.long()


def pack_for(form: Int4, codes: torch.Tensor) -> torch.Tensor:
    """Pack codes `[O, I]` uint8 as int4's first part."""
    num_in = codes.shape[1]
    # Padding may be any code, since it is multiplied by inputs of 0.
    return pack(F.pad(codes, (0, form.padded(num_in) - num_in), value=8).contiguous())


def scales_for(form: Int4, num_in: int, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return int4's scales and offsets, `[G, O, 2]` bfloat16.

    Args:
        form: the format.
        num_in: inputs of the matrix.
        scale: `[O, G]`; or `[O, 1]`, which is repeated for all groups.
        offset: the value of code 8, in the same shape.
    """
    num_groups = form.padded(num_in) // form.group_size
    return torch.stack([part.expand(-1, num_groups).T for part in (scale, offset)], -1).to(torch.bfloat16)


def _nibbles(words: torch.Tensor, positions: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unpack eight codes from each 32-bit word, `[n, w]` int32 to `[n, 8 w]` uint8.

    Args:
        words: with the first code in the lowest bits.
        positions: the position of each code in its word; None for 0 to 7.

    Raises:
        ValueError: the words have another dtype, so that codes would be taken from the wrong bytes.
    """
    if words.dtype != torch.int32:
        raise ValueError(f"words of eight codes are {words.dtype}, not torch.int32. {REMEDY}")
    bytes_ = words.contiguous().view(torch.uint8)
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), -1).view(len(words), -1, 8)
    return (codes if positions is None else codes[..., positions]).flatten(1)


@dataclass(frozen=True)
class CompressedTensors(FourBits):
    """compressed-tensors' format `pack-quantized`, which llm-compressor writes.

    `weight_packed` is `[O, I / 8]`. Signed codes are stored plus 8, and so are zero points, which are packed along
    outputs, `[O / 8, G]`. Symmetric weights have a zero point of 8.
    """

    is_symmetric: bool = True
    method = "compressed-tensors"
    kinds = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def _unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        scale, groups = tensors["weight_scale"], self._groups_out_of_order(tensors.get("weight_g_idx"))
        zeros = tensors.get("weight_zero_point") if self.is_symmetric else tensors["weight_zero_point"]
        # Some files have zero points for symmetric weights, too: 0 in another dtype.
        if zeros is None or (self.is_symmetric and zeros.dtype != torch.int32):
            zero = torch.full_like(scale, 8, dtype=torch.uint8)
        else:
            zero = _nibbles(zeros.T).T[: sizes[0]]
        return Unpacked(tensors["weight_packed"], scale, zero, groups)


@dataclass(frozen=True)
class Gptq(FourBits):
    """GPTQ's weights, as AutoGPTQ and GPTQModel write them.

    `qweight` is `[I / 8, O]`, `qzeros` `[G, O / 8]` with eight outputs in a word, and `scales` `[G, O]`. `g_idx` `[I]`
    is the group of each input; with `desc_act` a group's inputs are usually not consecutive.

    Attributes:
        has_true_zeros: True for version 2, which stores zero points unchanged; version 1 stores them minus 1.
    """

    has_true_zeros: bool = False
    method = "gptq"
    kinds = ("qweight", "qzeros", "scales", "g_idx")

    def _unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        # GPTQModel subtracts 1 from each code of a whole word, so a zero point of 0 borrows from its neighbour.
        zeros = tensors["qzeros"] if self.has_true_zeros else tensors["qzeros"] + _ONES
        zero = _nibbles(zeros)[:, : sizes[0]].T
        groups = self._groups_out_of_order(tensors.get("g_idx"))
        return Unpacked(tensors["qweight"].T, tensors["scales"].T, zero, groups)


@dataclass(frozen=True)
class Awq(FourBits):
    """AWQ's format `gemm`, as AutoAWQ writes it.

    `qweight` `[I, O / 8]` and `qzeros` `[G, O / 8]` have eight outputs in a word, from the lowest bits in the order
    0, 2, 4, 6, 1, 3, 5, 7. `scales` is `[G, O]`.
    """

    positions = (0, 4, 1, 5, 2, 6, 3, 7)
    method = "awq"
    kinds = ("qweight", "qzeros", "scales")

    def _unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        zero = _nibbles(tensors["qzeros"], self.positions).T
        return Unpacked(tensors["qweight"].T, tensors["scales"].T, zero)


def compressed_tensors(config: Mapping[str, Any]) -> Layout:
    """Return the layout that compressed-tensors' config describes, of 4 or 8 bits.

    Raises:
        ConfigurationError: weights of other bits or kinds, several kinds, or quantized activations beside 4 bits.
    """
    groups = config.get("config_groups") or {}
    schemes = [
        {field: (group.get("weights") or {}).get(field) for field in _FIELDS} for group in groups.values()
    ]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise unread("config_groups", sorted(groups), "one kind of weights")
    # The weights are for rotated activations.
    if transforms := (config.get("transform_config") or {}).get("config_groups"):
        raise unread("transform_config", sorted(transforms), "a model without transforms")
    scheme, names = schemes[0], ("input_activations", "output_activations")
    activations = next((group[name] for group in groups.values() for name in names if group.get(name)), None)
    formats = {group.get("format") or config.get("format") for group in groups.values()}
    if formats <= {"float-quantized", "int-quantized"}:
        return eight_bits(scheme, activations)
    if formats != {"pack-quantized"}:
        expected = "'pack-quantized', 'float-quantized' or 'int-quantized'"
        raise unread("format", config.get("format"), expected)
    if activations:
        raise unread("config_groups: input_activations", activations, "a model that quantizes weights alone")
    size, strategy = scheme["group_size"], scheme["strategy"]
    bits = scheme["type"] or "int", scheme["num_bits"]
    if bits != ("int", 4) or strategy not in (None, "group", "channel"):
        raise unread("config_groups: weights", scheme, "4 bits of type 'int' by 'group' or 'channel'")
    return CompressedTensors(
        _group_size(None if strategy == "channel" else size), scheme["symmetric"] is not False
    )


def gptq(config: Mapping[str, Any]) -> Gptq:
    """Return the layout that GPTQ's config describes.

    Raises:
        ConfigurationError: other bits or formats, or layers that differ in them.
    """
    if config.get("bits") != 4:
        raise unread("bits", config.get("bits"), "4")
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise unread("checkpoint_format", version, "'gptq' or 'gptq_v2'")
    # A rule without settings names layers that are not quantized.
    if rules := [rule for rule in (config.get("dynamic") or {}).values() if rule]:
        raise unread("dynamic", rules, "one kind of weights")
    return Gptq(_group_size(config.get("group_size", 128)), version == "gptq_v2")


def awq(config: Mapping[str, Any]) -> Awq:
    """Return the layout that AWQ's config describes.

    Raises:
        ConfigurationError: other bits or formats.
    """
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise unread("bits", bits, "4")
    version = config.get("version") or config.get("format") or config.get("checkpoint_format") or "gemm"
    if str(version).lower() != "gemm":
        raise unread("version", version, "'gemm'")
    return Awq(_group_size(config.get("group_size", config.get("q_group_size", 128))))


def _group_size(size: Any) -> int | None:
    """Return the group size if int4 supports it; None for one scale per output, which configs write as -1."""
    if size not in (None, -1, *GROUP_SIZES):
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise unread("group_size", size, f"one of {sizes}, or -1 for one scale an output,")
    return None if size == -1 else size
