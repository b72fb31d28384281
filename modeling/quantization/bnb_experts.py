"""Routed experts in bitsandbytes' formats, and the linear layers that they are in files.

An expert N is stored un-fused: `experts.N.gate_proj`, `up_proj` and `down_proj`, or Mixtral's `w1`, `w3` and `w2`.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..checkpoints import Stored
from ..formats import BitsAndBytesFormat, Bnb4Bit
from ..moe import PARTS_OF_STACKS, STACKS, Experts
from .bnb_files import find_matrix, read_matrix
from .experts import QuantizedExperts


class BitsAndBytesExperts(QuantizedExperts):
    """Routed experts of which each matrix is what a linear layer of bitsandbytes would hold.

    Attributes:
        weight_dtype: of the weights that were quantized, which files record.
    """

    is_packed_one_by_one = True

    def __init__(self, experts: Experts, form: BitsAndBytesFormat, weight_dtype: torch.dtype):
        # Of two matrices, each by itself.
        super().__init__(experts, form, replace(form, matrices=2))
        self.weight_dtype = weight_dtype

    @torch.no_grad()
    def parts_of_checkpoint(
        self, stack: str, experts: Iterable[Sequence[Mapping[str, Stored]]], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """The parts of a stack by their names, on a device.

        Args:
            stack: its name.
            experts: of each expert its matrices in the checkpoint, as tensors by kind.
            device: of the parts.
        """
        form = self.formats[stack]
        wholes = [
            torch.empty(self.num_experts, *shape, dtype=dtype, device=device)
            for shape, dtype in form.parts(self.sizes[stack])
        ]
        for number, matrices in enumerate(experts if device.type != "meta" else ()):
            for place, kinds in enumerate(matrices):
                parts = read_matrix(form, kinds, form.of_one(self.sizes[stack]))
                for whole, part in zip(wholes, parts, strict=True):
                    whole[number, place] = part
        return {stack + suffix: whole for suffix, whole in zip(form.suffixes, wholes, strict=True)}

    def unpacked_router(self, kinds: Mapping[str, Stored]) -> torch.Tensor:
        """The weight `[experts, hidden]` of a router of which a checkpoint has these tensors, by kind."""
        form, sizes = self.formats["down_proj"], (self.num_experts, self.sizes["down_proj"][0])
        return form.one_matrix(read_matrix(form, kinds, sizes), sizes, self.weight_dtype)

    def matrix_in_files(self, stack: str, kinds: Mapping[str, Stored]) -> list[Stored | torch.Tensor]:
        """For each part of one of an expert's matrices where files have it, or its number, as `find_matrix`."""
        form = self.formats[stack]
        return find_matrix(form, kinds, form.of_one(self.sizes[stack]))

    def name_of_layer(self, path: str, stack: str, number: int, place: int) -> str:
        """Name of the linear layer that a matrix is un-fused.

        Args:
            path: of these experts.
            stack: that has the matrix.
            number: of the expert.
            place: of the matrix in the expert's part of the stack.
        """
        return f"{path}.{number}.{PARTS_OF_STACKS[self.is_transposed][stack][place]}"

    def unfused(self, path: str, storage: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of all linear layers that these experts are un-fused, with their names; in the same memory.

        Beside a weight of 4 bits stand `weight.absmax`, `weight.quant_map`, with double quantization
        `weight.nested_absmax` and `weight.nested_quant_map`, and the rest as JSON in bytes, in
        `weight.quant_state.bitsandbytes__nf4`; beside one of 8 bits `SCB` and `weight_format`.

        Args:
            path: of these experts.
            storage: dtype in which files hold the bytes of 4-bit codes.
        """
        for number, stack in itertools.product(range(self.num_experts), STACKS):
            form = self.formats[stack]
            for place in range(form.matrices):
                name = self.name_of_layer(path, stack, number, place)
                # In storages of their own: tensors that share one are saved into one file.
                parts = [torch.from_dlpack(part[number, place]) for part in self.parts(stack)]
                if isinstance(form, Bnb4Bit):
                    yield f"{name}.weight", parts[0].view(storage).view(-1, 1)
                    state = form.state(parts, form.of_one(self.sizes[stack]), self.weight_dtype)
                    # Files hold no tensor twice.
                    state.code = state.code.clone()
                    for kind, tensor in state.as_dict(packed=True).items():
                        yield f"{name}.weight.{kind}", tensor
                else:
                    yield f"{name}.weight", parts[0]
                    yield f"{name}.SCB", parts[1]
                    # Row by row, the only one that is left of several formats.
                    yield f"{name}.weight_format", torch.tensor(0, dtype=torch.uint8)


def packed_experts(model: nn.Module) -> dict[str, BitsAndBytesExperts]:
    """A model's experts in bitsandbytes' formats, by their paths."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BitsAndBytesExperts)}
