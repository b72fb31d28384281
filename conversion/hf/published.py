"""Dequantize other programs' weights as lazy tensors, or reuse their codes for int4.

What the bits mean is said in `modeling.formats.packed`; which tensors belong to which weight, and which layers their
author left in 16 bits, is found as `from_pretrained` finds it (`modeling.quantization`).
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...configuration import QuantizationConfig
from ...configuration.base import LlamoeBaseConfig
from ...modeling.formats import Format, Int4, Int8
from ...modeling.formats.packed import EightBits, Layout
from ...modeling.moe import Experts
from ...modeling.quantization import LlamoeQuantizer, by_expert, of_stack, own_config
from ...modeling.registration import empty_model
from ..io import Computed, LazyTensor, stack


class PublishedMatrix(LazyTensor):
    """The dequantized weight of a linear layer, or an expert's matrices joined by rows."""

    def __init__(
        self,
        layout: Layout,
        matrices: list[dict[str, LazyTensor]],
        sizes: tuple[int, int],
        dtype: torch.dtype,
        is_input_first: bool = False,
    ):
        """Make the view.

        Args:
            layout: of the tensors.
            matrices: the tensors of each, by kind.
            sizes: outputs and inputs of each.
            dtype: in which the matrix is read.
            is_input_first: whether it is read as `[in, out]`.
        """
        shape = (len(matrices) * sizes[0], sizes[1])
        origin = next(iter(matrices[0].values())).origin
        super().__init__(shape[::-1] if is_input_first else shape, dtype, origin)
        self._layout, self._matrices, self._sizes = layout, matrices, sizes
        self._is_input_first = is_input_first

    def packed_as(self, form: Format) -> list[torch.Tensor] | None:
        """Return the parts of a format with the same codes; None for other formats."""
        if isinstance(form, Int8) and getattr(self._layout, "is_by_output", False):
            unpacked = [self._layout.unpack(tensors, self._sizes) for tensors in self._opened()]
            codes, scales = (torch.cat([each[part] for each in unpacked]) for part in range(2))
            return [codes, scales[:, 0].bfloat16()]
        if not (self._layout.is_int4 and isinstance(form, Int4)):
            return None
        return self._layout.parts_of(self._opened(), self._sizes, form)

    def _opened(self) -> list[dict[str, torch.Tensor]]:
        return [{kind: each.read() for kind, each in tensors.items()} for tensors in self._matrices]

    def _read(self, start, stop):
        weights = [self._layout.weight_of(each, self._sizes, self.dtype) for each in self._opened()]
        matrix = weights[0] if len(weights) == 1 else torch.cat(weights)
        return (matrix.T if self._is_input_first else matrix)[start:stop]


def _in_stack(
    layout: EightBits, is_transposed: bool, dtype: torch.dtype, *tensors: torch.Tensor
) -> torch.Tensor:
    *codes, scale = tensors
    return layout.weight_in_stack(codes, scale, is_transposed).to(dtype)


def unpack_published(
    tensors: Mapping[str, LazyTensor], config: LlamoeBaseConfig, layout: Layout, files: list[Path]
) -> tuple[dict[str, LazyTensor], list[str], QuantizationConfig]:
    """View the dequantized tensors of a folder that another program quantized.

    Args:
        tensors: of the files.
        config: of the model.
        layout: of the packed matrices.
        files: of the checkpoint.

    Returns:
        packed weights by their names in the model, with stacked experts, and plain tensors by their names in the
        files; names of tensors without effect; and the config of int4 that leaves the same modules in 16 bits.

    Raises:
        CheckpointError: a packed tensor is missing, or has not the shape that config.json means.
    """
    model: Any = empty_model(config)
    quantizer = LlamoeQuantizer(own_config(layout), pre_quantized=True)
    by_weight = quantizer.read_published(model, map(str, files), layout)
    dtype = config.dtype if config.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    found = dict(tensors)
    unpacked: dict[str, LazyTensor] = {}
    for weight, layers in by_weight.items():
        opened = {
            layer: {kind: found.pop(stored.name) for kind, stored in kinds.items()}
            for layer, kinds in layers.items()
        }
        path, _, name = weight.rpartition(".")
        module = model.get_submodule(path)
        if not isinstance(module, Experts):
            unpacked[weight] = PublishedMatrix(layout, [*opened.values()], module.weight.shape, dtype)
            continue
        num_out, num_in = module.sizes_of(name)
        if stacked := of_stack(opened):
            scales = stacked[name + layout.in_stacks[1]]
            codes = [[kinds["weight"] for kinds in matrices] for matrices in by_expert(opened)]
            unpacked[weight] = stack(
                [
                    Computed(
                        partial(_in_stack, layout, module.is_transposed, dtype),
                        [*(codes[number] if codes else [stacked[name].row(number)]), scales.row(number)],
                        module.stack_shape(name)[1:],
                        dtype,
                        scales.origin,
                    )
                    for number in range(module.num_experts)
                ]
            )
            continue
        unpacked[weight] = stack(
            [
                PublishedMatrix(layout, kinds, (num_out // len(kinds), num_in), dtype, module.is_transposed)
                for kinds in by_expert(opened)
            ]
        )
    # Zero biases of packed layers, and scales of activations.
    passed_over = {*model._keys_passed_over}
    unused = [name for name in found if f"^{re.escape(name)}$" in passed_over]
    plain = {name: tensor for name, tensor in found.items() if name not in unused}
    return plain | unpacked, unused, quantizer.quantization_config
