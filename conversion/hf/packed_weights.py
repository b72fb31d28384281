"""Quantize and dequantize weights as lazy tensors, one matrix at a time; a stack has one for each expert.

A packed weight is the matrix of a linear layer, or a stack of experts. It is stored as several tensors, its parts
(`modeling.quantization`). An empty model, prepared as `from_pretrained` prepares it, shows which weights are packed and
how their parts are named. So the folders that are written here have the tensors that a quantized model saves.
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
from ...modeling.quantization import LlamoeQuantizer, packed_modules
from ...modeling.registration import empty_model
from ..io import Computed, LazyTensor, check_finite, dtype_name, stack

# Dtype of a quantized model's other weights, and of weights before they are quantized.
_DTYPE = torch.bfloat16
# Tensors with this name suffix stay in float32.
_IN_FLOAT32 = "balancing_bias"


@dataclass(frozen=True)
class PackedWeight:
    """A weight that is quantized: the matrix of a linear layer, or a stack of experts.

    Attributes:
        name: key of the plain weight, and of the codes.
        form: format of a matrix.
        sizes: outputs and inputs of a matrix.
        num_experts: matrices of a stack; None for a linear layer.
        is_input_first: True if the plain stack's matrices are `[in, out]`.
    """

    name: str
    form: Format
    sizes: tuple[int, int]
    num_experts: int | None = None
    is_input_first: bool = False

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each part, by its key."""
        experts = () if self.num_experts is None else (self.num_experts,)
        parts = zip(self.form.suffixes, self.form.parts(self.sizes), strict=True)
        return {self.name + suffix: ((*experts, *shape), dtype) for suffix, (shape, dtype) in parts}

    def pack(self, tensor: LazyTensor) -> dict[str, LazyTensor]:
        """View the parts of a plain weight, by their keys."""
        experts = range(self.num_experts or 0)
        matrices = [tensor] if self.num_experts is None else [tensor.row(number) for number in experts]
        caches: list[dict[int, torch.Tensor]] = [{} for _ in matrices]
        packed = {}
        for index, name in enumerate(self.parts):
            parts = [
                _Part(self, matrix, index, cache) for matrix, cache in zip(matrices, caches, strict=True)
            ]
            packed[name] = parts[0] if self.num_experts is None else stack(parts)
        return packed

    def parts_of(self, tensor: LazyTensor) -> list[torch.Tensor]:
        """Read a matrix and quantize it; if it is packed already, keep codes that this format can hold."""
        packed_as = getattr(tensor, "packed_as", None)
        if packed_as is not None and (parts := packed_as(self.form)) is not None:
            return parts
        matrix = tensor.read()
        # The writer checks tensors, too, but codes hide NaN and infinities.
        check_finite(self.name, tensor, matrix)
        # Round to bfloat16 before quantizing, as transformers' loader does.
        matrix = matrix.to(_DTYPE)
        # torch transposes a whole matrix in a third of the time that it takes for a few rows at a time.
        return self.form.quantize(matrix.T.contiguous() if self.is_input_first else matrix)

    def unpack(self, parts: list[LazyTensor]) -> LazyTensor:
        """View the plain weight, dequantized from its parts."""
        if self.num_experts is None:
            return self._unpack_one(parts)
        experts = range(self.num_experts)
        return stack([self._unpack_one([part.row(number) for part in parts]) for number in experts])

    def _unpack_one(self, parts: list[LazyTensor]) -> LazyTensor:
        shape = self.sizes[::-1] if self.is_input_first else self.sizes
        return Computed(self._dequantize, parts, shape, _DTYPE, parts[0].origin)

    def _dequantize(self, *parts: torch.Tensor) -> torch.Tensor:
        matrix = self.form.matrix(parts, self.sizes, _DTYPE)
        return matrix.T if self.is_input_first else matrix


class _Part(LazyTensor):
    """One part of a packed matrix.

    The first part is the codes. Reading it quantizes the matrix, and keeps the other parts, which are small, in a cache
    until they are read.
    """

    def __init__(self, weight: PackedWeight, matrix: LazyTensor, index: int, cache: dict[int, torch.Tensor]):
        shape, dtype = weight.form.parts(weight.sizes)[index]
        super().__init__(shape, dtype, matrix.origin, shape[0])
        self._weight, self._matrix, self._index, self._cache = weight, matrix, index, cache

    def _read(self, start, stop):
        if self._index not in self._cache:
            codes, *others = self._weight.parts_of(self._matrix)
            self._cache.update(enumerate(others, start=1))
            if self._index == 0:
                return codes[start:stop]
        return self._cache.pop(self._index)[start:stop]


def packed_weights(
    config: LlamoeBaseConfig, quantization: QuantizationConfig, *, are_stored: bool
) -> dict[str, PackedWeight]:
    """List the quantized weights of a model by the keys of the plain ones.

    Args:
        config: of the model.
        quantization: how weights are stored.
        are_stored: True if a folder stores them so already, not if they are to be quantized; errors advise accordingly.

    Raises:
        ValueError: the format cannot store one of the weights, or the model has none to quantize.
    """
    model: Any = empty_model(config)
    LlamoeQuantizer(quantization, pre_quantized=are_stored).preprocess_model(model)
    packed = [
        PackedWeight(
            f"{path}.{name}",
            module.formats[name],
            sizes,
            module.stacked[0] if module.stacked else None,
            getattr(module, "is_transposed", False),
        )
        for path, module in packed_modules(model)
        for name, sizes in module.sizes.items()
    ]
    if not packed:
        raise ValueError(f"{type(config).__name__}: the model has no weights of a decoder to quantize.")
    return {weight.name: weight for weight in packed}


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
    """View the tensors of a quantized folder: the parts of packed weights, and other weights in bfloat16."""
    stored: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if name in packed:
            stored |= packed[name].pack(tensor)
        else:
            stored[name] = tensor.cast(torch.float32 if name.endswith(_IN_FLOAT32) else _DTYPE)
    return stored


def unpack_tensors(
    tensors: Mapping[str, LazyTensor],
    config: LlamoeBaseConfig,
    quantization: QuantizationConfig,
    folder: Path,
) -> dict[str, LazyTensor]:
    """View the plain tensors of a quantized folder; leave out weights of which no part is stored.

    Args:
        tensors: of the folder.
        config: of the model.
        quantization: how its weights are stored.
        folder: for error messages.

    Raises:
        CheckpointError: a part is missing, or has another shape or dtype than the format's; or the format cannot store
            this model.
    """
    try:
        packed = packed_weights(config, quantization, are_stored=True)
    # A damaged configuration may have invalid patterns of module names.
    except (ValueError, re.error) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    plain = dict(tensors)
    for name, weight in packed.items():
        if not tensors.keys() & weight.parts.keys():
            continue
        parts = []
        for key, (shape, dtype) in weight.parts.items():
            if key not in tensors:
                raise CheckpointError(f"{folder}: {key} missing; the checkpoint is not whole.")
            part = plain.pop(key)
            if (part.shape, part.dtype) != (shape, dtype):
                stored = f"{weight.form.exact.key} stores it as {dtype_name(dtype)} {list(shape)}"
                raise CheckpointError(f"{part.origin}: is {part.described}, but {stored}.")
            parts.append(part)
        plain[name] = weight.unpack(parts)
    return plain
