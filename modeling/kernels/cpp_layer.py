"""What a decoder layer of few rows on a CPU is made of besides products: calls of the compiled kernels.

Shapes: N rows, H hidden size, F intermediate size, K cached keys.
"""

from typing import Any, NamedTuple

import torch

from .cpp_kernels import BITS, Matrix, Products, are_alike, library, place


def rms_norm(x: torch.Tensor, weight: int, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last axis, where there are kernels.

    Args:
        x: `[..., H]` in bfloat16 or float32 on the CPU.
        weight: address of `[H]` in the same dtype.
        eps: added to the mean square.
    """
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    library().rms_norm(BITS[x.dtype], x.data_ptr(), weight, y.data_ptr(), x.numel() // size, size, eps)
    return y


class Swiglu(NamedTuple):
    """The matrices of a feed-forward by their addresses, which are right as long as the tensors are there."""

    inputs: int
    outputs: int
    placed: Any


def prepare_swiglu(gate: Matrix, up: Matrix | None, down: Matrix) -> Swiglu | None:
    """What computes `down(silu(gate(x)) * up(x))`; None where the matrices do not fit, or there is no kernel.

    Args:
        gate: F outputs, or those of gate followed by those of up.
        up: F outputs, or None.
        down: F inputs, or more after padding.
    """
    size = gate.outputs // 2 if up is None else gate.outputs
    matrices = [gate, down] if up is None else [gate, up, down]
    fits = (
        are_alike(matrices)
        and (up is None or (up.inputs, up.outputs) == (gate.inputs, size))
        and 0 <= down.inputs - size < max(gate.group_size, 1)
    )
    return Swiglu(gate.inputs, down.outputs, place(matrices)) if fits and library() is not None else None


def swiglu(x: torch.Tensor, matrices: Swiglu) -> torch.Tensor:
    """`down(silu(gate(x)) * up(x))`, `[N, H]`."""
    inputs, outputs, placed = matrices
    x, num_rows = x.contiguous(), x.numel() // inputs
    y = x.new_empty(num_rows, outputs)
    threads = torch.get_num_threads()
    library().feed_forward(x.data_ptr(), y.data_ptr(), num_rows, placed, len(placed), threads)
    return y


def normalized_swiglu(x: torch.Tensor, norm: int, eps: float, matrices: Swiglu) -> torch.Tensor:
    """`x + swiglu(rms_norm(x))` for as many outputs as inputs, output-first; `norm` as in `rms_norm`."""
    inputs, _, placed = matrices
    x = x.contiguous()
    y = torch.empty_like(x)
    rows = BITS[x.dtype], x.data_ptr(), norm, eps, y.data_ptr(), x.numel() // inputs
    library().normalized_feed_forward(*rows, placed, len(placed), torch.get_num_threads())
    return y


def cpp_feed_forward(
    x_NH: torch.Tensor, gate: Matrix, up: Matrix | None, down: Matrix
) -> torch.Tensor | None:
    """`down(silu(gate(x)) * up(x))`, `[N, H]` in the dtype of the rows; None where there is no kernel.

    Args:
        x_NH: on the CPU; float32 for matrices of 32 bits, otherwise bfloat16.
        gate: as in `prepare_swiglu`, like the others.
    """
    matrices = prepare_swiglu(gate, up, down)
    return None if matrices is None or matrices.inputs != x_NH.shape[1] else swiglu(x_NH, matrices)


def has_feed_forward(num_in: int, gate: Matrix, down: Matrix) -> bool:
    """Whether `cpp_feed_forward` has a kernel for rows of so many numbers, where gate and up are one matrix."""
    matrices = prepare_swiglu(gate, None, down)
    return matrices is not None and matrices.inputs == num_in


def project(
    x: torch.Tensor,
    norm: int,
    eps: float,
    products: Products,
    head_dim: int,
    angles: tuple[torch.Tensor, ...],
    is_interleaved: bool,
    qk_eps: float,
    query_scale: float,
) -> torch.Tensor:
    """Queries, keys and values of one token, `[outputs]` side by side.

    Args:
        x: of one token, `[..., H]` on the CPU.
        norm: of the RMSNorm before, as in `rms_norm`.
        eps: its eps.
        products: those of queries, keys and values, for rows of the dtype of `x`.
        head_dim: channels of a head.
        angles: cosines and sines `[head_dim / 2]` float32, by which queries and keys are rotated; or nothing.
        is_interleaved: whether the channels of a rotated pair stand side by side, or half a head apart.
        qk_eps: eps of the norm of each of their heads after that; negative for none.
        query_scale: what queries are multiplied by at last.
    """
    y = x.new_empty(sum(products.sizes))
    row = BITS[x.dtype], x.data_ptr(), norm, eps, y.data_ptr(), products.placed, torch.get_num_threads()
    tables = [angle.data_ptr() for angle in angles] or [None, None]
    products.library.project(*row, head_dim, *tables, is_interleaved, qk_eps, query_scale)
    return y


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    products: Products,
    residual: torch.Tensor,
) -> torch.Tensor | None:
    """`residual + output(attention)` for one token that sees all keys; None where the sizes do not fit.

    Args:
        queries: begins with `[heads * head_dim]` numbers.
        keys: `[1, key heads, K, head_dim]` in the same dtype, with channels side by side.
        values: likewise.
        scaling: factor of the scores.
        products: that of the output projection.
        residual: contiguous.
    """
    _, key_heads, count, head_dim = keys.shape
    found, inputs, sizes, placed = products
    heads, rest = divmod(inputs, head_dim)
    if rest or heads % key_heads or keys.shape != values.shape or sizes[0] != residual.shape[-1]:
        return None
    y = torch.empty_like(residual)
    cached = [(each.data_ptr(), each.stride(1), each.stride(2)) for each in (keys, values)]
    found.attend_and_project(
        BITS[residual.dtype], queries.data_ptr(), *cached[0], *cached[1], count, key_heads, head_dim, scaling,
        placed, torch.get_num_threads(), residual.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    return y
