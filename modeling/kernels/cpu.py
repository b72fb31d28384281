"""`linear` and `rms_norm` for all layers: both choose between torch and the CPU kernels.

`linear` returns what `torch.nn.functional.linear` returns. On a CPU in inference it multiplies few rows by a compiled
kernel (`cpp_kernels`). In bfloat16 and float16 on a processor without instructions for them it multiplies block by
block in float32 (`float32_blocks`), also in training and under autocast: torch's product takes up to thirty times as
long as in float32. All other products are torch's. A compiler records one operator, which chooses when it runs.

With `LLAMOE_CPU_SHORTCUTS=0` in the environment when llamoe is imported, everything is torch's.

Shapes: N rows, I inputs, O outputs.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .._private_api import is_any_autocast_on, is_traced_by_jit, torch_modes_active
from .cpp_kernels import cpp_product, cpp_rms_norm, plain_matrix
from .float32_blocks import in_float32, plain_max_rows, product_of_16_bits, rows_of_torch
from .limits import CPP_PLAIN_MAX_ROWS
from .tracing import is_exported

SHORTCUTS_ARE_ON = os.environ.get("LLAMOE_CPU_SHORTCUTS", "1") != "0"
"""False if the environment variable turns all faster ways of this folder on CPUs off."""

_PLAIN = (torch.Tensor, nn.Parameter)
# For matrices with fewer weights, calling the kernel costs more time than the kernel saves. With few inputs, as in
# LoRA's second factor, torch's product is up to ten times as fast, since the kernel computes outputs one by one.
_MIN_WEIGHTS, _MIN_INPUTS = 1 << 15, 128


def can_use_shortcut(x: torch.Tensor) -> bool:
    """Return True if `x` is on the CPU in inference, without autocast, tracer, compiler or transform."""
    return (
        SHORTCUTS_ARE_ON
        and not torch.is_grad_enabled()
        and type(x) is torch.Tensor
        # Before `x.is_cpu`: under a compiler or tracer this would add a guard, or become part of the trace.
        and not (torch.compiler.is_compiling() or is_traced_by_jit())
        and x.is_cpu
        and not (is_any_autocast_on() and torch.is_autocast_enabled("cpu"))
        and not torch_modes_active()
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply rows by the transpose of a matrix, as `torch.nn.functional.linear` does.

    Args:
        x: `[..., I]`.
        weight: `[O, I]`, contiguous, or a view of an input-first matrix.
        bias: `[O]` or None.

    Returns:
        `[..., O]`.
    """
    if (
        not SHORTCUTS_ARE_ON
        # Shards, tracers' tensors and other libraries' quantized weights are subclasses.
        or type(x) is not torch.Tensor
        or type(weight) not in _PLAIN
        or not (x.is_cpu and weight.is_cpu)
        or weight.layout != torch.strided
        or weight.dim() != 2
        or x.shape[-1:] != weight.shape[1:]
        # An exported program may run on another machine. Dispatch modes must see torch's operators.
        or is_exported()
        or not (torch.compiler.is_compiling() or not torch_modes_active())
    ):
        return F.linear(x, weight, bias)
    is_cast = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
    if not (is_cast or torch.is_grad_enabled()):
        if x.dtype != weight.dtype:
            return F.linear(x, weight, bias)
        return (_operator if torch.compiler.is_compiling() else _product)(x, weight, bias)
    dtype = torch.get_autocast_dtype("cpu") if is_cast else x.dtype
    # Autocast casts float32, too.
    takes = (dtype, torch.float32) if is_cast else (dtype,)
    if rows_of_torch(dtype) is None or x.dtype not in takes or weight.dtype not in takes:
        return F.linear(x, weight, bias)
    y = product_of_16_bits(x.to(dtype).reshape(-1, x.shape[-1]), weight.to(dtype))
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Divide rows `[..., D]` by their root mean square, and multiply them by a weight `[D]`, if there is one.

    Sums are in float32; the quotient is rounded to the dtype of `x`. For few rows in inference on a CPU a compiled
    kernel takes the place of torch's ten operations, which take 2 to 4 % of the time of a token in a 7B model in int4.
    """
    if (
        can_use_shortcut(x)
        and type(weight) in _PLAIN
        and x.dtype == weight.dtype
        and x.shape[-1:] == weight.shape
        and 0 < x.numel() <= weight.numel() * CPP_PLAIN_MAX_ROWS
        and weight.is_cpu
        and weight.is_contiguous()
        and (y := cpp_rms_norm(x, weight, eps)) is not None
    ):
        return y
    # Under autocast `F.rms_norm` may return float32.
    y = F.rms_norm(x, x.shape[-1:], None, eps).to(x.dtype)
    return y if weight is None else y * weight


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply as `linear`, without gradients, if rows and weight have the same dtype: `[..., O]`."""
    y, size = None, weight.shape[1]
    num_rows = x.numel() // size if size else 0
    is_large = weight.numel() >= _MIN_WEIGHTS and size >= _MIN_INPUTS
    if is_large and num_rows <= plain_max_rows(x.dtype, weight.is_contiguous()):
        matrix = plain_matrix(weight)
        y = None if matrix is None else cpp_product(x, matrix)
    if y is None and rows_of_torch(x.dtype) is not None and size:
        y = in_float32(x.reshape(-1, size), weight)
        y = None if y is None else y.view(*x.shape[:-1], len(weight))
    if y is None:
        return F.linear(x, weight, bias)
    return y if bias is None else y.add_(bias)


@torch.library.custom_op("llamoe::linear", mutates_args=())
def _operator(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _product(x, weight, bias).contiguous()


@_operator.register_fake
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def widened(attend: Callable, query: torch.Tensor) -> Callable:
    """Wrap an attention function to compute in float32 if torch's bfloat16 or float16 products are slow on this CPU.

    Gradients become faster most: torch computes them in scalar loops.

    Args:
        attend: an attention function of transformers' interface.
        query: `[B, H, Q, D]`.
    """
    is_eligible = SHORTCUTS_ARE_ON and type(query) is torch.Tensor and query.is_cpu and not is_exported()
    # Casting all cached keys for the query of a single token costs more than it saves.
    if not is_eligible or rows_of_torch(query.dtype) is None or query.shape[2] == 1:
        return attend

    def compute(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs
    ):
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            mask = mask.float()
        # Autocast would cast the inputs back.
        with torch.autocast("cpu", enabled=False):
            output, weights = attend(module, query.float(), key.float(), value.float(), mask, **kwargs)
        return output.to(query.dtype), weights if weights is None else weights.to(query.dtype)

    return compute
