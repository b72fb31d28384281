"""What a CPU computes faster than torch does, for any number of rows; and what keeps shortcuts out of training.

`can_use_shortcut` is the guard: only in inference, without autocast, tracing, compilation, hooks on all modules or
transforms. `decode` asks it once a pass of few rows. `LLAMOE_CPU_SHORTCUTS=0` in the environment, read when llamoe is
imported, turns all shortcuts off: the model then runs the formulas that `layers`, `attention` and `moe` show.

* `apply_linear`, `multiply_rows`: products of 16 bits on processors without instructions for them, where torch takes up
  to thirty times float32's time (`float32_blocks`). This one is for training, too, and inside of adapters.
* `widened`: attention in the same 16 bits, in float32.
* `apply_gate`: SwiGLU's product takes no memory of its own. New memory costs more than the product: 8 % of a mixture's
  prefill from some 500 tokens on, and a fifth of its peak memory. One token gains nothing and loses nothing.

Shapes: N rows, I inputs, O outputs.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN

from .._private_api import are_watching, torch_modes_active
from .cpp_kernels import cpp_products, plain_matrix
from .float32_blocks import in_float32, plain_max_rows, product_of_16_bits, rows_of_torch
from .limits import MKL_BATCH_MAX_ROWS
from .tracing import is_exported

SHORTCUTS_ARE_ON = os.environ.get("LLAMOE_CPU_SHORTCUTS", "1") != "0"
"""Whether shortcuts may be used at all."""

# Somebody may put another in its place.
_LINEAR = nn.Linear.forward
# Smaller weights gain less than the extra calls cost.
_MIN_WEIGHTS = 1 << 15
# Powers of two: how many parts a weight is cut into at most; and that for more than `_MANY_THREADS` threads.
_MAX_PARTS, _MAX_PARTS_FOR_MANY_THREADS = 16, 64
_MANY_THREADS = 8
# SiLU is known to return new memory, and to keep none of it.
_SILU = type(ACT2FN["silu"])
# torch calls MKL's plain product, which reaches the memory's speed on Intel's processors and about half of it on AMD's.
# The batched one, with the weight's rows cut into a batch, reaches it there, and is slower on Intel's.
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
        and not torch_modes_active()
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, or another `forward`."""
    return are_watching(module._forward_hooks) or bool(
        module._forward_pre_hooks or "forward" in module.__dict__
    )


def is_silu(act_fn: nn.Module) -> bool:
    """Whether an activation is SiLU, and nothing watches it."""
    return type(act_fn) is _SILU and not has_hooks(act_fn)


