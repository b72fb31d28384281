"""Interface of layouts of packed weights, and their conversion to int4.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers.utils import logging

from ....configuration.errors import ConfigurationError
from ...kernels import cpp_pack_words
from ..format import Format, Sizes
from ..int4 import Int4
from ..int4_layout import pack

logger = logging.get_logger("llamoe")

_WEIGHTS_AT_ONCE = 1 << 22


class Codes(NamedTuple):
    """Codes of 4 bits, eight to a 32-bit word.

    Attributes:
        words: int32, `[O, I / 8]` with eight inputs a word, lowest bits first; with `places`, `[O / 8, I]`.
        sizes: O and I; a last word may have more codes than these.
        places: of each of a word's eight outputs, from the lowest bits; None if a word has eight inputs.
    """

    words: torch.Tensor
    sizes: Sizes
    places: tuple[int, ...] | None = None

    def unpack(self) -> torch.Tensor:
        """Return the codes, `[O, I]` uint8."""
        num_out, num_in = self.sizes
        if self.places is not None:
            return nibbles(self.words.T, self.places).T
        return nibbles(self.words)[:num_out, :num_in]

    def pack_into(self, packed: torch.Tensor) -> bool:
        """Pack whole blocks of outputs for int4, `[O, I / 2]`, by the compiled kernel; return False if it cannot."""
        return cpp_pack_words(self.words, self.places, packed)


class Unpacked(NamedTuple):
    """A matrix whose values are (code − zero) × scale.

    Attributes:
        codes: `[O, I]`; 4 bits are 0 to 15, still in words.
        scale: `[O, G]`.
        zero: `[O, G]` uint8, the code of value 0.
        group_of_input: `[I]`, the group of each input; None if groups are consecutive inputs.
    """

    codes: Codes | torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_of_input: torch.Tensor | None = None


class Layout(ABC):
    """The layout in which a folder stores the matrices of linear layers, including those of single experts.

    Attributes:
        group_size: inputs that share a scale; None for one scale an output.
        method: the `quant_method` in config.json.
        kinds: the last parts of all names that a matrix's tensors may have; the first is that of the codes.
        in_stacks: what follows a stack's name in the names of its codes and scales; empty if files have no stacks.
        is_int4: int4 can hold the codes.
    """

    group_size: int | None
    method: str
    kinds: tuple[str, ...]
    in_stacks: tuple[str, ...] = ()
    is_int4: bool = True

    def holds(self, kind: str, dtype: str) -> bool:
        """Return True if a tensor of this kind and dtype (safetensors' spelling) belongs to a packed matrix."""
        return kind in self.kinds

    @property
    def stacked_scales(self) -> tuple[str, ...]:
        """Ends of the names of scales of all experts together, beside which no expert can be read alone."""
        return ()

    def nbytes_loaded(self, kind: str, nbytes: int) -> int:
        """Return the bytes in the loaded model of a tensor that this layout holds, of `nbytes` in its file."""
        if kind != self.kinds[0]:
            # Scales and zero points are counted with the codes.
            return 0
        # In int4 a byte has two codes, and each group of inputs adds four bytes of scale and offset.
        return nbytes + nbytes * 8 // (self.group_size or 128)

    @abstractmethod
    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a matrix's tensors, by kind."""

    @abstractmethod
    def unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        """Unpack the tensors of one matrix, given by kind."""

    def weight_of(
        self, tensors: Mapping[str, torch.Tensor], sizes: Sizes, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a layer's weight `[O, I]`, computed in float32, or as it is if it is plain already."""
        if set(tensors) == {"weight"}:
            return tensors["weight"]
        return self._weight_of(self.unpack(tensors, sizes), dtype)

    def _weight_of(self, unpacked: Unpacked, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        codes, scale, zero, groups = unpacked
        if isinstance(codes, Codes):
            codes = codes.unpack()
        num_in = codes.shape[1]
        if groups is None:
            groups = torch.arange(num_in, device=codes.device) // (self.group_size or num_in)
        weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        # Take a few outputs at a time, since float32 needs a lot of memory.
        step = max(_WEIGHTS_AT_ONCE // num_in, 1)
        for part, *some in zip(*(each.split(step) for each in (weight, codes, zero, scale)), strict=True):
            values, zeros, scales = (each.float() for each in some)
            part.copy_((values - zeros[:, groups]) * scales[:, groups])
        return weight

    def parts_of(
        self, matrices: Sequence[Mapping[str, torch.Tensor]], sizes: Sizes, form: Format
    ) -> list[torch.Tensor]:
        """Convert matrices to int4's parts: the codes are kept, scales and offsets are rounded to bfloat16.

        A scale per output is repeated for each of int4's groups. If groups are not consecutive inputs, which int4
        cannot express, the weights are quantized again.

        Args:
            matrices: one matrix, or an expert's gate and up, which become one; each as tensors by kind.
            sizes: of each.
            form: int4 with the layout's groups.
        """
        assert isinstance(form, Int4), form.key
        unpacked = [self.unpack(tensors, sizes) for tensors in matrices]
        if any(each.group_of_input is not None for each in unpacked):
            logger.warning_once(
                "Weights whose groups are not of neighbouring inputs (desc_act) are quantized anew, which loses some "
                "of their precision: int4 has no such groups."
            )
            return form.quantize(torch.cat([self._weight_of(each) for each in unpacked]))
        all_codes = [each.codes for each in unpacked if isinstance(each.codes, Codes)]
        (shape, dtype), _ = form.parts((len(matrices) * sizes[0], sizes[1]))
        packed = torch.empty(shape, dtype=dtype, device=all_codes[0].words.device)
        if not all(map(Codes.pack_into, all_codes, packed.split(sizes[0]))):
            packed = pack(_padded(torch.cat([codes.unpack() for codes in all_codes]), 2 * shape[1]))
        scale, zero = (torch.cat([each[part] for each in unpacked]).float() for part in (1, 2))
        return [packed, _scales_of(packed, scale, scale * (8 - zero), form)]

    def num_groups(self, num_in: int) -> int:
        """Return the number of groups G of a matrix with this many inputs."""
        return 1 if self.group_size is None else -(-num_in // self.group_size)

    def _groups_out_of_order(self, groups: torch.Tensor | None) -> torch.Tensor | None:
        """Return the group of each input, `[I]`; None if groups are consecutive inputs or not stored."""
        if groups is None or self.group_size is None or (groups < 0).all():
            return None
        in_order = torch.arange(len(groups), device=groups.device) // self.group_size
        return None if torch.equal(groups, in_order.to(groups.dtype)) else groups.long()


def int4_of(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, form: Int4) -> list[torch.Tensor]:
    """Return int4's parts for codes `[O, I]` uint8, and scales and values of code 8, `[O, G]` or `[O, 1]`."""
    (shape, _), _ = form.parts((codes.shape[0], codes.shape[1]))
    packed = pack(_padded(codes, 2 * shape[1]))
    return [packed, _scales_of(packed, scale, offset, form)]


def _padded(codes: torch.Tensor, num_in: int) -> torch.Tensor:
    # Any code will do as padding: it is multiplied by inputs of 0.
    return F.pad(codes, (0, num_in - codes.shape[1]), value=8).contiguous()


def _scales_of(packed: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, form: Int4) -> torch.Tensor:
    """Return int4's scales and offsets, `[G, O, 2]` bfloat16, for `[O, G]` or `[O, 1]` each."""
    num_groups = 2 * packed.shape[1] // form.group_size
    return torch.stack([each.expand(-1, num_groups).T for each in (scale, offset)], -1).to(torch.bfloat16)


def nibbles(words: torch.Tensor, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unpack eight codes from each 32-bit word, `[n, w]` int32 to `[n, 8 w]` uint8.

    Args:
        words: lowest bits first.
        places: position in a word of each of its codes; None if they are in order.
    """
    bytes_ = words.contiguous().view(torch.uint8)
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), -1).view(len(words), -1, 8)
    return (codes if places is None else codes[..., places]).flatten(1)


def unread(key: str, value: Any, known: str) -> ConfigurationError:
    """Return the error for an unsupported value in `quantization_config`."""
    return ConfigurationError(
        f"config.json: quantization_config.{key} is {value!r}, where {known} is read. Load the model that this one was "
        "made of, if memory is short with quantization_config=llamoe.QuantizationConfig('int4')."
    )
