"""LoRA on experts: `y += scale * (dropout(x) A_e) B_e`, with a pair of factors for each expert.

Factors are multiplied as the experts' stacks are, with the same rows and groups. The stack that is adapted is not used,
so it may be frozen, packed or offloaded.

Shapes: N rows, E experts, I columns of the input, r rank, O columns of the output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..formats import Plain
from ..kernels import PEFT_ORDER_MAX_ROWS, linear
from .products import Group, Stack, plain_stack


@dataclass(frozen=True)
class LowRank:
    """An adapter's LoRA factors A and B for one stack. B is in peft's order, in which the last index is the expert."""

    a_EIr: torch.Tensor
    b_OrE: torch.Tensor
    scale: float
    dropout: Callable[[torch.Tensor], torch.Tensor]

    def stacks(self, dtype: torch.dtype) -> tuple[Stack, Stack]:
        """Describe A and B as stacks for products in `dtype`."""
        stacks = plain_stack(self.a_EIr), plain_stack(self.b_OrE.permute(2, 1, 0))
        for stack in stacks:
            form: Any = stack.form
            stack.form = Plain(dtype, form.is_input_first)
        return stacks

    def add(self, y_NO: torch.Tensor, x_NI: torch.Tensor, groups: Any, multiply: Callable) -> torch.Tensor:
        """Return `y_NO` plus this update, in the dtype of `y_NO`.

        Args:
            y_NO: products of the rows with the stack.
            x_NI: the rows.
            groups: which rows belong to which expert, in the form that `multiply` takes.
            multiply: the product of rows, a stack, and `groups`.
        """
        # A GPU has instructions and kernels for the rows' dtype; a CPU multiplies in the factors' dtype.
        dtype = x_NI.dtype if x_NI.is_cuda else self.a_EIr.dtype
        thin_Nr = multiply(self.dropout(x_NI.to(dtype)), plain_stack(self.a_EIr.to(dtype)), groups)
        # Scale here, where the product has r columns, not O.
        thin_Nr = thin_Nr * self.scale
        if isinstance(groups, list) and len(x_NI) <= PEFT_ORDER_MAX_ROWS:
            update_NO = self._multiply_in_pefts_order(thin_Nr, groups)
        else:
            # Copy B as a 2-D transpose, which is much faster than a copy of three permuted axes.
            b_rEO = self.b_OrE.to(dtype).flatten(1).t().contiguous().unflatten(0, self.b_OrE.shape[1:])
            update_NO = multiply(thin_Nr, plain_stack(b_rEO.transpose(0, 1)), groups)
        return (y_NO + update_NO).to(y_NO.dtype)

    def _multiply_in_pefts_order(self, thin_Nr: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """Multiply few rows by all experts' B at once: this is faster than a copy of B in the order of stacks."""
        spread_NrE = thin_Nr.new_zeros(*thin_Nr.shape, self.b_OrE.shape[2])
        for expert, start, end in groups:
            # Rows without an expert stay zero.
            if expert < spread_NrE.shape[2]:
                spread_NrE[start:end, :, expert] = thin_Nr[start:end]
        return linear(spread_NrE.flatten(1), self.b_OrE.flatten(1).to(thin_Nr.dtype))


@dataclass(frozen=True)
class ExpertsLora:
    """The updates of the active adapters for both stacks."""

    gate_up_proj: tuple[LowRank, ...] = ()
    down_proj: tuple[LowRank, ...] = ()

    def of(self, stack: str) -> tuple[LowRank, ...]:
        """Return the updates of the stack of this name."""
        return getattr(self, stack)

    def with_stack(self, stack: str, updates: Sequence[LowRank]) -> "ExpertsLora":
        """Return a copy with these updates for the stack of this name."""
        return replace(self, **{stack: tuple(updates)})

    def updates(self) -> tuple[LowRank, ...]:
        """Return the updates of both stacks."""
        return self.gate_up_proj + self.down_proj

    def factors(self) -> list[torch.Tensor]:
        """Return A and B of all updates."""
        return [factor for update in self.updates() for factor in (update.a_EIr, update.b_OrE)]


NO_LORA = ExpertsLora()
