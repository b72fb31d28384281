"""Quantize and dequantize weights as lazy tensors.

A packed weight is the matrix of a linear layer, or a stack of experts, and is stored as several tensors, its parts
(`modeling.quantization`). Which weights are packed, and what their parts are called, is read off an empty model that
was prepared as `from_pretrained` prepares it. So a packed folder has the tensors that a quantized model saves.

Both directions work on one matrix at a time, of a stack on one expert.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...configuration import QuantizationConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...modeling.formats import Format
from ...modeling.quantization import LlamoeQuantizer, QuantizedExperts, QuantizedLinear
from ...modeling.registration import empty_model
from ..io import Computed, LazyTensor, check_finite, dtype_name, stack

# Dtype of products with quantized weights, and of a quantized model's other weights.
_DTYPE = torch.bfloat16
# Tensors with this suffix stay in float32 whatever the model's dtype.
_IN_FLOAT32 = "balancing_bias"


@dataclass(frozen=True)
class PackedWeight:
    """A weight that is quantized.

    Attributes:
        name: key of the weight that it means, and of its codes.
        form: how a matrix is stored.
        sizes: outputs and inputs of a matrix.
        num_experts: of a stack; None for a linear layer's matrix.
        is_input_first: whether the stack's matrices are `[in, out]`.
    """

    name: str
    form: Format
    sizes: tuple[int, int]
    num_experts: int | None = None
    is_input_first: bool = False

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part, by its key."""
        experts = () if self.num_experts is None else (self.num_experts,)
        parts = zip(self.form.suffixes, self.form.parts(self.sizes), strict=True)
        return {self.name + suffix: ((*experts, *shape), dtype) for suffix, (shape, dtype) in parts}

    def pack(self, tensor: LazyTensor) -> dict[str, LazyTensor]:
        """View the parts of a weight, by their keys."""
        experts = range(self.num_experts or 0)
        matrices = [tensor] if self.num_experts is None else [tensor.row(number) for number in experts]
        kept: list[dict[int, torch.Tensor]] = [{} for _ in matrices]
        packed = {}
        for index, name in enumerate(self.parts):
            parts = [_Part(self, matrix, index, rest) for matrix, rest in zip(matrices, kept, strict=True)]
            packed[name] = parts[0] if self.num_experts is None else stack(parts)
        return packed

    def parts_of(self, tensor: LazyTensor) -> list[torch.Tensor]:
        """Read and quantize a matrix; existing codes of this format are reused."""
        packed_as = getattr(tensor, "packed_as", None)
        if packed_as is not None and (parts := packed_as(self.form)) is not None:
            return parts
        matrix = tensor.read()
        # Checked before quantizing, since codes may hide nan and infinities from the writer.
        check_finite(self.name, tensor, matrix)
        # transformers' loader casts weights before it quantizes them, too.
        matrix = matrix.to(_DTYPE)
        # Transposed as a whole, which torch does in blocks; of a few rows at a time it takes three times as long.
        return self.form.quantize(matrix.T.contiguous() if self.is_input_first else matrix)

    def unpack(self, parts: list[LazyTensor]) -> LazyTensor:
        """View the weight dequantized from its parts."""
        shape = self.sizes[::-1] if self.is_input_first else self.sizes
        if self.num_experts is None:
            return Computed(self._meant, parts, shape, _DTYPE, parts[0].origin)
        rows = [
            Computed(self._meant, [part.row(number) for part in parts], shape, _DTYPE, parts[0].origin)
            for number in range(self.num_experts)
        ]
        return stack(rows)

    def _meant(self, *parts: torch.Tensor) -> torch.Tensor:
        matrix = self.form.matrix(parts, self.sizes, _DTYPE)
        return matrix.T if self.is_input_first else matrix


