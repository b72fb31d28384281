"""Grouped products: each expert's rows times its matrix, for all formats, in memory or offloaded.

The number of rows of each expert depends on the data. `multiply_groups` reads the numbers on the host and computes one
product for each expert with rows. A compiler cannot trace such a loop, and autograd would give every slice of a stack a
gradient as large as the stack. So the custom operator `grouped_product` contains the loop, and its gradients (for plain
weights also second gradients) are operators, too. The operator `device_product` runs kernels that read on the device
which rows are whose. On GPUs torch's `grouped_mm` is used for the dtypes and sizes that it supports.

Shapes: N rows, E experts, I columns of the input, O columns of the output.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from operator import itemgetter
from typing import Any

import torch
from torch.nn import functional as F

from .._private_api import is_any_autocast_on
from ..formats import Format, Parts, Plain, Sizes, format_of
from ..kernels import (
    SHORTCUTS_ARE_ON,
    is_exported,
    is_recorded,
    needs_float32,
    packed_product,
)

Group = tuple[int, int, int]
"""An expert, the index of its first row, and the index after its last row. An expert has one group at most."""


def groups_between(ends_E: torch.Tensor, num_rows: int) -> list[Group]:
    """Return the groups that have rows, read by the host.

    Args:
        ends_E: `[E]` integers, the index after each expert's last row. Rows after the last end have no expert; they are
            the group with number E.
        num_rows: N.
    """
    ends = [*ends_E.tolist(), num_rows]
    bounds = zip([0, *ends], ends, strict=False)
    return [(expert, start, end) for expert, (start, end) in enumerate(bounds) if start < end]


class Stack:
    """The matrices of all experts, in memory.

    Attributes:
        form: format of a matrix.
        parts: the parts of all matrices, such as codes and scales, each with an axis for experts in front.
        sizes: O and I.
        num_experts: E.
        is_offloaded: True if the matrices are not in memory, so that they cannot be inputs of an operator.
    """

    is_offloaded = False

    def __init__(self, form: Format, parts: Parts, sizes: Sizes):
        self.form, self.parts, self.sizes = form, parts, sizes
        self.num_experts = len(parts[0])

    def parts_of(
        self, groups: Sequence[Group], transposed: bool
    ) -> Generator[tuple[Parts, Group], None, None]:
        """Yield the parts of each group's matrix, valid until the next iteration, and the group."""
        for group in groups:
            yield [*map(itemgetter(group[0]), self.parts)], group

    def matrices(self) -> Sequence[torch.Tensor]:
        """Return the matrices `[I, O]`, differentiable if they are plain."""
        # Not `part[expert]`: each index would have a gradient as large as the stack.
        parts_of_experts = zip(*(part.unbind(0) for part in self.parts), strict=True)
        return [self.form.matrix(parts, self.sizes, self.form.compute_dtype).T for parts in parts_of_experts]

    def multiply_on_device(
        self, x_NI: torch.Tensor, groups: torch.Tensor, by_id: bool, transposed: bool
    ) -> torch.Tensor:
        """Multiply by kernels that read the groups on the device; arguments as in `packed_product`."""
        matrix = self.form.for_gpu_kernel(self.parts, self.sizes)
        assert matrix is not None, self.form.key
        return packed_product(x_NI, matrix, groups, self.num_experts, by_id, transposed)


def plain_stack(weight_EIO: torch.Tensor) -> Stack:
    """Describe plain weights `[E, I, O]`, stored in either order of I and O, as a `Stack`."""
    is_output_first = weight_EIO.stride(1) == 1 < weight_EIO.stride(2)
    # Keep the stored order: autograd would copy a gradient of another order than the parameter's.
    part = weight_EIO.transpose(1, 2) if is_output_first else weight_EIO
    _, num_in, num_out = weight_EIO.shape
    return Stack(Plain(weight_EIO.dtype, not is_output_first), [part], (num_out, num_in))


def multiply_groups(
    x_NI: torch.Tensor, stack: Stack, groups: Sequence[Group], transposed: bool = False
) -> torch.Tensor:
    """Multiply each group of rows by its expert's matrix, without gradients and outside of compilers.

    Args:
        x_NI: `[N, I]`, or `[N, O]` if `transposed`, in a dtype that the format takes.
        stack: the matrices; only those of groups with rows are read.
        groups: consecutive groups of rows; a number from E on stands for no expert.
        transposed: multiply by the transposed matrices, as in the backward pass.

    Returns:
        `[N, O]`, or `[N, I]` if `transposed`; rows without an expert are zero.
    """
    if torch.is_autocast_enabled(x_NI.device.type):
        # Autocast would cast rows and matrices to its dtype, and back.
        with torch.autocast(x_NI.device.type, enabled=False):
            return multiply_groups(x_NI, stack, groups, transposed)
    out_NO = x_NI.new_zeros(len(x_NI), stack.sizes[int(transposed)])
    # Close the generator, so that an offloaded stack releases its slots even on error.
    with closing(stack.parts_of([it for it in groups if it[0] < stack.num_experts], transposed)) as matrices:
        for parts, (_, start, end) in matrices:
            rows = x_NI[start:end].to(parts[0].device)
            out_NO[start:end] = stack.form.product(rows, parts, stack.sizes, transposed)
    return out_NO


