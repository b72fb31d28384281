"""Routed experts whose matrices are quantized."""

import torch
from torch import nn

from ..formats import Format, Sizes
from ..moe import STACKS, Experts, OutputFirstExperts
from .packed import Packed


class QuantizedExperts(Packed, Experts):
    """Routed experts with packed stacks, which have no gradient.

    `gate_up_proj` and `down_proj` hold the codes, output-first in every family; buffers beside them hold the other
    parts. Each has an axis for experts in front.
    """

    def __init__(self, experts: Experts, form: Format, gate_up_form: Format | None = None):
        """Make empty parts in the place of the stacks.

        Args:
            experts: with 16 or 32 bits, or none on the meta device.
            form: of a matrix.
            gate_up_form: of an expert's gate and up together, if they are not stored as one matrix.
        """
        self.take_after(experts)
        self._formats = {"gate_up_proj": gate_up_form or form, "down_proj": form}
        self.sizes = {name: experts.sizes_of(name) for name in STACKS}
        """For each stack O and I."""
        self._make_parts(STACKS)
        self.check_implementation(self.config._experts_implementation)

    def part_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of the stacks, by its name."""
        return {
            name + suffix: ((self.num_experts, *shape), dtype)
            for name, sizes in self.sizes.items()
            for suffix, (shape, dtype) in zip(
                self.format.suffixes, self.formats[name].parts(sizes), strict=True
            )
        }

    def sizes_of(self, name: str) -> Sizes:
        """O and I of a stack's matrices."""
        return self.sizes[name]

    def stack_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the stack that the parts mean, in the family's own order."""
        num_out, num_in = self.sizes[name]
        return (self.num_experts, *((num_in, num_out) if self.is_transposed else (num_out, num_in)))

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        """The parts of a stack in the family's own order, by name; quantized one expert after the other."""
        form = self.formats[name]
        parts = {
            part: torch.empty(shape, dtype=dtype, device=weight.device)
            for part, (shape, dtype) in self.part_shapes().items()
            if part.startswith(name)
        }
        for expert, matrix in enumerate(weight.unbind(0)):
            found = form.quantize(matrix.T if self.is_transposed else matrix)
            for whole, part in zip(parts.values(), found, strict=True):
                whole[expert] = part
        return parts

    @torch.no_grad()
    def dequantized_weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The stack that the parts mean, in the family's own order."""
        stack = torch.empty(self.stack_shape(name), dtype=dtype, device=getattr(self, name).device)
        for expert, matrix in enumerate(stack.unbind(0)):
            parts = [part[expert] for part in self.parts(name)]
            found = self.formats[name].matrix(parts, self.sizes[name], dtype)
            matrix.copy_(found.T if self.is_transposed else found)
        return stack

    def dequantized(self, dtype: torch.dtype) -> Experts:
        """Ordinary experts with the stacks that these ones mean."""
        with torch.device("meta"):
            experts = (Experts if self.is_transposed else OutputFirstExperts)(self.config)
        for name in STACKS:
            setattr(experts, name, nn.Parameter(self.dequantized_weight(name, dtype)))
        return experts.train(self.training)
