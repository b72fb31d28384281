"""Grouped product: each expert's rows times its matrix.

Only the data tells how many rows each expert gets. `multiply_groups` takes the numbers from the host and forms one
product for each hit expert. A compiler cannot follow such a loop, and autograd would give every slice of a stack a
gradient as large as the stack. The operator `grouped_product` keeps the loop out of the graph: compiler and autograd
see its shapes and its gradients (also second ones), which are operators too. torch's `grouped_mm` does the same where
it exists, for rows of a multiple of 16 bytes.

Shapes: N rows, E experts, I columns in, O columns out.
"""

import math
import mmap

import torch

from ..kernels import SHORTCUTS_ARE_ON, in_float32, multiply_rows, needs_float32

FEW_ROWS = 4
"""Up to this many rows of an expert MKL's batched product may be faster than its plain one."""
LARGE_GRADIENT_BYTES = 32 << 20
"""From this size a gradient gets memory of its own; the allocator keeps smaller pieces for the next step."""

Group = tuple[int, int, int]
"""An expert, the index of its first row, and the index after its last one."""


def groups_between(ends_E: torch.Tensor, num_rows: int) -> list[Group]:
    """The groups with rows, read by the host; rows after the last end belong to no expert, number E.

    Args:
        ends_E: `[E]` integers, the index after each expert's last row.
        num_rows: N.
    """
    ends = [*ends_E.tolist(), num_rows]
    bounds = zip([0, *ends], ends, strict=False)
    return [(expert, start, end) for expert, (start, end) in enumerate(bounds) if start < end]


def _is_transposed(weight_EIO: torch.Tensor) -> bool:
    """Whether a stack is a view of one that lies output-first."""
    return weight_EIO.stride(1) == 1 < weight_EIO.stride(2)


def multiply_groups(x_NI: torch.Tensor, weight_EIO: torch.Tensor, groups: list[Group]) -> torch.Tensor:
    """Multiply each group of rows by its own matrix; for neither gradients nor compilers.

    Args:
        x_NI: `[N, I]`.
        weight_EIO: `[E, I, O]`; only matrices of groups with rows are read. They are cast to the dtype of `x_NI`.
        groups: cover all rows in their order; an expert may have several, and numbers from E on stand for none.

    Returns:
        `[N, O]`; rows without an expert are zero.
    """
    out_NO = x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[2])
    lies_output_first = _is_transposed(weight_EIO)
    for expert, start, end in groups:
        if expert < len(weight_EIO) and lies_output_first and end - start <= FEW_ROWS:
            out_NO[start:end] = multiply_rows(x_NI[start:end], weight_EIO[expert].T.to(x_NI.dtype))
        elif expert < len(weight_EIO):
            weight_IO = weight_EIO[expert].to(x_NI.dtype)
            y = in_float32(x_NI[start:end], weight_IO.T) if SHORTCUTS_ARE_ON else None
            if y is None:
                torch.mm(x_NI[start:end], weight_IO, out=out_NO[start:end])
            else:
                out_NO[start:end] = y
        else:
            out_NO[start:end].zero_()
    return out_NO


def _multiply_outer(x_NI: torch.Tensor, grad_NO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """`[E, I, O]`: for each expert, its rows of `x_NI`, transposed, times its rows of `grad_NO`."""
    shape = len(ends_E), x_NI.shape[1], grad_NO.shape[1]
    groups = [group for group in groups_between(ends_E, len(x_NI)) if group[0] < len(ends_E)]
    if (
        x_NI.is_cpu
        and math.prod(shape) * x_NI.itemsize >= LARGE_GRADIENT_BYTES
        and hasattr(mmap, "MAP_ANONYMOUS")
    ):
        out_EIO = _unmapped_zeros(shape, x_NI.dtype)
    else:
        out_EIO = x_NI.new_empty(shape)
        for group in set(range(len(out_EIO))) - {group for group, _, _ in groups}:
            out_EIO[group].zero_()
    for group, start, end in groups:
        x, grad = x_NI[start:end], grad_NO[start:end]
        if SHORTCUTS_ARE_ON and needs_float32(x):
            out_EIO[group] = x.T.float() @ grad.float()
        else:
            torch.mm(x.T, grad, out=out_EIO[group])
    return out_EIO


def _unmapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the host whose pages the system maps only when written: no memory for experts without tokens.

    Mapping a new gradient as large as all experts in each step takes longer than computing it for a few tokens each.
    The memory is not from torch's allocator: the storage cannot be resized.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


# The host counts the rows; a captured CUDA stream cannot wait for it.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("llamoe::grouped_product", mutates_args=(), tags=_TAGS)
def grouped_product(x_NI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """`multiply_groups` for autograd and compilers.

    Args:
        x_NI: `[N, I]`, sorted by expert.
        weight_EIO: `[E, I, O]` in the dtype of `x_NI`.
        ends_E: `[E]` integers, the index after each expert's last row.
    """
    with torch.no_grad():
        return multiply_groups(x_NI, weight_EIO, groups_between(ends_E, len(x_NI)))


@torch.library.custom_op("llamoe::grouped_outer_product", mutates_args=(), tags=_TAGS)
def grouped_outer_product(x_NI: torch.Tensor, grad_NO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Gradient of `grouped_product` with respect to the weight, `[E, I, O]`.

    Args:
        x_NI: `[N, I]`, sorted by expert.
        grad_NO: `[N, O]`, gradient of the result.
        ends_E: as in `grouped_product`.
    """
    return _multiply_outer(x_NI, grad_NO, ends_E)


@grouped_product.register_fake
def _(x_NI, weight_EIO, ends_E):
    return x_NI.new_empty(x_NI.shape[0], weight_EIO.shape[2])


@grouped_outer_product.register_fake
def _(x_NI, grad_NO, ends_E):
    return x_NI.new_empty(ends_E.shape[0], x_NI.shape[1], grad_NO.shape[1])


def _save_product(ctx, inputs, output):
    x_NI, weight_EIO, ends_E = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    # The weight's gradient needs the rows; frozen experts, as under LoRA, need not save them.
    ctx.save_for_backward(x_NI if needs_weight else None, weight_EIO if needs_x else None, ends_E)
    # The gradient of a transposed view is made in the layout of the parameter: autograd would copy any other.
    ctx.is_transposed = _is_transposed(weight_EIO)


def _differentiate_product(ctx, grad_NO):
    x_NI, weight_EIO, ends_E = ctx.saved_tensors
    grad_NO = grad_NO.contiguous()
    grad_x = None if weight_EIO is None else grouped_product(grad_NO, weight_EIO.transpose(1, 2), ends_E)
    grad_weight = None
    if x_NI is not None and ctx.is_transposed:
        grad_weight = grouped_outer_product(grad_NO, x_NI, ends_E).transpose(1, 2)
    elif x_NI is not None:
        grad_weight = grouped_outer_product(x_NI, grad_NO, ends_E)
    return grad_x, grad_weight, None


def _save_outer_product(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate_outer_product(ctx, grad_EIO):
    x_NI, grad_NO, ends_E = ctx.saved_tensors
    needs_x, needs_grad = ctx.needs_input_grad[:2]
    return (
        grouped_product(grad_NO, grad_EIO.transpose(1, 2), ends_E) if needs_x else None,
        grouped_product(x_NI, grad_EIO, ends_E) if needs_grad else None,
        None,
    )


grouped_product.register_autograd(_differentiate_product, setup_context=_save_product)
grouped_outer_product.register_autograd(_differentiate_outer_product, setup_context=_save_outer_product)
