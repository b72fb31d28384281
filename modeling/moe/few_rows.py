"""Few rows of experts on a GPU: one launch sums splits, adds what adapters add, and gates.

Shapes: N rows, H hidden_size, I intermediate_size.
"""

from typing import Any

import torch
from torch import nn

from ..kernels import Rows, gate_rows, is_silu, takes_few_rows, thin_rows, update_rows
from .low_rank import LowRank, Updates


def products_of_few_rows(
    experts: Any, x_NH: torch.Tensor, ids_N: torch.Tensor, updates: Updates
) -> torch.Tensor | None:
    """`Experts.products` of rows in any order; None where a stack has several adapters, or no kernel serves.

    Args:
        experts: of which the kernels multiply both stacks.
        x_NH: rows in the dtype of the products.
        ids_N: the expert of each row; what is outside of `0 … E - 1` stands for none.
        updates: what adapters add to the products of a stack.
    """
    is_known = all(len(each) == 1 and _is_plain(each[0]) for each in updates.values())
    if not is_known or not is_silu(experts.act_fn) or not takes_few_rows(x_NH):
        return None
    both = _multiply(experts, "gate_up_proj", x_NH, ids_N, updates)
    if both is None:
        return None
    size = both.parts.shape[2] // 2
    hidden_NI = gate_rows(both.columns(0, size), both.columns(size, 2 * size), x_NH.dtype, ids_N)
    down = None if hidden_NI is None else _multiply(experts, "down_proj", hidden_NI, ids_N, updates)
    return None if down is None else update_rows(down, x_NH.dtype, ids_N)


def _is_plain(update: LowRank) -> bool:
    drops = isinstance(update.dropout, nn.Dropout) and update.dropout.training
    return not isinstance(update.scale, torch.Tensor) and not drops


def _multiply(
    experts: Any, name: str, x_NC: torch.Tensor, ids_N: torch.Tensor, updates: Updates
) -> Rows | None:
    parts = experts.stack(name).multiply_on_device(x_NC, ids_N, by_id=True, transposed=False, is_summed=False)
    if name not in updates:
        return Rows(parts)
    [update] = updates[name]
    a_ECr, b_ErO = update.for_sorted_rows(x_NC)
    thin_Nr = thin_rows(x_NC, [a_ECr.transpose(1, 2)], ids_N)
    return None if thin_Nr is None else Rows(parts, thin_Nr, b_ErO.transpose(1, 2), float(update.scale))
