"""One product a group of rows, as an operator that `torch.compile` takes as it is.

How many rows each expert gets is known only when the data is. A Python loop over the groups cannot be compiled into
one graph for that reason, and torch's own `grouped_mm` is compiled for bfloat16 in multiples of 16 bytes only. As an
operator the loop stays outside the graph: the compiler sees its shapes, and a gradient that is an operator too.

Shapes: N rows, E groups, I columns in, O columns out.
"""

import torch


@torch.library.custom_op("llamoe::grouped_product", mutates_args=())
def grouped_product(x_NI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows by its own matrix.

    Args:
        x_NI: `[N, I]`, sorted by group.
        weight_EIO: `[E, I, O]` in the dtype of `x_NI`.
        ends_E: `[E]` integers, for each group the index behind its last row.

    Returns:
        `[N, O]`; rows behind the last group are zero.
    """
    out_NO = x_NI.new_zeros(x_NI.shape[0], weight_EIO.shape[2])
    for group, (start, end) in enumerate(_bounds(ends_E)):
        torch.mm(x_NI[start:end], weight_EIO[group], out=out_NO[start:end])
    return out_NO


@torch.library.custom_op("llamoe::grouped_product_backward", mutates_args=())
def _backward(
    grad_NO: torch.Tensor, x_NI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_x_NI = x_NI.new_zeros(x_NI.shape)
    grad_weight_EIO = weight_EIO.new_zeros(weight_EIO.shape)
    for group, (start, end) in enumerate(_bounds(ends_E)):
        torch.mm(grad_NO[start:end], weight_EIO[group].T, out=grad_x_NI[start:end])
        torch.mm(x_NI[start:end].T, grad_NO[start:end], out=grad_weight_EIO[group])
    return grad_x_NI, grad_weight_EIO


def _bounds(ends_E: torch.Tensor) -> list[tuple[int, int]]:
    ends = ends_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@grouped_product.register_fake
def _(x_NI, weight_EIO, ends_E):
    return x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[2])


@_backward.register_fake
def _(grad_NO, x_NI, weight_EIO, ends_E):
    return x_NI.new_empty(x_NI.shape), weight_EIO.new_empty(weight_EIO.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad_NO):
    return *_backward(grad_NO.contiguous(), *ctx.saved_tensors), None


grouped_product.register_autograd(_differentiate, setup_context=_save)
