"""4-bit weights of compressed-tensors, GPTQ and AWQ, in words of eight codes.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....configuration.quantization import GROUP_SIZES
from ..format import Sizes
from .eight_bits import EightBits
from .layout import Codes, Layout, Unpacked, nibbles, unread

# Position in AWQ's words of each of eight outputs.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_ONES = 0x11111111


@dataclass(frozen=True)
class CompressedTensors(Layout):
    """compressed-tensors' format `pack-quantized`, which llm-compressor writes.

    `weight_packed` `[O, I / 8]` has eight inputs a word, lowest bits first, as codes of 0 to 15. Signed codes are
    stored plus 8, and so are zero points, packed along outputs `[O / 8, G]`: symmetric weights have a zero of 8.
    """

    group_size: int | None
    is_symmetric: bool = True
    method = "compressed-tensors"
    kinds = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        num_out, num_in = sizes
        groups = self.num_groups(num_in)
        shapes = {"weight_packed": (num_out, _words(num_in)), "weight_scale": (num_out, groups)}
        return shapes if self.is_symmetric else shapes | {"weight_zero_point": (_words(num_out), groups)}

    def unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        scale, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
        # Of symmetric weights some files have zeros of 0 in another dtype.
        if zeros is None or zeros.dtype != torch.int32:
            zero = torch.full_like(scale, 8, dtype=torch.uint8)
        else:
            zero = nibbles(zeros.T).T[: sizes[0]]
        groups = self._groups_out_of_order(tensors.get("weight_g_idx"))
        return Unpacked(Codes(tensors["weight_packed"], sizes), scale, zero, groups)


@dataclass(frozen=True)
class Gptq(Layout):
    """GPTQ's weights, as AutoGPTQ and GPTQModel write them.

    `qweight` `[I / 8, O]` has eight inputs a word, `qzeros` `[G, O / 8]` eight outputs, lowest bits first; `scales` is
    `[G, O]`. `g_idx` `[I]` is the group of each input: with `desc_act` a group's inputs are usually not consecutive.

    Attributes:
        has_true_zeros: version 2, where zero points are stored unchanged, not minus 1.
    """

    group_size: int | None
    has_true_zeros: bool = False
    method = "gptq"
    kinds = ("qweight", "qzeros", "scales", "g_idx")

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        num_out, num_in = sizes
        groups = self.num_groups(num_in)
        zeros = (groups, _words(num_out))
        return {"qweight": (_words(num_in), num_out), "qzeros": zeros, "scales": (groups, num_out)}

    def unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        codes = Codes(tensors["qweight"].T, sizes)
        # Add 1 to the whole words, as GPTQModel subtracted it from them: a zero of 0 borrowed from its neighbour.
        zeros = tensors["qzeros"] if self.has_true_zeros else tensors["qzeros"] + _ONES
        zero = nibbles(zeros)[:, : sizes[0]].T
        return Unpacked(codes, tensors["scales"].T, zero, self._groups_out_of_order(tensors.get("g_idx")))


@dataclass(frozen=True)
class Awq(Layout):
    """AWQ's format `gemm`, as AutoAWQ writes it.

    `qweight` `[I, O / 8]` and `qzeros` `[G, O / 8]` have eight outputs a word, lowest bits first in the order 0, 2, 4,
    6, 1, 3, 5, 7; `scales` is `[G, O]`.
    """

    group_size: int | None
    method = "awq"
    kinds = ("qweight", "qzeros", "scales")

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        num_out, num_in = sizes
        groups, words = self.num_groups(num_in), _words(num_out)
        return {"qweight": (num_in, words), "qzeros": (groups, words), "scales": (groups, num_out)}

    def unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        zero = nibbles(tensors["qzeros"], _AWQ_PLACES).T
        return Unpacked(Codes(tensors["qweight"].T, sizes, _AWQ_PLACES), tensors["scales"].T, zero)


def compressed_tensors(config: Mapping[str, Any]) -> Layout:
    """Return the layout that compressed-tensors' config describes, of 4 or 8 bits.

    Raises:
        ConfigurationError: weights of other bits or kinds, several kinds, or quantized activations beside 4 bits.
    """
    groups = config.get("config_groups") or {}
    kinds = [group.get("weights") or {} for group in groups.values()]
    fields = ("type", "num_bits", "symmetric", "strategy", "group_size", "block_structure")
    if not kinds or any(kind.get(field) != kinds[0].get(field) for kind in kinds for field in fields):
        raise unread("config_groups", sorted(groups), "one kind of weights")
    # Transforms rotate the activations, so without them the layers' weights would be wrong.
    if transforms := (config.get("transform_config") or {}).get("config_groups"):
        raise unread("transform_config", sorted(transforms), "a model without transforms")
    scheme = kinds[0]
    activations = [
        group.get(f"{side}_activations") for group in groups.values() for side in ("input", "output")
    ]
    formats = {group.get("format") or config.get("format") for group in groups.values()}
    if formats <= {"float-quantized", "int-quantized"}:
        return EightBits.from_scheme(scheme, activations[0])
    if formats != {"pack-quantized"}:
        known = "'pack-quantized', 'float-quantized' or 'int-quantized'"
        raise unread("format", config.get("format"), known)
    if any(activations):
        raise unread(
            "config_groups: input_activations or output_activations",
            activations,
            "a model that quantizes weights alone",
        )
    kind = scheme.get("type", "int"), scheme.get("num_bits")
    if kind != ("int", 4):
        raise unread("config_groups: weights of type and num_bits", kind, "('int', 4)")
    size, strategy = scheme.get("group_size"), scheme.get("strategy")
    strategy = strategy or ("channel" if size in (None, -1) else "group")
    if strategy not in ("group", "channel"):
        raise unread("config_groups: weights.strategy", strategy, "'group' or 'channel'")
    return CompressedTensors(
        _group_size(None if strategy == "channel" else size), scheme.get("symmetric", True)
    )


def gptq(config: Mapping[str, Any]) -> Gptq:
    """Return the layout that GPTQ's config describes.

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
        known = ", ".join(map(str, GROUP_SIZES))
        raise unread("group_size", size, f"one of {known}, or -1 for one scale an output,")
    return None if size == -1 else size


def _words(codes: int) -> int:
    return -(-codes // 8)
