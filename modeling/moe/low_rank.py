"""What adapters add to the experts' products: `y += scale * (dropout(x) A_e) B_e`, a pair of thin matrices an expert.

The pair is multiplied as the experts' own stacks are, with the same rows and groups. Nothing touches a stack, which may
be frozen, packed or offloaded.

Shapes: T tokens, k experts a token, N = T * k rows, E experts, I columns in, r rank, O columns out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..kernels import PEFT_ORDER_MAX_ROWS, multiply_rows
from .grouped_product import Stack, plain_stack


@dataclass(frozen=True)
class LowRank:
    """An adapter's update of one stack. The second factor is in peft's order, with the expert as the fastest index."""

    a_EIr: torch.Tensor
    b_OrE: torch.Tensor
    scale: float | torch.Tensor
    """One number, or `[T, 1]`: one for each token, where the rows of a batch have adapters of their own."""
    dropout: Callable[[torch.Tensor], torch.Tensor]

    def of_rows(self, tokens_N: torch.Tensor) -> "LowRank":
        """The same for rows: the token of each row, `[N]`."""
        if not isinstance(self.scale, torch.Tensor):
            return self
        return replace(self, scale=self.scale.index_select(0, tokens_N))

    def stacks(self) -> tuple[Stack, Stack]:
        """Both factors, in the order of their products."""
        return plain_stack(self.a_EIr), plain_stack(self.b_OrE.permute(2, 1, 0))

    def add(self, y_NO: torch.Tensor, x_NI: torch.Tensor, groups: Any, multiply: Callable) -> torch.Tensor:
        """`y_NO` with this update, in the dtype of `y_NO`; computed in the dtype of the factors.

        Args:
            y_NO: the stack's products.
            x_NI: the rows that were multiplied.
            groups: which rows belong to which expert, in the form that `multiply` takes.
            multiply: the product of rows, a stack, and `groups`.
        """
        thin_Nr = multiply(self.dropout(x_NI.to(self.a_EIr.dtype)), plain_stack(self.a_EIr), groups)
        # The thin product is scaled: it is narrower than the result.
        thin_Nr = thin_Nr * self.scale
        if isinstance(groups, list) and len(x_NI) <= PEFT_ORDER_MAX_ROWS:
            update_NO = self._multiply_in_pefts_order(thin_Nr, groups)
        else:
            # A whole transpose first: its copy is much faster than that of three axes in another order.
            b_rEO = self.b_OrE.flatten(1).t().contiguous().unflatten(0, self.b_OrE.shape[1:])
            update_NO = multiply(thin_Nr, plain_stack(b_rEO.transpose(0, 1)), groups)
        return (y_NO + update_NO).to(y_NO.dtype)

    def _multiply_in_pefts_order(
        self, thin_Nr: torch.Tensor, groups: list[tuple[int, int, int]]
    ) -> torch.Tensor:
        spread_NrE = thin_Nr.new_zeros(*thin_Nr.shape, self.b_OrE.shape[2])
        for expert, start, end in groups:
            # Rows of no expert are zero.
            if expert < spread_NrE.shape[2]:
                spread_NrE[start:end, :, expert] = thin_Nr[start:end]
        return multiply_rows(spread_NrE.flatten(1), self.b_OrE.flatten(1).to(thin_Nr.dtype))


Updates = Mapping[str, Sequence[LowRank]]
"""For each stack's name, the updates of the active adapters."""


def of_rows(updates: Updates, tokens_N: torch.Tensor) -> Updates:
    """The same updates, for rows of these tokens."""
    return {name: [update.of_rows(tokens_N) for update in each] for name, each in updates.items()}


def factors(updates: Updates) -> Iterator[torch.Tensor]:
    """All matrices of all updates."""
    for each in updates.values():
        for update in each:
            yield from (update.a_EIr, update.b_OrE)
