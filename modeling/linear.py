"""Linear layers that read their weights at the speed of the memory when a CPU decodes.

The next token of a few rows is a product of a matrix and hardly more than a vector: all of its time goes into reading
the matrix. MKL's batched product comes nearer to that speed than its plain one, which torch calls, so here the weight's
rows are cut into a batch (`python -m benchmarks.cpu --cases parts` compares them, on weights that are in no cache); in
16 bits both are alike. The layers stay `nn.Linear`, which adapters, quantizers and tracers know.
"""

import torch
from torch import nn

# With more rows the gain shrinks, with fewer weights the calls cost what is gained.
_MAX_ROWS = 3
_MIN_WEIGHTS = 1 << 15
# Parts that the rows of a weight can be cut into, the best first: many threads want many.
_PARTS = (64, 16, 8, 4, 2)


def apply_linear(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call a linear layer; the numbers are its own, up to the order of summation.

    Args:
        linear: `nn.Linear` or what an adapter or quantizer has put in its place.
        x: `[..., in_features]`.

    Returns:
        `[..., out_features]`.
    """
    if _is_plain(linear, x):
        return _multiply_in_parts(x, linear.weight, linear.bias)
    return linear(x)


def _is_plain(linear: nn.Module, x: torch.Tensor) -> bool:
    """Whether nothing but a product of a few float32 rows is asked for: no gradient, tracer, hook or sharded weight."""
    return (
        not torch.is_grad_enabled()
        and type(x) is torch.Tensor
        and type(linear) is nn.Linear
        # Asked before sizes, which would be guards, or parts of the trace.
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and x.numel() <= _MAX_ROWS * linear.in_features
        and x.is_cpu
        and type(linear.weight) is nn.Parameter
        and x.dtype == linear.weight.dtype == torch.float32
        and linear.weight.is_cpu
        and linear.weight.layout == torch.strided
        and linear.weight.numel() >= _MIN_WEIGHTS
        and x.shape[-1:] == (linear.in_features,)
        and not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__)
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkl.is_available()
    )


def _multiply_in_parts(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    num_out, num_in = weight_OI.shape
    parts = next((parts for parts in _PARTS if num_out % parts == 0), None)
    if parts is None or not weight_OI.is_contiguous() or not x.numel():
        return nn.functional.linear(x, weight_OI, bias_O)
    num_rows = x.numel() // num_in
    # Strides as of a transposed matrix, also for one row: by them torch chooses how to call MKL.
    x_PIR = x.contiguous().as_strided((parts, num_in, num_rows), (0, 1, num_in))
    out_POR = torch.bmm(weight_OI.view(parts, -1, num_in), x_PIR)
    shape = (*x.shape[:-1], num_out)
    out = out_POR.view(shape) if num_rows == 1 else out_POR.view(num_out, num_rows).T.reshape(shape)
    return out if bias_O is None else out + bias_O
