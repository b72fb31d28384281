"""One product a group of rows: each expert's rows times its matrix, and nothing else.

How many rows each expert gets is known only when the data is. On the CPU that is no obstacle: the rows are counted
and one product is formed for each expert that was hit, in `multiply_groups`. A compiler cannot follow such a loop, and
autograd would follow it at a price: every slice of a stack of matrices gets a gradient as large as the stack. As an
operator, `grouped_product`, the loop stays outside of the graph; both see its shapes, and a gradient that is an
operator too. torch's own `grouped_mm` does the same where it exists, for multiples of 16 bytes.

Shapes: N rows, E groups, I columns in, O columns out.
"""

import torch


def multiply_groups(x_NI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows by its own matrix; without gradients, and not for compilers.

    Args:
        x_NI: `[N, I]`, sorted by group.
        weight_EIO: `[E, I, O]`; only the matrices of groups with rows are read. They are cast to the dtype of `x_NI`.
        ends_E: `[E]` integers, for each group the index behind its last row.

    Returns:
        `[N, O]`; rows behind the last group are zero.
    """
    out_NO = x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[2])
    end = 0
    for group, start, end in _groups_with_rows(ends_E):
        torch.mm(x_NI[start:end], weight_EIO[group].to(x_NI.dtype), out=out_NO[start:end])
    out_NO[end:].zero_()
    return out_NO


def _groups_with_rows(ends_E: torch.Tensor) -> list[tuple[int, int, int]]:
    ends = ends_E.tolist()
    bounds = zip([0, *ends[:-1]], ends, strict=True)
    return [(group, start, end) for group, (start, end) in enumerate(bounds) if start < end]


# The rows are counted on the host, for which a captured stream could not wait.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("llamoe::grouped_product", mutates_args=(), tags=_TAGS)
def grouped_product(x_NI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Do as `multiply_groups`, for autograd and compilers; `x_NI` and `weight_EIO` have one dtype."""
    return multiply_groups(x_NI, weight_EIO, ends_E)


@torch.library.custom_op("llamoe::grouped_product_backward", mutates_args=(), tags=_TAGS)
def _backward(
    grad_NO: torch.Tensor,
    x_NI: torch.Tensor | None,
    weight_EIO: torch.Tensor,
    ends_E: torch.Tensor,
    needs_x: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the gradients of the rows, if needed, and of the weight, if there are rows; empty ones otherwise."""
    groups = _groups_with_rows(ends_E)
    grad_x_NI, grad_weight_EIO = _empty_gradients(grad_NO, x_NI, weight_EIO, ends_E, needs_x)
    if needs_x:
        for group, start, end in groups:
            torch.mm(grad_NO[start:end], weight_EIO[group].T, out=grad_x_NI[start:end])
        grad_x_NI[groups[-1][2] if groups else 0 :].zero_()
    if x_NI is not None:
        for group, start, end in groups:
            torch.mm(x_NI[start:end].T, grad_NO[start:end], out=grad_weight_EIO[group])
        for group in set(range(len(weight_EIO))) - {group for group, _, _ in groups}:
            grad_weight_EIO[group].zero_()
    return grad_x_NI, grad_weight_EIO


@_backward.register_fake
def _empty_gradients(grad_NO, x_NI, weight_EIO, ends_E, needs_x):
    return (
        grad_NO.new_empty((grad_NO.shape[0], weight_EIO.shape[1]) if needs_x else 0),
        grad_NO.new_empty(weight_EIO.shape if x_NI is not None else 0),
    )


@grouped_product.register_fake
def _(x_NI, weight_EIO, ends_E):
    return x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[2])


def _save(ctx, inputs, output):
    x_NI, weight_EIO, ends_E = inputs
    # Frozen experts, as under LoRA, do without the rows.
    ctx.save_for_backward(x_NI if ctx.needs_input_grad[1] else None, weight_EIO, ends_E)


def _differentiate(ctx, grad_NO):
    needs_x, needs_weight, _ = ctx.needs_input_grad
    grad_x_NI, grad_weight_EIO = _backward(grad_NO.contiguous(), *ctx.saved_tensors, needs_x)
    return grad_x_NI if needs_x else None, grad_weight_EIO if needs_weight else None, None


grouped_product.register_autograd(_differentiate, setup_context=_save)
