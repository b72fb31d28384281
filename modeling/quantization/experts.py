"""Routed experts whose matrices are stored in few bits: a store beside the resident stack (`moe.stores`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..kernels import Matrix
from ..moe import Experts, Group, OutputFirstExperts
from .formats import Format
from .packed import Packed, check_finite
from .products import multiply_groups, quantized_product

STACKS = ("gate_up_proj", "down_proj")
# The experts implementations that ask for one expert's matrix at a time. None is the default, `llamoe`.
_IMPLEMENTATIONS = (None, "llamoe", "llamoe_loop", "eager")


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
        nn.Module.__init__(self)
        # Sizes, config, and what transformers' decorator and peft ask for.
        self.__dict__.update({k: v for k, v in experts.__dict__.items() if k not in nn.Module().__dict__})
        self.act_fn = experts.act_fn
        self.format = form
        self.formats = {"gate_up_proj": gate_up_form or form, "down_proj": form}
        self.sizes = {name: tuple(experts.input_first(name).shape[:0:-1]) for name in STACKS}
        """For each stack O and I."""
        for name, (shape, dtype) in self.part_shapes().items():
            part = torch.empty(shape, dtype=dtype)
            if name in STACKS:
                self.register_parameter(name, nn.Parameter(part, requires_grad=False))
            else:
                self.register_buffer(name, part)
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

    def check_implementation(self, name: str | None) -> None:
        """Refuse an experts implementation that would take the codes for weights.

        Raises:
            ValueError: one that multiplies whole stacks.
        """
        if name not in _IMPLEMENTATIONS:
            raise ValueError(
                f'experts_implementation="{name}" needs stacks of 16 or 32 bits, but these experts are stored as '
                f'{self.format.key}: choose "llamoe", or model.dequantize().'
            )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Experts.forward`, in the implementations that know packed stacks."""
        self.check_implementation(self.config._experts_implementation)
        return super().forward(*args, **kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the products."""
        return self.format.compute_dtype

    def parts(self, name: str) -> list[torch.Tensor]:
        """The parts of a stack."""
        return [getattr(self, name + suffix) for suffix in self.format.suffixes]

    def stack_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the stack that the parts mean, in the family's own order."""
        num_out, num_in = self.sizes[name]
        return (self.num_experts, *((num_in, num_out) if self.is_transposed else (num_out, num_in)))

    def unpacked_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stacks that the parts mean, by their names."""
        return {name: self.stack_shape(name) for name in STACKS}

    def input_first(self, name: str) -> torch.Tensor:
        """Refused: there is no such tensor.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{name} is stored as {self.format.key}, and is no stack of numbers to multiply by.")

    def matrices(self, name: str) -> list[torch.Tensor]:
        """The matrices `[in, out]` that the parts mean."""
        return [self._matrix(name, expert, self.dtype).T for expert in range(self.num_experts)]

    def _matrix(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        parts = [part[expert] for part in self.parts(name)]
        return self.formats[name].matrix(parts, self.sizes[name], dtype)

    def _kernel_takes(self, x_NH: torch.Tensor, groups: list[Group]) -> bool:
        most = self.format.kernel_max_rows
        return x_NH.dtype == torch.bfloat16 and all(end - start <= most for _, start, end in groups)

    def matrix_for_kernel(self, name: str, expert: int) -> Matrix | None:
        """An expert's matrix of a stack; None if there is no kernel for it."""
        return self.format.for_kernel([part[expert] for part in self.parts(name)])

    def multiply_stack(self, x_NI: torch.Tensor, name: str, groups: Any, multiply: Callable) -> torch.Tensor:
        """The products of rows with their experts' matrices; arguments as in `Experts`."""
        x = x_NI.to(self.dtype)
        if isinstance(groups, list):
            return multiply_groups(self.formats[name], x, self.parts(name), self.sizes[name], groups)
        return quantized_product(
            x, self.parts(name), self.formats[name].key, list(self.sizes[name]), groups, transposed=False
        )

    def fits_grouped_mm(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> bool:
        """No: torch's grouped product takes no packed weights."""
        return False

    @torch.no_grad()
    def parts_of_checkpoint(
        self,
        stack: str,
        experts: Iterable[Sequence[Mapping[str, Any]]],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> dict[str, torch.Tensor]:
        """The parts of a stack, quantized; arguments as in `Experts`.

        Raises:
            CheckpointError: a scale is infinite or no number.
        """
        found: list[torch.Tensor] = []
        for expert, kinds in enumerate(experts):
            matrices = [each["weight"].content.to(device, dtype) for each in kinds]
            parts = self.formats[stack].quantize(matrices[0] if len(matrices) == 1 else torch.cat(matrices))
            found = found or [part.new_empty(self.num_experts, *part.shape) for part in parts]
            for whole, part in zip(found, parts, strict=True):
                whole[expert] = part
                if part.is_floating_point():
                    check_finite(part, str(kinds[0]["weight"]))
        return {stack + suffix: part for suffix, part in zip(self.format.suffixes, found, strict=True)}

    @torch.no_grad()
    def dequantized_weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The stack that the parts mean, in the family's own order."""
        stack = torch.empty(self.stack_shape(name), dtype=dtype, device=getattr(self, name).device)
        for expert, matrix in enumerate(stack.unbind(0)):
            found = self._matrix(name, expert, dtype)
            matrix.copy_(found.T if self.is_transposed else found)
        return stack

    def dequantized(self, dtype: torch.dtype) -> Experts:
        """Ordinary experts with the stacks that these ones mean."""
        with torch.device("meta"):
            experts = (Experts if self.is_transposed else OutputFirstExperts)(self.config)
        for name in STACKS:
            setattr(experts, name, nn.Parameter(self.dequantized_weight(name, dtype)))
        return experts.train(self.training)

    def extra_repr(self) -> str:
        """Show the sizes and the format in `print(model)`."""
        hidden_size, intermediate_size = self.sizes["down_proj"]
        return (
            f"num_experts={self.num_experts}, {hidden_size=}, {intermediate_size=}, format={self.format.key}"
        )