# For operators that wait for the host to count rows: a CUDA graph cannot capture that.
_TAGS = (torch.Tag.cudagraph_unsafe,)


def _define_product(name: str, tags: Sequence[torch.Tag]) -> Any:
    """Define an operator of this name that multiplies rows by matrices, with its gradient.

    With `_TAGS` it multiplies stacks by `multiply_groups`, without tags by kernels. Its arguments are:
        x: `[N, I]`, or `[N, O]` if `transposed`; sorted by expert unless `by_id`.
        parts: of all experts, or of one matrix.
        key: the format's `key`.
        sizes: O and I.
        ends_E: `[E]` integers, the index after each expert's last row; if `by_id`, `[N]`, the expert of each row; None
            for one matrix.
        transposed: as in `multiply_groups`.
        by_id: for kernels of few rows in any order.
    """
    counts_on_host = len(tags) > 0

    @torch.library.custom_op(f"llamoe::{name}", mutates_args=(), tags=tuple(tags))
    def operator(
        x: torch.Tensor,
        parts: Sequence[torch.Tensor],
        key: str,
        sizes: Sequence[int],
        ends_E: torch.Tensor | None,
        transposed: bool,
        by_id: bool,
    ) -> torch.Tensor:
        form = format_of(key)
        # Autocast would cast rows and matrices to its dtype, and back.
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            if ends_E is None:
                y = form.product(x, parts, tuple(sizes), transposed)
            elif not counts_on_host:
                y = Stack(form, parts, tuple(sizes)).multiply_on_device(x, ends_E, by_id, transposed)
            else:
                stack = Stack(form, parts, tuple(sizes))
                y = multiply_groups(x, stack, groups_between(ends_E, len(x)), transposed)
            # Custom operators must not return views of their inputs.
            return y.clone(memory_format=torch.contiguous_format) if y._base is not None else y.contiguous()

    @operator.register_fake
    def _(x, parts, key, sizes, ends_E, transposed, by_id):
        return x.new_empty(x.shape[0], sizes[1] if transposed else sizes[0])

    def save(ctx, inputs, output):
        x, parts, ctx.key, ctx.sizes, ends_E, ctx.transposed, ctx.by_id = inputs
        needs_x, *needs_parts = ctx.needs_input_grad[: 1 + len(parts)]
        # Only the weight's gradient needs the rows: for frozen experts, as under LoRA, they are not saved.
        ctx.save_for_backward(x if any(needs_parts) else None, ends_E, *(parts if needs_x else ()))

    def differentiate(ctx, grad):
        x, ends_E, *parts = ctx.saved_tensors
        needs_x, needs_parts = ctx.needs_input_grad[:2]
        grad = grad.contiguous()
        grad_x, grad_parts = None, [None] * len(needs_parts)
        if needs_x:
            grad_x = operator(grad, parts, ctx.key, ctx.sizes, ends_E, not ctx.transposed, ctx.by_id)
        if x is not None:
            assert not ctx.by_id, "gradients of weights need sorted rows"
            form: Any = format_of(ctx.key)
            rows = (x, grad) if form.is_input_first != ctx.transposed else (grad, x)
            grad_parts = [grouped_outer_product(*rows, ends_E).to(form.compute_dtype)]
        # The gradient of `parts`, which is a list, must be a list.
        return grad_x, grad_parts, None, None, None, None, None

    operator.register_autograd(differentiate, setup_context=save)
    return operator


product_operator = _define_product("grouped_product", _TAGS)
"""`multiply_groups` as an operator: the host counts the rows."""
device_operator = _define_product("device_product", ())
"""Products with one matrix, or by kernels that read on the device which rows are whose; CUDA graphs can capture it."""


def multiply_sorted(
    x_NI: torch.Tensor, stack: Stack, ends_E: torch.Tensor, transposed: bool = False
) -> torch.Tensor:
    """Multiply each expert's rows by its matrix, for autograd and compilers.

    Args:
        x_NI: `[N, I]`, or `[N, O]` if `transposed`, sorted by expert.
        stack: the matrices.
        ends_E: `[E]` int32, the index after each expert's last row. Results of rows after the last end are undefined if
            `takes_grouped_mm`, else zero.
        transposed: as in `multiply_groups`.
    """
    if stack.is_offloaded:
        offloaded: Any = stack
        offloaded.form = _followed(stack.form, x_NI)
        return offloaded.multiply_sorted(x_NI, ends_E, transposed)
    if not transposed and takes_grouped_mm(x_NI, stack):
        form: Any = stack.form
        return F.grouped_mm(x_NI, form.input_first(stack.parts).to(x_NI.dtype), offs=ends_E)
    # Under a tracer a weight's sizes are tensors.
    key, sizes = _followed(stack.form, x_NI).key, [int(size) for size in stack.sizes]
    return product_operator(x_NI, list(stack.parts), key, sizes, ends_E, transposed, False)


