"""Faster calls for inference on a CPU: the same numbers up to the order of summation.

`can_use_shortcut` is the one guard: only in inference, without autocast, tracing, compilation, hooks on all modules or
transforms. What a shortcut needs besides, it checks itself. `LLAMOE_CPU_SHORTCUTS=0` in the environment, read when
llamoe is imported, turns all of them off: the model then runs the formulas that `layers`, `attention` and `moe` show.

* `apply_linears`, `apply_feed_forward`: linear layers of a few rows, by the compiled kernels of `cpp_kernels`; those
  that read the same rows by one call. A decode step is bound by reading weights, and torch reads them at half to three
  quarters of the memory's speed.
* `apply_linear`: the same for one layer. Without those kernels, on AMD processors in float32, it calls MKL's batched
  product, with the weight's rows cut into a batch. torch calls MKL's plain product, which reaches the memory's speed on
  Intel's processors and about half of it on AMD's. On Intel's the batched one is slower.
* `float32_blocks`: layers of 16 bits on processors without instructions for them, where torch takes up to thirty times
  float32's time.
* `apply_normalized_feed_forward`, and `attention.one_token`: half a layer with its norm and residual sum in a call or
  two. Calls otherwise take a fifth of a small model's step in few bits.
* `apply_gate`: SwiGLU's product takes no memory of its own. New memory costs more than the product: 8 % of a mixture's
  prefill from some 500 tokens on, and a fifth of its peak memory. One token gains nothing and loses nothing.
* `attend_to_single_queries`: attention of one query a row, reading each key once. torch's own way copies the cached
  keys for each query head that shares them, or takes a slow kernel, which costs most in bfloat16.

`python -m benchmarks.cpu --cases parts` measures the linear layer, on weights that are in no cache.

Shapes: R rows, I columns in, O columns out, P parts; in attention B batch, H query heads, G key/value heads, K keys,
D head_dim.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from .._private_api import is_observed
from .cpp_kernels import Matrix, cpp_feed_forward, cpp_products, plain_matrix
from .cpp_layer import cpp_normalized_feed_forward
from .float32_blocks import in_float32, rows_of_torch

SHORTCUTS_ARE_ON = os.environ.get("LLAMOE_CPU_SHORTCUTS", "1") != "0"
"""Whether shortcuts may be used at all."""

LINEAR_MAX_ROWS = 3
"""Up to this many rows a linear layer uses the batched product; above, it gains little."""

FEW_BITS_MAX_ROWS = 16
"""Up to this many rows layers of few bits share a call; above, calls are short beside products."""

PLAIN_MAX_ROWS = 4
"""Up to this many rows layers of 16 and 32 bits use the compiled kernels; above, torch's are faster."""

# Smaller weights gain less than the extra calls cost.
_LINEAR_MIN_WEIGHTS = 1 << 15
# Powers of two: how many parts a weight is cut into at most; and that for more than `_MANY_THREADS` threads.
_MAX_PARTS, _MAX_PARTS_FOR_MANY_THREADS = 16, 64
_MANY_THREADS = 8
# SiLU is known to return new memory, and to keep none of it.
_SILU = type(ACT2FN["silu"])
# Whether MKL's batched product beats its plain one. It does nowhere else.
_BATCHES_ARE_FASTER = torch.backends.mkl.is_available() and "AMD" in torch.cpu.get_capabilities().get(
    "cpu_name", ""
)


def can_use_shortcut(x: torch.Tensor) -> bool:
    """Whether `x` is on the CPU in inference, without autocast, tracing, compilation or global hooks."""
    return (
        SHORTCUTS_ARE_ON
        and not torch.is_grad_enabled()
        and type(x) is torch.Tensor
        # Checked before the tensor is read: reading it would add guards, or enter the trace.
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and x.is_cpu
        and not torch.is_autocast_enabled("cpu")
        and not is_observed()
    )


