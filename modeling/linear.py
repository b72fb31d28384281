"""Products of few rows with a weight, at the speed of the memory when a CPU decodes.

The next token of a few rows is a product of a matrix and hardly more than a vector: all of its time goes into reading
the matrix. torch calls MKL's plain product, which on a CPU comes to a half or a third of that speed, and reads weights
that lie input first on one thread only. Other calls do better, each on its own kind of weight
(`python -m benchmarks.cpu --cases parts` compares them, on weights that are in no cache):

* output first (`nn.Linear`): MKL's batched product, with the weight's rows cut into a batch;
* input first (experts), narrow: the sum of the weight's rows, weighted by the input, as embeddings are summed;
* input first, wide, and several threads: the batched product again, with the input cut into a batch.

All of this is for float32; in 16 bits the plain product is as good. The layers stay `nn.Linear`, which adapters,
quantizers and tracers know.
"""

import functools

import torch
from torch import nn

from .plain import FEW_ROWS, is_plain

# With fewer weights the calls cost what is gained.
_MIN_WEIGHTS = 1 << 15
# Parts that a weight can be cut into, the best first; and where there are more threads than `_MANY_THREADS`.
_PARTS = (16, 8, 4, 2)
_PARTS_FOR_MANY_THREADS = (64, *_PARTS)
_MANY_THREADS = 8
# Columns up to which FBGEMM, which has its kernels on x86 only, sums rows in one go; above, in several.
_MAX_SUMMED = 576 if "fbgemm" in torch.backends.quantized.supported_engines else 0


def apply_linear(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call a linear layer; the numbers are its own, up to the order of summation.

    Args:
        linear: `nn.Linear` or what an adapter or quantizer has put in its place.
        x: `[..., in_features]`.

    Returns:
        `[..., out_features]`.
    """
    if type(linear) is nn.Linear and is_plain(x) and x.numel() <= FEW_ROWS * linear.in_features:
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
    """Multiply a single row by a weight that lies input first, as an expert's does.

    Args:
        x_1I: `[1, I]`.
        weight_IO: `[I, O]`, in the same dtype.

    Returns:
        `[1, O]`: `x @ weight`, up to the order of summation.
    """
    if is_plain(x_1I) and _is_plain_weight(weight_IO):
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
    """Multiply a few rows by a weight that lies input first, or, as the transpose of such a one, output first.

    Args:
        x_RI: `[R, I]`.
        weight_IO: `[I, O]`, in the same dtype.

    Returns:
        `[R, O]`: `x @ weight`, up to the order of summation.
    """
    if len(x_RI) == 1 and weight_IO.is_contiguous():
        return multiply_row(x_RI, weight_IO)
    if 0 < len(x_RI) <= FEW_ROWS and is_plain(x_RI) and _is_plain_weight(weight_IO.T):
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
    # Strides as of a transposed matrix, also for one row: by them torch chooses how to call MKL.
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
    """Give 0 to size - 1, and where each of as many equal parts of them begins."""
    indices = torch.arange(size, device="cpu")
    return indices, torch.arange(0, size, size // parts, device="cpu")