def is_plain(weight: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether a weight is an ordinary parameter of this dtype on the CPU."""
    return (
        type(weight) is nn.Parameter
        and weight.dtype == dtype
        and weight.is_cpu
        and weight.layout == torch.strided
        and weight.is_contiguous()
    )


def plain_weight(linear: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight of an `nn.Linear` that nothing watches, if it is ordinary, of this dtype, and large enough."""
    if type(linear) is not nn.Linear or nn.Linear.forward is not _LINEAR or has_hooks(linear):
        return None
    weight = linear._parameters.get("weight")
    return weight if is_plain(weight, dtype) and weight.numel() >= _MIN_WEIGHTS else None


def apply_linear(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`linear(x)` for any number of rows.

    Args:
        linear: `nn.Linear`, or the module of an adapter or quantizer that replaces it.
        x: `[..., in_features]`.

    Returns:
        `[..., out_features]`.
    """
    if _slow_dtype(x) is None:
        return linear(x)
    if can_use_shortcut(x):
        return linear_by_torch(linear, x)
    if not torch.compiler.is_compiling():
        return _call_without_16_bits(linear, x)
    # Compilers do not follow modes through all modules.
    is_plain = type(linear) is nn.Linear and not has_hooks(linear)
    return _linear_in_float32(x, linear.weight, linear.bias) if is_plain else linear(x)


def linear_by_torch(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """The same where `can_use_shortcut` holds: by the fastest of torch's calls."""
    weight_OI = plain_weight(linear, x.dtype)
    if weight_OI is None or x.shape[-1:] != weight_OI.shape[1:]:
        return _call_without_16_bits(linear, x)
    y_NO = _multiply_by_torch(x.reshape(-1, x.shape[-1]), weight_OI)
    if y_NO is None:
        return linear(x)
    y = y_NO.view(*x.shape[:-1], len(weight_OI))
    return y if linear.bias is None else y + linear.bias


def multiply_rows(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Rows `[N, I]` times the transpose of a matrix `[O, I]` that no `nn.Linear` holds; returns `[N, O]`."""
    is_plain = x_NI.dtype == weight_OI.dtype and type(weight_OI) in (torch.Tensor, nn.Parameter)
    is_plain = is_plain and x_NI.shape[1:] == weight_OI.shape[1:]
    if is_plain and can_use_shortcut(x_NI):
        is_few = len(x_NI) <= plain_max_rows(x_NI.dtype)
        matrix = plain_matrix(weight_OI) if is_few else None
        y_NO = None if matrix is None else cpp_products(x_NI, [matrix])
        y_NO = _multiply_by_torch(x_NI, weight_OI) if y_NO is None else y_NO
        if y_NO is not None:
            return y_NO
    if is_plain and _slow_dtype(x_NI) is not None:
        return _linear_in_float32(x_NI, weight_OI)
    return nn.functional.linear(x_NI, weight_OI)


def _slow_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype of 16 bits in which torch would multiply these rows slowly; None where it is fast, or must be left."""
    # Stand-ins of tracers have classes of their own.
    if not SHORTCUTS_ARE_ON or type(x) is not torch.Tensor or not x.is_cpu:
        return None
    # Autocast leaves float64 alone.
    is_cast = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if is_cast else x.dtype
    most = rows_of_torch(dtype)
    # Exported programs go to other machines, and modes need torch's own operators.
    if most is None or is_exported() or (not torch.compiler.is_compiling() and torch_modes_active()):
        return None
    is_few = x.numel() <= most * x.shape[-1] and not torch.is_grad_enabled()
    return None if is_few else dtype


class _Without16Bits(TorchFunctionMode):
    """In it linear layers of 16 bits, wherever a module calls them, are multiplied in float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        function = _linear_in_float32 if func is nn.functional.linear else func
        return function(*args, **(kwargs or {}))


def _call_without_16_bits(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`linear(x)`, where adapters call the layer that they adapt, in which torch's products are replaced."""
    if _slow_dtype(x) is None:
        return linear(x)
    with _Without16Bits():
        return linear(x)


def _linear_in_float32(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear`, also under gradients, without torch's loops for 16 bits; under autocast in its dtype."""
    dtype = _slow_dtype(input)
    # Autocast casts float32, too.
    takes = (dtype, torch.float32) if torch.is_autocast_enabled("cpu") else (dtype,)
    if dtype is None or type(weight) not in (torch.Tensor, nn.Parameter) or weight.dtype not in takes:
        return nn.functional.linear(input, weight, bias)
    x, weight = input.to(dtype).reshape(-1, input.shape[-1]), weight.to(dtype)
    y = product_of_16_bits(x, weight).view(*input.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(dtype)


def _multiply_by_torch(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor | None:
    """Rows times the transpose of a matrix by other calls of torch's than the usual one; None where that is faster."""
    if (
        _BATCHES_ARE_FASTER
        and x_NI.dtype == torch.float32
        and 0 < len(x_NI) <= MKL_BATCH_MAX_ROWS
        and weight_OI.is_contiguous()
    ):
        return _multiply_in_parts(x_NI, weight_OI)
    return in_float32(x_NI, weight_OI)


def _multiply_in_parts(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor | None:
    (num_rows, num_in), num_out = x_NI.shape, len(weight_OI)
    has_many_threads = torch.get_num_threads() > _MANY_THREADS
    parts = math.gcd(num_out, _MAX_PARTS_FOR_MANY_THREADS if has_many_threads else _MAX_PARTS)
    if parts == 1:
        return None
    # Strides of a transposed matrix, also for one row: torch chooses the MKL call by them.
    x_PIR = x_NI.contiguous().as_strided((parts, num_in, num_rows), (0, 1, num_in))
    out_POR = torch.bmm(weight_OI.view(parts, -1, num_in), x_PIR)
    return out_POR.view(1, num_out) if num_rows == 1 else out_POR.view(num_out, num_rows).T.contiguous()


def apply_gate(act_fn: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`act_fn(gate) * up`."""
    hidden = act_fn(gate)
    if type(act_fn) is _SILU and not act_fn._forward_hooks and can_use_shortcut(hidden):
        return hidden.mul_(up)
    return hidden * up


def widened(attend: Callable, query: torch.Tensor) -> Callable:
    """An attention implementation that computes in float32, where torch has no fast products of these queries' 16 bits.

    Its gradients gain most: torch computes them in scalar loops.

    Args:
        attend: takes a module, queries, keys, values and a mask, as transformers' do.
        query: `[B, H, Q, D]`.
    """
    is_known = SHORTCUTS_ARE_ON and type(query) is torch.Tensor and query.is_cpu and not is_exported()
    # Casting all cached keys for the query of a single token costs more than it saves.
    if not is_known or rows_of_torch(query.dtype) is None or query.shape[2] == 1:
        return attend

    def compute(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs
    ):
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            mask = mask.float()
        # Autocast would cast them back.
        with torch.autocast("cpu", enabled=False):
            output, weights = attend(module, query.float(), key.float(), value.float(), mask, **kwargs)
        return output.to(query.dtype), weights if weights is None else weights.to(query.dtype)

    return compute