def takes_grouped_mm(x_NI: torch.Tensor, stack: Stack) -> bool:
    """Return True if torch's grouped product supports these rows and matrices, and is the fastest product.

    On a CPU it is not: torch loops over all experts, also those without rows, and has no kernels for few rows.

    On a GPU the rows or columns of a matrix must be contiguous, and all strides and the data pointer multiples of 16
    bytes (ATen/native/GroupedMMUtils.h). A compiled product may be captured in a CUDA graph, so its kernel must read
    `ends_E` on the device. torch has such a kernel for bfloat16 on capability 9 and 10, for fewer than 1024 matrices
    (GroupMM.cu).
    """
    if not (x_NI.is_cuda and isinstance(stack.form, Plain)):
        return False
    dtype, weight, is_compiled = x_NI.dtype, stack.parts[0], is_recorded(x_NI)
    major, _ = torch.cuda.get_device_capability(x_NI.device)
    asks_host = dtype != torch.bfloat16 or torch.version.hip or major not in (9, 10)
    if (
        major < 8
        or dtype not in (torch.bfloat16, torch.float16, torch.float32)
        or (is_compiled and asks_host)
    ):
        return False
    strides = [stride for stride in weight.stride() if stride != 1]
    # torch 2.11's compiler cannot read the offset.
    starts = (*stack.sizes, *strides, 0 if is_compiled else weight.storage_offset())
    are_aligned = not any(start * dtype.itemsize % 16 for start in starts)
    return are_aligned and len(strides) < 3 and len(weight) < 1024


def multiply_on_device(
    x_NI: torch.Tensor, stack: Stack, groups: torch.Tensor, by_id: bool = False
) -> torch.Tensor:
    """Multiply as `multiply_sorted`, by kernels that read the groups on the device.

    Args:
        groups: `ends_E`; if `by_id`, `[N]` integers, the expert of each row, outside of `0 … E - 1` for none.
        by_id: the rows are in any order; only without gradients of weights.
    """
    if not (torch.is_grad_enabled() or needs_operator(x_NI)):
        # Skip the custom operator: its call takes longer on the host than the launch of the kernel.
        return stack.multiply_on_device(x_NI, groups, by_id, transposed=False)
    key, sizes = _followed(stack.form, x_NI).key, [int(size) for size in stack.sizes]
    return device_operator(x_NI, list(stack.parts), key, sizes, groups, False, by_id)


def multiply_one(form: Format, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
    """Multiply rows by the transpose of one matrix, without a gradient for it: `[N, O]` in the dtype of the rows."""
    x = x_NI if x_NI.dtype == form.compute_dtype else x_NI.to(form.compute_dtype)
    if needs_operator(x):
        y = device_operator(x, list(parts), _followed(form, x).key, list(sizes), None, False, False)
    else:
        y = form.product(x, parts, sizes)
    return y if x is x_NI else y.to(x_NI.dtype)


def _followed(form: Format, x: torch.Tensor) -> Format:
    """Return the format for these rows: if they need a gradient, the one that does not round rows to 8 bits."""
    is_trained = x.requires_grad and torch.is_grad_enabled() and not is_exported()
    return form.exact if is_trained else form


def needs_operator(x: torch.Tensor) -> bool:
    """Return True if a product of these rows needs a custom operator: for autograd, a compiler, or under autocast."""
    return (
        (x.requires_grad and torch.is_grad_enabled())
        or is_recorded(x)
        or (is_any_autocast_on() and torch.is_autocast_enabled(x.device.type))
    )


@torch.library.custom_op("llamoe::grouped_outer_product", mutates_args=(), tags=_TAGS)
def grouped_outer_product(x_NI: torch.Tensor, grad_NO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a product with respect to a plain weight, `[E, I, O]`.

    Args:
        x_NI: `[N, I]`, sorted by expert.
        grad_NO: `[N, O]`, gradient of the result.
        ends_E: `[E]` integers, the index after each expert's last row.
    """
    out_EIO = x_NI.new_zeros(len(ends_E), x_NI.shape[1], grad_NO.shape[1])
    for expert, start, end in groups_between(ends_E, len(x_NI)):
        if expert < len(ends_E):
            x, grad = x_NI[start:end], grad_NO[start:end]
            if SHORTCUTS_ARE_ON and needs_float32(x):
                out_EIO[expert] = x.T.float() @ grad.float()
            else:
                torch.mm(x.T, grad, out=out_EIO[expert])
    return out_EIO


@grouped_outer_product.register_fake
def _(x_NI, grad_NO, ends_E):
    return x_NI.new_empty(ends_E.shape[0], x_NI.shape[1], grad_NO.shape[1])


def _save_factors(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate_outer(ctx, grad_EIO):
    x_NI, grad_NO, ends_E = ctx.saved_tensors
    needs_x, needs_grad = ctx.needs_input_grad[:2]
    stack = plain_stack(grad_EIO)
    return (
        multiply_sorted(grad_NO, stack, ends_E, transposed=True) if needs_x else None,
        multiply_sorted(x_NI, stack, ends_E) if needs_grad else None,
        None,
    )


grouped_outer_product.register_autograd(_differentiate_outer, setup_context=_save_factors)
