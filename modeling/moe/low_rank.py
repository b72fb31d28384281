"""The arithmetic of LoRA on experts: `y += scale * (dropout(x) A_e) B_e`, a pair of thin matrices an expert.

The pair is multiplied as the experts' own stacks are, with the same rows and groups. Nothing touches a stack, which may
be frozen, packed or offloaded. Sorted rows need the second factor in another order, a copy of all experts'. Decoding
keeps it (`kept`) until a factor changes.

Shapes: T tokens, k experts a token, N = T * k rows, E experts, I columns in, r rank, O columns out.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..formats import plain_format
from ..kernels import PEFT_ORDER_MAX_ROWS, TRITON_MAX_ROWS, is_recorded, linear
from .grouped_product import Stack, plain_stack


@dataclass(frozen=True)
class LowRank:
    """An adapter's update of one stack. The second factor is in peft's order, with the expert as the fastest index."""

    a_EIr: torch.Tensor
    b_OrE: torch.Tensor
    scale: float | torch.Tensor
    """One number, or `[T, 1]`: one for each token, where the rows of a batch have adapters of their own."""
    dropout: Callable[[torch.Tensor], torch.Tensor]
    kept: dict[str, Any] | None = None
    """Where the adapter keeps both factors as sorted rows need them, from one pass to the next; None: nowhere."""
    dtype: torch.dtype | None = None
    """Of the products; None: the factors' own."""

    def of_rows(self, tokens_N: torch.Tensor) -> "LowRank":
        """The same for rows: the token of each row, `[N]`."""
        if not isinstance(self.scale, torch.Tensor):
            return self
        return replace(self, scale=self.scale.index_select(0, tokens_N))

    def stacks(self) -> tuple[Stack, Stack]:
        """Stacks of the factors' sizes, in the order of their products and with the format of these."""
        stacks = plain_stack(self.a_EIr), plain_stack(self.b_OrE.permute(2, 1, 0))
        for stack in stacks:
            form: Any = stack.form
            stack.form = plain_format(self.dtype or self.a_EIr.dtype, form.is_input_first)
        return stacks

    def add(self, y_NO: torch.Tensor, x_NI: torch.Tensor, groups: Any, multiply: Callable) -> torch.Tensor:
        """`y_NO` with this update, in the dtype of `y_NO`.

        It is computed in `dtype`. Gradients are in the factors' own.

        Args:
            y_NO: the stack's products.
            x_NI: the rows that were multiplied.
            groups: which rows belong to which expert, in the form that `multiply` takes.
            multiply: the product of rows, a stack, and `groups`.
        """
        if isinstance(groups, list) and len(x_NI) <= PEFT_ORDER_MAX_ROWS:
            a_EIr, b_ErO = self.a_EIr, None
        else:
            a_EIr, b_ErO = self.for_sorted_rows(x_NI)
        thin_Nr = multiply(self.dropout(x_NI.to(a_EIr.dtype)), plain_stack(a_EIr), groups)
        # The thin product is scaled: it is narrower than the result.
        thin_Nr = (thin_Nr * self.scale).to(thin_Nr.dtype)
        if b_ErO is None:
            update_NO = self._multiply_in_pefts_order(thin_Nr, groups)
        else:
            update_NO = multiply(thin_Nr, plain_stack(b_ErO), groups)
        return (y_NO + update_NO).to(y_NO.dtype)

    def for_sorted_rows(self, x_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both factors, `[E, I, r]` and `[E, r, O]`, in the dtype of their products."""
        dtype = self.a_EIr.dtype if self.dtype is None else self.dtype

        def prepare() -> tuple[torch.Tensor, torch.Tensor]:
            # A whole transpose first: its copy is much faster than that of three axes in another order.
            b_rEO = self.b_OrE.to(dtype).flatten(1).t().contiguous().unflatten(0, self.b_OrE.shape[1:])
            return self.a_EIr.to(dtype), b_rEO.transpose(0, 1)

        if self.kept is None or is_recorded(x_NI):
            return prepare()
        owners = self.a_EIr._base, self.b_OrE._base
        if torch.is_grad_enabled() or any(each is None or each.is_inference() for each in owners):
            # Memory that training needs, and tensors that do not tell whether they changed.
            self.kept.clear()
            return prepare()
        state = (dtype, *((weakref.ref(each), each.data_ptr(), each._version) for each in owners))
        # Many rows repay a copy, and see what was written past torch's count of changes, as by `tensor.data`.
        if len(x_NI) > TRITON_MAX_ROWS or not _is_same(self.kept.get("state"), state):
            self.kept.update(factors=prepare(), state=state)
        return self.kept["factors"]

    def _multiply_in_pefts_order(
        self, thin_Nr: torch.Tensor, groups: list[tuple[int, int, int]]
    ) -> torch.Tensor:
        spread_NrE = thin_Nr.new_zeros(*thin_Nr.shape, self.b_OrE.shape[2])
        for expert, start, end in groups:
            # Rows of no expert are zero.
            if expert < spread_NrE.shape[2]:
                spread_NrE[start:end, :, expert] = thin_Nr[start:end]
        return linear(spread_NrE.flatten(1), self.b_OrE.flatten(1).to(thin_Nr.dtype))


def _is_same(before: tuple | None, now: tuple) -> bool:
    # References are the same where tensors are: equal tensors are others.
    return before is not None and all(
        old is new if isinstance(new, torch.dtype) else old[0]() is new[0]() and old[1:] == new[1:]
        for old, new in zip(before, now, strict=True)
    )


def forget_factors(model: nn.Module) -> None:
    """Let adapters make anew what they keep of their factors: they may have been changed where torch counts nothing."""
    for module in model.modules():
        for kept in vars(module).get("kept_factors", {}).values():
            kept.clear()


Updates = Mapping[str, Sequence[LowRank]]
"""For each stack's name, the updates of the active adapters."""


def of_rows(updates: Updates, tokens_N: torch.Tensor) -> Updates:
    """The same updates, for rows of these tokens."""
    return {name: [update.of_rows(tokens_N) for update in each] for name, each in updates.items()}


def have_own_scales(updates: Updates) -> bool:
    """Whether the rows of a batch have adapters of their own."""
    return any(isinstance(update.scale, torch.Tensor) for each in updates.values() for update in each)


def in_dtype(updates: Updates, dtype: torch.dtype) -> Updates:
    """The same updates, multiplied in this dtype."""
    return {name: [replace(update, dtype=dtype) for update in each] for name, each in updates.items()}


def factors(updates: Updates) -> Iterator[torch.Tensor]:
    """All matrices of all updates."""
    for each in updates.values():
        for update in each:
            yield from (update.a_EIr, update.b_OrE)
