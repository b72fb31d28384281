"""Faster float32 paths for decoding on a CPU: the same numbers up to the order of summation.

They are used only in inference, without hooks, autocast, tracing or compilation: `can_use_shortcut` checks all of
that, but for hooks of single modules, which the caller checks.

A decode step on a CPU is bound by the number of calls and by reading weights: for a few rows, a product reads a matrix
and little else. torch calls MKL's plain product, which reaches a third to a half of the memory's speed on a CPU and
reads input-first weights on one thread only. Other calls are faster, each for its own kind of weight
(`python -m benchmarks.cpu --cases parts` compares them, on weights that are in no cache):

* output first (`nn.Linear`): MKL's batched product, with the weight's rows cut into a batch;
* input first (experts), narrow: the sum of the weight's rows, weighted by the input, as embeddings are summed;
* input first, wide, and several threads: the batched product again, with the input cut into a batch.

In 16 bits the plain product is as good. The layers stay `nn.Linear`, which adapters, quantizers and tracers know.

Shapes: R rows, I columns in, O columns out, P parts; in attention B batch, H query heads, G key/value heads, K keys,
D head_dim.
"""

import functools
from typing import Any

import torch
from torch import nn

from .._private_api import is_observed

CPU_SHORTCUT_MAX_ROWS = 3
"""Up to this many tokens norms and products use shortcuts. Above, norms keep every bit and products gain little."""

# Smaller weights gain less than the extra calls cost.
_MIN_WEIGHTS = 1 << 15
# Numbers of parts that a weight is cut into, best first; and those for more than `_MANY_THREADS` threads.
_PARTS = (16, 8, 4, 2)
_PARTS_FOR_MANY_THREADS = (64, *_PARTS)
_MANY_THREADS = 8
# Up to this many columns FBGEMM (kernels on x86 only) sums rows in one pass; above it in several.
_MAX_SUMMED = 576 if "fbgemm" in torch.backends.quantized.supported_engines else 0


def can_use_shortcut(x: torch.Tensor) -> bool:
    """Whether `x` is float32 on the CPU in inference, without autocast, tracing, compilation or global hooks."""
    return (
        not torch.is_grad_enabled()
        and type(x) is torch.Tensor
        # Checked before the tensor is read: reading it would add guards, or enter the trace.
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and x.is_cpu
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not is_observed()
    )


