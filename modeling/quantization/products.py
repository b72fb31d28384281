"""Products of rows with quantized matrices: called at once in inference, through an operator otherwise.

The operator is opaque: compilers see its shape, and autograd gets the gradient of the rows. The quantized weight has
none.

Shapes: N rows, E experts, I inputs, O outputs.
"""

from collections.abc import Sequence

import torch

from ..kernels import is_recorded, is_transformed
from ..moe import Group, groups_between
from .formats import Format, Parts, Sizes, format_of


def multiply(form: Format, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
    """Rows times the transpose of one matrix.

    Args:
        form: of the matrix.
        x_NI: rows of any float dtype; they are multiplied in the format's dtype.
        parts: of the matrix.
        sizes: O and I.

    Returns:
        `[N, O]` in the dtype of `x_NI`.
    """
    x = x_NI if x_NI.dtype == form.compute_dtype else x_NI.to(form.compute_dtype)
    if needs_operator(x):
        y = quantized_product(x, list(parts), form.key, list(sizes), None, False)
    else:
        y = form.multiply(x, parts, sizes)
    return y if x is x_NI else y.to(x_NI.dtype)


def needs_operator(x: torch.Tensor) -> bool:
    """Whether autograd or a compiler follows the rows, or autocast must be kept out."""
    return (
        (x.requires_grad and torch.is_grad_enabled())
        or is_recorded(x)
        or is_transformed()
        or torch.is_autocast_enabled(x.device.type)
    )


def multiply_groups(
    form: Format,
    x_NI: torch.Tensor,
    parts: Parts,
    sizes: Sizes,
    groups: list[Group],
    transposed: bool = False,
) -> torch.Tensor:
    """Each group of rows times its expert's matrix; for neither gradients nor compilers.

    Args:
        form: of the matrices.
        x_NI: `[N, I]` in the format's dtype, or `[N, O]` if `transposed`.
        parts: of all experts, with an axis for them in front.
        sizes: O and I.
        groups: cover all rows in their order; numbers from E on stand for no expert.
        transposed: whether the matrices are multiplied from the other side, as in the backward pass.

    Returns:
        `[N, O]`, or `[N, I]` if `transposed`; rows without an expert are zero.
    """
    if torch.is_autocast_enabled(x_NI.device.type):
        with torch.autocast(x_NI.device.type, enabled=False):
            return multiply_groups(form, x_NI, parts, sizes, groups, transposed)
    product = form.multiply_transposed if transposed else form.multiply
    num_experts = len(parts[0])
    if len(groups) == 1 and groups[0][0] < num_experts:
        return product(x_NI, [part[groups[0][0]] for part in parts], sizes)
    out = x_NI.new_empty(len(x_NI), sizes[1] if transposed else sizes[0])
    for expert, start, end in groups:
        if expert < num_experts:
            out[start:end] = product(x_NI[start:end], [part[expert] for part in parts], sizes)
        else:
            out[start:end].zero_()
    return out


# The host counts the rows; a captured CUDA stream cannot wait for it.
@torch.library.custom_op("llamoe::quantized_product", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def quantized_product(
    x: torch.Tensor,
    parts: Sequence[torch.Tensor],
    key: str,
    sizes: Sequence[int],
    ends_E: torch.Tensor | None,
    transposed: bool,
) -> torch.Tensor:
    """`multiply_groups` for autograd and compilers.

    Args:
        x: `[N, I]`, or `[N, O]` if `transposed`, sorted by expert.
        parts: of all experts, or of one matrix.
        key: of the format.
        sizes: O and I.
        ends_E: `[E]` integers, the index after each expert's last row; None for one matrix.
        transposed: as in `multiply_groups`.
    """
    form = format_of(key)
    # Autocast would cast rows and matrices to its dtype, and back.
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        # The results of operators may not be views.
        if ends_E is not None:
            groups = groups_between(ends_E, len(x))
            return multiply_groups(form, x, parts, tuple(sizes), groups, transposed).clone(
                memory_format=torch.contiguous_format
            )
        product = form.multiply_transposed if transposed else form.multiply
        return product(x, parts, tuple(sizes)).contiguous()


@quantized_product.register_fake
def _(x, parts, key, sizes, ends_E, transposed):
    return x.new_empty(x.shape[0], sizes[1] if transposed else sizes[0])


def _save(ctx, inputs, output):
    _, parts, ctx.key, ctx.sizes, ends_E, ctx.transposed = inputs
    ctx.save_for_backward(ends_E, *parts)


def _differentiate(ctx, grad):
    ends_E, *parts = ctx.saved_tensors
    grad_x = quantized_product(grad.contiguous(), parts, ctx.key, ctx.sizes, ends_E, not ctx.transposed)
    # A list of inputs has a list of gradients.
    return grad_x, [None] * len(parts), None, None, None, None


quantized_product.register_autograd(_differentiate, setup_context=_save)
