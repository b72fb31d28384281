"""Dequantize weights that bitsandbytes has packed, as lazy tensors, by bitsandbytes' own functions."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...configuration.errors import CheckpointError
from ...modeling.formats import Bnb
from ..io import Computed, LazyTensor

# Names of the tensors that bitsandbytes stores beside the codes of a weight.
_BESIDE = re.compile(
    r"(.+)\.(weight\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\..+)|SCB|weight_format)"
)


@dataclass(frozen=True)
class Bitsandbytes:
    """The format of bitsandbytes in which a folder's linear layers and experts are stored."""

    form: Bnb
    method: ClassVar[str] = "bitsandbytes"
    is_int4: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Bitsandbytes":
        """Read the format from a `quantization_config`."""
        if config.get("load_in_8bit"):
            return cls(Bnb(torch.bfloat16, "int8"))
        is_nested = bool(config.get("bnb_4bit_use_double_quant"))
        kind = config.get("bnb_4bit_quant_type", "fp4")
        return cls(Bnb(torch.bfloat16, kind, is_nested))

    def unpack(
        self, tensors: Mapping[str, LazyTensor], dtype: torch.dtype
    ) -> tuple[dict[str, LazyTensor], set[str]]:
        """View packed weights dequantized to a dtype, and other tensors as they are.

        Returns:
            all weights, by the names that they have in a plain folder; and the names of the packed layers.

        Raises:
            CheckpointError: a layer has no codes, or no readable sizes.
        """
        plain, layers = dict(tensors), {}
        for name in tensors:
            if match := _BESIDE.fullmatch(name):
                layers.setdefault(match[1], {})[match[2]] = plain.pop(name)
        for layer, kinds in layers.items():
            origin = next(iter(kinds.values())).origin
            if (codes := plain.get(f"{layer}.weight")) is None:
                raise CheckpointError(f"{origin}: {layer}.weight, to which it belongs, is missing.")
            sizes = _sizes(kinds, codes)
            plain[f"{layer}.weight"] = self._weight({"weight": codes, **kinds}, sizes, dtype)
        return plain, set(layers)

    def _weight(self, kinds: dict[str, LazyTensor], sizes: tuple[int, int], dtype: torch.dtype) -> LazyTensor:
        origin = kinds["weight"].origin

        def matrix(*tensors: torch.Tensor) -> torch.Tensor:
            try:
                parts = self.form.parts_of([dict(zip(kinds, tensors, strict=True))], sizes, self.form)
            # A KeyError names a tensor that is missing beside the codes.
            except (CheckpointError, KeyError) as error:
                raise CheckpointError(f"{origin}: cannot be dequantized ({error}).") from error
            return self.form.matrix(parts, sizes, dtype)

        return Computed(matrix, [*kinds.values()], sizes, dtype, origin)


def _sizes(kinds: Mapping[str, LazyTensor], codes: LazyTensor) -> tuple[int, int]:
    """Return a matrix's numbers of rows and columns; 4-bit codes are stored flat, with both numbers in JSON."""
    if "SCB" in kinds:
        return codes.shape[0], codes.shape[1]
    try:
        state = next(tensor for kind, tensor in kinds.items() if "quant_state" in kind)
        num_out, num_in = json.loads(bytes(state.read().tolist()))["shape"]
    except (StopIteration, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{codes.origin}: its quant_state is missing or damaged.") from error
    return int(num_out), int(num_in)