class _Part(LazyTensor):
    """One part of a packed matrix. Reading the codes, the first part, keeps the small others until they are read."""

    def __init__(self, weight: PackedWeight, matrix: LazyTensor, index: int, kept: dict[int, torch.Tensor]):
        shape, dtype = weight.form.parts(weight.sizes)[index]
        super().__init__(shape, dtype, matrix.origin, shape[0])
        self._weight, self._matrix, self._index, self._kept = weight, matrix, index, kept

    def _read(self, start, stop):
        if self._index not in self._kept:
            codes, *others = self._weight.parts_of(self._matrix)
            self._kept.update(enumerate(others, start=1))
            if self._index == 0:
                return codes[start:stop]
        return self._kept.pop(self._index)[start:stop]


def packed_weights(
    config: LlamoeBaseConfig, quantization: QuantizationConfig, *, are_stored: bool
) -> dict[str, PackedWeight]:
    """List the quantized weights of a model by the keys of the plain ones.

    Args:
        config: of the model.
        quantization: how weights are stored.
        are_stored: whether they are so in a folder, or shall be, which decides on what a refusal advises.

    Raises:
        ValueError: the format cannot store one of them, or there is none.
    """
    model: Any = empty_model(config)
    LlamoeQuantizer(quantization, pre_quantized=are_stored).preprocess_model(model)
    found = []
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            found += [
                PackedWeight(
                    f"{path}.{name}", form, module.sizes[name], module.num_experts, module.is_transposed
                )
                for name, form in module.formats.items()
            ]
        elif isinstance(module, QuantizedLinear):
            found.append(
                PackedWeight(f"{path}.weight", module.format, (module.out_features, module.in_features))
            )
    if not found:
        raise ValueError(
            f"{type(config).__name__}: the model has no weights of a decoder that are to be quantized."
        )
    return {weight.name: weight for weight in found}


def in_words(quantization: QuantizationConfig) -> str:
    """Describe how weights are packed, such as "int4 in groups of 32, experts and linear layers"."""
    groups = f" in groups of {quantization.group_size}" if quantization.group_size else ""
    packed = {"experts": quantization.experts, "linear layers": quantization.linears}
    kept = quantization.modules_to_not_convert
    text = f"{quantization.weights}{groups}, {' and '.join(part for part, is_packed in packed.items() if is_packed)}"
    return f"{text}, without {', '.join(kept)}" if kept else text


def pack_tensors(
    tensors: Mapping[str, LazyTensor], packed: Mapping[str, PackedWeight]
) -> dict[str, LazyTensor]:
    """Make a quantized folder's tensors: parts of quantized weights, and bfloat16 for the rest.

    Weights are packed from the dtype that they have: a cast would round what is rounded again.
    """
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if name in packed:
            found |= packed[name].pack(tensor)
        else:
            found[name] = tensor.cast(torch.float32 if name.endswith(_IN_FLOAT32) else _DTYPE)
    return found


def unpack_tensors(
    tensors: Mapping[str, LazyTensor],
    config: LlamoeBaseConfig,
    quantization: QuantizationConfig,
    place: Path,
) -> dict[str, LazyTensor]:
    """Dequantize a folder's tensors; weights without any part are left out.

    Args:
        tensors: of the folder.
        config: of the model.
        quantization: how its weights are stored.
        place: the folder, for messages.

    Raises:
        CheckpointError: a part is missing, or has another shape or dtype than the format asks for; or no such model can
            be stored so.
    """
    try:
        packed = packed_weights(config, quantization, are_stored=True)
    # A damaged configuration may hold invalid patterns of module names.
    except (ValueError, re.error) as error:
        raise CheckpointError(f"{place}: {error}") from error
    found = dict(tensors)
    for name, weight in packed.items():
        if not tensors.keys() & weight.parts.keys():
            continue
        parts = []
        for key, (shape, dtype) in weight.parts.items():
            if key not in tensors:
                raise CheckpointError(f"{place}: {key} missing; the checkpoint is not whole.")
            part = found.pop(key)
            if (part.shape, part.dtype) != (shape, dtype):
                stored = f"{weight.form.exact.key} stores it as {dtype_name(dtype)} {list(shape)}"
                raise CheckpointError(f"{part.origin}: is {part.described}, but {stored}.")
            parts.append(part)
        found[name] = weight.unpack(parts)
    return found
