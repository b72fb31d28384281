"""Interface of layouts of packed weights.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ....configuration.errors import ConfigurationError
from ..format import Format, Sizes

_WEIGHTS_AT_ONCE = 1 << 22
REMEDY = "Download or copy the checkpoint again."


class Unpacked(NamedTuple):
    """A matrix whose values are (code − zero) × scale.

    Attributes:
        codes: `[O, I]`; or as they are stored, in words of several codes.
        scale: `[O, G]`.
        zero: `[O, G]`, the code of value 0.
        group_of_input: `[I]`, the group of each input; None if each group is consecutive inputs.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_of_input: torch.Tensor | None = None


class Layout(ABC):
    """A layout in which a folder stores the matrices of linear layers and of single experts.

    A matrix is stored as several tensors. The last part of a tensor's name is its kind, such as "weight_scale".

    Attributes:
        group_size: inputs that share a scale; None for one scale an output.
        method: the `quant_method` in config.json.
        kinds: all kinds that a matrix's tensors may have, that of the codes first.
        in_stacks: name suffixes of the codes and scales of all experts, after the stack's name; () if files have none.
        is_int4: True if int4 can hold the codes.
    """

    group_size: int | None
    method: str
    kinds: tuple[str, ...]
    in_stacks: tuple[str, ...] = ()
    is_int4: bool = True

    def holds(self, kind: str, dtype: str) -> bool:
        """Return True if a tensor of this kind and dtype (safetensors' spelling) belongs to a packed matrix."""
        return kind in self.kinds

    def nbytes_loaded(self, kind: str, nbytes: int) -> int:
        """Return the bytes that a packed tensor of `nbytes` in its file takes in the loaded model."""
        # Count scales and zero points with the codes. Codes of a stack have the stack's name, such as "down_proj".
        if kind != self.kinds[0] and not kind.endswith("_proj"):
            return 0
        # In int4 a byte has two codes, and each group of inputs adds four bytes of scale and offset.
        return nbytes + nbytes * 8 // (self.group_size or 128) if self.is_int4 else 2 * nbytes

    @abstractmethod
    def num_groups(self, num_in: int) -> int:
        """Return the number of groups G of a matrix with this many inputs."""

    @abstractmethod
    def _unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        """Unpack one matrix, without checks: a missing tensor is a `KeyError`."""

    @abstractmethod
    def parts_of(
        self, matrices: Sequence[Mapping[str, torch.Tensor]], sizes: Sizes, form: Format
    ) -> list[torch.Tensor] | None:
        """Convert matrices to the parts of a format with the same codes.

        Args:
            matrices: one matrix, or an expert's gate and up, which become one; each as tensors by kind.
            sizes: of each.
            form: the format.

        Returns:
            None if the format cannot hold the codes.
        """

    def shape_of_codes(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of the stored codes."""
        return tuple(sizes)

    def codes_of(self, stored: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """Return the codes, `[O, I]`, from what is stored."""
        return stored

    def unpack(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> Unpacked:
        """Unpack one matrix from its tensors by kind; codes in words stay packed.

        Raises:
            ValueError: a tensor is missing, or has another shape or dtype than config.json means.
        """
        try:
            unpacked = self._unpack(tensors, sizes)
        except KeyError as error:
            beside = ", ".join(sorted(tensors))
            raise ValueError(f"{error} is missing beside {beside}. {REMEDY}") from error
        codes, scale, zero, _ = unpacked
        groups = sizes[0], self.num_groups(sizes[1])
        dtypes_fit = (not self.is_int4 or codes.dtype == torch.int32) and all(
            tensor.is_floating_point() for kind, tensor in tensors.items() if "scale" in kind
        )
        if not (
            dtypes_fit and codes.shape == self.shape_of_codes(sizes) and scale.shape == zero.shape == groups
        ):
            found = ", ".join(f"{kind} {part.dtype} {[*part.shape]}" for kind, part in tensors.items())
            raise ValueError(
                f"tensors are {found}, but config.json means {[*sizes]} with {groups[1]} scales an output. {REMEDY}"
            )
        return unpacked

    def weight_of(
        self, tensors: Mapping[str, torch.Tensor], sizes: Sizes, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a matrix dequantized in float32, `[O, I]`; a plain weight as it is."""
        if set(tensors) == {"weight"} and tensors["weight"].dtype.itemsize > 1:
            return tensors["weight"]
        return self._weight_of(self.unpack(tensors, sizes), sizes, dtype)

    def _weight_of(
        self, unpacked: Unpacked, sizes: Sizes, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        codes, groups = self.codes_of(unpacked.codes, sizes), unpacked.group_of_input
        if groups is None:
            groups = torch.arange(sizes[1], device=codes.device) // (self.group_size or sizes[1])
        weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        # Compute a few outputs at a time, since float32 needs a lot of memory.
        step = max(_WEIGHTS_AT_ONCE // sizes[1], 1)
        tensors = (weight, codes, unpacked.zero, unpacked.scale)
        for target, *operands in zip(*(tensor.split(step) for tensor in tensors), strict=True):
            values, zeros, scales = (tensor.float() for tensor in operands)
            target.copy_((values - zeros[:, groups]) * scales[:, groups])
        return weight


def unread(key: str, value: Any, expected: str) -> ConfigurationError:
    """Return the error for a value of `quantization_config` that is not supported."""
    return ConfigurationError(
        f"config.json: quantization_config.{key} is {value!r}, but only {expected} is read. Load the model that was "
        "quantized; if memory is short, with quantization_config=llamoe.QuantizationConfig('int4')."
    )
