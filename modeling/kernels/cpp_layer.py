"""A decoder layer for one token on a CPU, in three calls of the compiled kernels: what stands around a cache's update.

Shapes: H hidden size, F intermediate size, K cached keys.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .cpp_kernels import BITS, Matrix, belong_together, library_for, pointers


class Rotation(NamedTuple):
    """How queries and keys are rotated.

    Attributes:
        table: begins with the first cosine in float32, on the CPU.
        sine_offset: float32 numbers from there to the first sine, which may be in another tensor that the caller keeps.
        step: float32 numbers from one of the `head_dim / 2` cosines to the next, and from sine to sine.
        is_interleaved: whether a pair of channels stands side by side, or half a head apart.
    """

    table: torch.Tensor
    sine_offset: int
    step: int
    is_interleaved: bool


def cpp_project(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    matrices: Sequence[Matrix],
    head_dim: int,
    rotation: Rotation | None,
    qk_eps: float,
    query_scale: float,
) -> torch.Tensor | None:
    """Queries, keys and values of one token, `[outputs]` side by side; None where there is no kernel.

    Args:
        x: of one token, `[..., H]` on the CPU.
        norm: weight of the RMSNorm before, `[H]` in the dtype of `x`.
        eps: its eps.
        matrices: of queries, keys and values, for rows of the dtype of `x`.
        head_dim: channels of a head.
        rotation: of queries and keys, or None.
        qk_eps: eps of the norm of each of their heads after that; negative for none.
        query_scale: what queries are multiplied by at last.
    """
    found = library_for(matrices)
    if found is None or any(matrix.inputs != x.shape[-1] for matrix in matrices):
        return None
    y = x.new_empty(sum(matrix.codes.shape[0] for matrix in matrices))
    placed: list[Any] = []
    for matrix in matrices:
        placed += (*pointers(matrix), matrix.codes.shape[0])
    turned: tuple[Any, ...] = (None, None, 0, False)
    if rotation is not None:
        first = rotation.table.data_ptr()
        turned = first, first + 4 * rotation.sine_offset, rotation.step, rotation.is_interleaved
    found.project(
        BITS[x.dtype],
        x.data_ptr(),
        norm.data_ptr(),
        eps,
        y.data_ptr(),
        matrices[0].bits,
        x.shape[-1],
        matrices[0].group_size,
        torch.get_num_threads(),
        *placed,
        head_dim,
        *turned,
        qk_eps,
        query_scale,
    )
    return y


def cpp_attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    output: Matrix,
    residual: torch.Tensor,
) -> torch.Tensor | None:
    """`residual + output(attention)` for one token that sees all keys; None where there is no kernel.

    Args:
        queries: begins with `[heads * head_dim]` numbers.
        keys: `[1, key heads, K, head_dim]` in the same dtype, with channels side by side.
        values: likewise.
        scaling: factor of the scores.
        output: matrix of the output projection.
        residual: contiguous.

    Returns:
        the shape of `residual`.
    """
    _, key_heads, count, head_dim = keys.shape
    heads, rest = divmod(output.inputs, head_dim)
    fits = (
        not rest
        and heads % key_heads == 0
        and keys.shape == values.shape
        and output.outputs == residual.shape[-1]
    )
    if not fits or (found := library_for((output,))) is None:
        return None
    y = torch.empty_like(residual)
    found.attend_and_project(
        BITS[residual.dtype],
        queries.data_ptr(),
        keys.data_ptr(),
        keys.stride(1),
        keys.stride(2),
        values.data_ptr(),
        values.stride(1),
        values.stride(2),
        count,
        heads,
        key_heads,
        head_dim,
        scaling,
        output.bits,
        output.group_size,
        torch.get_num_threads(),
        *pointers(output),
        output.codes.shape[0],
        residual.data_ptr(),
        y.data_ptr(),
    )
    return y


def cpp_normalized_feed_forward(
    x: torch.Tensor, norm: torch.Tensor, eps: float, gate: Matrix, up: Matrix, down: Matrix
) -> torch.Tensor | None:
    """`x + feed_forward(rms_norm(x))`; None where there is no kernel.

    Args:
        x: `[..., H]` on the CPU, contiguous.
        norm: weight of the norm, `[H]` in the dtype of `x`.
        eps: its eps.
        gate: F outputs, output-first.
        up: likewise.
        down: F inputs, or more after padding.
    """
    found = library_for((gate, up, down))
    size = x.shape[-1]
    if found is None or down.outputs != size or not belong_together(size, gate.outputs, gate, up, down):
        return None
    y = torch.empty_like(x)
    found.normalized_feed_forward(
        BITS[x.dtype],
        x.data_ptr(),
        norm.data_ptr(),
        eps,
        y.data_ptr(),
        x.numel() // x.shape[-1],
        gate.bits,
        x.shape[-1],
        gate.codes.shape[0],
        down.inputs,
        gate.group_size,
        torch.get_num_threads(),
        *pointers(gate, up, down),
    )
    return y