def apply_linear(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`linear(x)`.

    Args:
        linear: `nn.Linear`, or the module of an adapter or quantizer that replaces it.
        x: `[..., in_features]`.

    Returns:
        `[..., out_features]`.
    """
    if (found := _apply_by_kernel((linear,), x)) is not None:
        return found[0]
    if (
        _BATCHES_ARE_FASTER
        and type(linear) is nn.Linear
        and can_use_shortcut(x)
        and x.numel() <= LINEAR_MAX_ROWS * linear.in_features
        and x.shape[-1:] == (linear.in_features,)
        and x.dtype == torch.float32
        and _is_plain(linear, x.dtype)
    ):
        return _multiply_in_parts(x, linear.weight, linear.bias)
    if (
        type(linear) is nn.Linear
        and can_use_shortcut(x)
        and rows_of_torch(x.dtype) is not None
        and x.shape[-1:] == (linear.in_features,)
        and _is_plain(linear, x.dtype)
        and (y := in_float32(x.reshape(-1, linear.in_features), linear.weight)) is not None
    ):
        y = y.view(*x.shape[:-1], linear.out_features)
        return y if linear.bias is None else y + linear.bias
    return linear(x)


def apply_linears(linears: Sequence[nn.Module], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """`[linear(x) for linear in linears]`, for up to three layers; those of one format by one call."""
    together = _apply_by_kernel(linears, x)
    return [apply_linear(linear, x) for linear in linears] if together is None else together


def _apply_by_kernel(linears: Sequence[nn.Module], x: torch.Tensor) -> Sequence[torch.Tensor] | None:
    """The results of few rows by a compiled kernel; None where it does not know the layers."""
    matrices = matrices_of(linears, x)
    if matrices is None or (y := cpp_products(x.reshape(-1, x.shape[-1]), matrices)) is None:
        return None
    y = y.view(*x.shape[:-1], y.shape[1])
    return (
        (y,) if len(matrices) == 1 else y.split_with_sizes([matrix.codes.shape[0] for matrix in matrices], -1)
    )


def apply_feed_forward(
    gate: nn.Module, up: nn.Module, down: nn.Module, act_fn: nn.Module, x: torch.Tensor
) -> torch.Tensor:
    """`down(act_fn(gate(x)) * up(x))`; few rows by one call."""
    if is_silu(act_fn) and (matrices := matrices_of((gate, up, down), x)) is not None:
        y = cpp_feed_forward(x.reshape(-1, x.shape[-1]), *matrices)
        if y is not None:
            return y.view(*x.shape[:-1], y.shape[1])
    return apply_linear(down, apply_gate(act_fn, apply_linear(gate, x), apply_linear(up, x)))


def apply_normalized_feed_forward(
    norm: nn.Module, gate: nn.Module, up: nn.Module, down: nn.Module, act_fn: nn.Module, x: torch.Tensor
) -> torch.Tensor | None:
    """`x + down(act_fn(gate(norm(x))) * up(norm(x)))` of few rows by one call; None where there is no kernel."""
    if not is_silu(act_fn) or (matrices := matrices_of((gate, up, down), x)) is None or not x.is_contiguous():
        return None
    weight = norm_weight(norm, x)
    return None if weight is None else cpp_normalized_feed_forward(x, weight, norm.eps, *matrices)


def norm_weight(norm: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """The weight of an RMSNorm that nothing watches, in the dtype of `x`; otherwise None."""
    weight = norm._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.dtype != x.dtype or not weight.is_cpu or is_watched(norm):
        return None
    return weight if weight.is_contiguous() and weight.shape == x.shape[-1:] else None


def is_silu(act_fn: nn.Module) -> bool:
    """Whether an activation is SiLU, and nothing watches it."""
    return type(act_fn) is _SILU and not is_watched(act_fn)


def matrices_of(linears: Sequence[nn.Module], x: torch.Tensor) -> list[Matrix] | None:
    """The layers' matrices, all of one format, where a compiled kernel takes these rows; otherwise None."""
    if not (can_use_shortcut(x) and x.ndim and 0 < x.numel() <= FEW_BITS_MAX_ROWS * x.shape[-1]):
        return None
    are_few = x.numel() <= PLAIN_MAX_ROWS * x.shape[-1]
    matrices: list[Matrix] = []
    for linear in linears:
        matrix = None
        if type(linear) is nn.Linear:
            if are_few and _is_plain(linear, x.dtype) and linear.bias is None:
                matrix = plain_matrix(linear._parameters["weight"])
        # Asked of the class: adapters' and other libraries' layers have no such attribute.
        elif (
            getattr(type(linear), "is_packed", False) and x.dtype == torch.bfloat16 and not is_watched(linear)
        ):
            matrix = linear.for_kernel()
        if matrix is None:
            return None
        matrices.append(matrix)
    first = matrices[0]
    if len(matrices) > 1 and any(each[:2] != first[:2] for each in matrices[1:]):
        return None
    return matrices if first.inputs == x.shape[-1] else None


def multiply_rows(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Few rows `[N, I]` times the transpose of a matrix `[O, I]` that no `nn.Linear` holds; returns `[N, O]`."""
    is_plain = x_NI.dtype == weight_OI.dtype and type(weight_OI) in (torch.Tensor, nn.Parameter)
    is_plain = is_plain and x_NI.shape[1:] == weight_OI.shape[1:]
    if is_plain and len(x_NI) <= PLAIN_MAX_ROWS and can_use_shortcut(x_NI):
        matrix = plain_matrix(weight_OI)
        if matrix is not None and (y_NO := cpp_products(x_NI, [matrix])) is not None:
            return y_NO
        if _BATCHES_ARE_FASTER and x_NI.dtype == torch.float32 and weight_OI.is_contiguous():
            return _multiply_in_parts(x_NI, weight_OI, None)
    if is_plain and can_use_shortcut(x_NI) and (y_NO := in_float32(x_NI, weight_OI)) is not None:
        return y_NO
    return nn.functional.linear(x_NI, weight_OI)


def _is_plain(linear: nn.Linear, dtype: torch.dtype) -> bool:
    """Whether a layer without hooks holds an ordinary weight of this dtype, and is large enough."""
    weight = linear._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.dtype == dtype
        and weight.is_cpu
        and weight.layout == torch.strided
        and weight.is_contiguous()
        and weight.numel() >= _LINEAR_MIN_WEIGHTS
        and not is_watched(linear)
    )


def is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks, or another `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _multiply_in_parts(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    num_out, num_in = weight_OI.shape
    has_many_threads = torch.get_num_threads() > _MANY_THREADS
    parts = math.gcd(num_out, _MAX_PARTS_FOR_MANY_THREADS if has_many_threads else _MAX_PARTS)
    if parts == 1 or not x.numel():
        return nn.functional.linear(x, weight_OI, bias_O)
    num_rows = x.numel() // num_in
    # Strides of a transposed matrix, also for one row: torch chooses the MKL call by them.
    x_PIR = x.contiguous().as_strided((parts, num_in, num_rows), (0, 1, num_in))
    out_POR = torch.bmm(weight_OI.view(parts, -1, num_in), x_PIR)
    shape = (*x.shape[:-1], num_out)
    out = out_POR.view(shape) if num_rows == 1 else out_POR.view(num_out, num_rows).T.reshape(shape)
    return out if bias_O is None else out + bias_O


def apply_gate(act_fn: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`act_fn(gate) * up`."""
    hidden = act_fn(gate)
    if type(act_fn) is _SILU and not act_fn._forward_hooks and can_use_shortcut(hidden):
        return hidden.mul_(up)
    return hidden * up


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
