"""Rows times one expert's matrix, by the same product that whole stacks take.

Shapes: N rows, I columns in, O columns out.
"""

import torch
from torch.nn import functional as F

from ..kernels import Matrix, plain_matrix
from ..moe import Experts, multiply_groups
from ..quantization import multiply_packed_groups

Parts = list[torch.Tensor]
"""What one matrix is stored as: itself, or codes and what belongs to them, each with an axis of length 1 in front."""


def product(
    experts: Experts,
    x_NI: torch.Tensor,
    stack: str,
    parts: Parts,
    transposed: bool = False,
    is_grouped: bool = False,
) -> torch.Tensor:
    """Rows times a matrix.

    Args:
        experts: with the sizes and format of the matrix; their weights are not read.
        x_NI: `[N, I]`, or `[N, O]` if `transposed`.
        stack: name of the matrix' stack.
        parts: of the matrix.
        transposed: whether the matrix is multiplied from the other side, as in a backward pass.
        is_grouped: by torch's grouped product.
    """
    group = [(0, 0, len(x_NI))]
    if experts.is_packed:
        form, sizes = experts.formats[stack], experts.sizes[stack]
        return multiply_packed_groups(form, x_NI, parts, sizes, group, transposed)
    weight_1IO = parts[0] if experts.is_transposed != transposed else parts[0].transpose(1, 2)
    if is_grouped:
        ends = torch.tensor([len(x_NI)], dtype=torch.int32, device=x_NI.device)
        return F.grouped_mm(x_NI, weight_1IO.to(x_NI.dtype), offs=ends)
    return multiply_groups(x_NI, weight_1IO, group)


def matrix_of(experts: Experts, stack: str, parts: Parts) -> torch.Tensor:
    """The matrix, `[in, out]`."""
    if experts.is_packed:
        return (
            experts.formats[stack].matrix([part[0] for part in parts], experts.sizes[stack], experts.dtype).T
        )
    return parts[0][0] if experts.is_transposed else parts[0][0].T


def matrix_for_kernel(experts: Experts, stack: str, parts: Parts) -> Matrix | None:
    """The matrix for the CPU's compiled kernels; None where they do not take it."""
    if experts.is_packed:
        return experts.format.for_kernel([part[0] for part in parts])
    return plain_matrix(parts[0][0], experts.is_transposed)