def apply_linear(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call a linear layer; the result is its own, up to the order of summation.

    Args:
        linear: `nn.Linear`, or the module of an adapter or quantizer that replaces it.
        x: `[..., in_features]`.

    Returns:
        `[..., out_features]`.
    """
    if (
        type(linear) is nn.Linear
        and can_use_shortcut(x)
        and x.numel() <= CPU_SHORTCUT_MAX_ROWS * linear.in_features
    ):
        weight = linear._parameters.get("weight")
        if (
            weight is not None
            and _is_plain_weight(weight)
            and x.shape[-1:] == (linear.in_features,)
            and not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__)
        ):
            return _multiply_in_parts(x, weight, linear.bias)
    return linear(x)


def multiply_row(x_1I: torch.Tensor, weight_IO: torch.Tensor) -> torch.Tensor:
    """Multiply a single row by an input-first weight, such as an expert's.

    Args:
        x_1I: `[1, I]`.
        weight_IO: `[I, O]`, in the same dtype.

    Returns:
        `[1, O]`: `x @ weight`, up to the order of summation.
    """
    if can_use_shortcut(x_1I) and _is_plain_weight(weight_IO):
        num_in, num_out = weight_IO.shape
        num_threads = torch.get_num_threads()
        parts = 1 if num_threads == 1 else _divisor(num_in, num_threads)
        if num_out <= _MAX_SUMMED:
            indices_I, offsets_P = _consecutive(num_in, parts)
            y_PO = torch.embedding_bag(
                weight_IO, indices_I, offsets_P, per_sample_weights=x_1I.reshape(-1), mode=0
            )[0]
            return y_PO if parts == 1 else y_PO.sum(0, keepdim=True)
        if parts > 1:
            y_P1O = torch.bmm(x_1I.reshape(parts, 1, -1), weight_IO.view(parts, -1, num_out))
            return y_P1O.sum(0)
    return torch.mm(x_1I, weight_IO)


def multiply_few(x_RI: torch.Tensor, weight_IO: torch.Tensor) -> torch.Tensor:
    """Multiply a few rows by an input-first weight, or by the transpose of an output-first one.

    Args:
        x_RI: `[R, I]`.
        weight_IO: `[I, O]`, in the same dtype.

    Returns:
        `[R, O]`: `x @ weight`, up to the order of summation.
    """
    if len(x_RI) == 1 and weight_IO.is_contiguous():
        return multiply_row(x_RI, weight_IO)
    if 0 < len(x_RI) <= CPU_SHORTCUT_MAX_ROWS and can_use_shortcut(x_RI) and _is_plain_weight(weight_IO.T):
        return _multiply_in_parts(x_RI, weight_IO.T, None)
    return torch.mm(x_RI, weight_IO)


def _is_plain_weight(weight: torch.Tensor) -> bool:
    return (
        type(weight) in (torch.Tensor, nn.Parameter)
        and weight.dtype == torch.float32
        and weight.is_cpu
        and weight.layout == torch.strided
        and weight.is_contiguous()
        and weight.numel() >= _MIN_WEIGHTS
        and torch.backends.mkl.is_available()
    )


def _multiply_in_parts(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    num_out, num_in = weight_OI.shape
    parts = _divisor(num_out, torch.get_num_threads())
    if parts == 1 or not x.numel():
        return nn.functional.linear(x, weight_OI, bias_O)
    num_rows = x.numel() // num_in
    # Strides of a transposed matrix, also for one row: torch chooses the MKL call by them.
    x_PIR = x.contiguous().as_strided((parts, num_in, num_rows), (0, 1, num_in))
    out_POR = torch.bmm(weight_OI.view(parts, -1, num_in), x_PIR)
    shape = (*x.shape[:-1], num_out)
    out = out_POR.view(shape) if num_rows == 1 else out_POR.view(num_out, num_rows).T.reshape(shape)
    return out if bias_O is None else out + bias_O


@functools.lru_cache(maxsize=256)
def _divisor(size: int, num_threads: int) -> int:
    choices = _PARTS if num_threads <= _MANY_THREADS else _PARTS_FOR_MANY_THREADS
    return next((parts for parts in choices if size % parts == 0), 1)


@functools.lru_cache(maxsize=64)
def _consecutive(size: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers 0 to size - 1, and where each of `parts` equal parts of them begins."""
    indices = torch.arange(size, device="cpu")
    return indices, torch.arange(0, size, size // parts, device="cpu")


def are_single_queries(
    query: torch.Tensor, attention_mask: Any, dropout: float = 0.0, cache: Any = None, **_
) -> bool:
    """Whether `attend_to_single_queries` can replace transformers' function, which takes these arguments."""
    return (
        can_use_shortcut(query)
        and query.shape[2] == 1
        and not dropout
        and cache is None
        and (
            attention_mask is None
            or (isinstance(attention_mask, torch.Tensor) and attention_mask.shape[1:3] == (1, 1))
        )
    )


def attend_to_single_queries(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attention for one query a row that reads each key once: heads that share keys become queries of one head.

    Args:
        query: `[B, H, 1, D]`.
        key: `[B, G, K, D]`, of G key/value heads.
        value: likewise.
        attention_mask: None or `[B, 1, 1, K]`.
        scaling: factor of the scores.

    Returns:
        `[B, 1, H, D]`.
    """
    batch_size, num_heads, _, head_dim = query.shape
    packed = query.reshape(batch_size, key.shape[1], -1, head_dim)
    output = nn.functional.scaled_dot_product_attention(packed, key, value, attention_mask, scale=scaling)
    return output.reshape(batch_size, 1, num_heads, head_dim)
