"""Grouped product: each expert's rows times its matrix, whatever its format, and wherever it lies.

Only the data tells how many rows each expert gets. `multiply_groups` takes the numbers from the host and forms one
product for each hit expert. A compiler cannot follow such a loop, and autograd would give every slice of a stack a
gradient as large as the stack. The operator `grouped_product` keeps the loop out of the graph: compiler and autograd
see its shapes and its gradients (of plain weights also second ones), which are operators too. Its twin `device_product`
runs kernels that find each expert's rows on the device; nothing else differs. torch's `grouped_mm` does the same where
it exists, for plain weights and rows of a multiple of 16 bytes.

Shapes: N rows, E experts, I columns in, O columns out.
"""

import itertools
import math
import mmap
import weakref
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.nn import functional as F

from .._private_api import is_any_autocast_on
from ..formats import Format, Parts, Sizes, format_of, plain_format
from ..kernels import (
    SHORTCUTS_ARE_ON,
    is_exported,
    is_recorded,
    needs_float32,
    packed_outer_product,
    packed_product,
)

LARGE_GRADIENT_BYTES = 32 << 20
"""From this size a gradient gets memory of its own; the allocator keeps smaller pieces for the next step."""

Group = tuple[int, int, int]
"""An expert, the index of its first row, and the index after its last one."""
Ranges = Sequence[tuple[int, int]]
"""The first row, and the one after the last, of each group of an expert."""


def groups_between(ends_E: torch.Tensor, num_rows: int) -> list[Group]:
    """The groups with rows, read by the host; rows after the last end belong to no expert, number E.

    Args:
        ends_E: `[E]` integers, the index after each expert's last row.
        num_rows: N.
    """
    ends = [*ends_E.tolist(), num_rows]
    bounds = zip([0, *ends], ends, strict=False)
    return [(expert, start, end) for expert, (start, end) in enumerate(bounds) if start < end]


class Stack:
    """The matrices of all experts, in memory.

    Attributes:
        form: of a matrix.
        parts: of all matrices, each with an axis for experts in front.
        sizes: O and I.
        num_experts: E.
        source: text by which the operator finds a stack that is not in memory; "" for this one.
    """

    source = ""

    def __init__(self, form: Format, parts: Parts, sizes: Sizes):
        self.form, self.parts, self.sizes = form, parts, sizes
        self.num_experts = len(parts[0])

    def bring(self, groups: Sequence[Group], transposed: bool) -> Iterator[tuple[Parts, Ranges]]:
        """The parts of each hit expert's matrix, valid until the next are asked for, and its groups of rows."""
        for expert, start, end in groups:
            if expert < self.num_experts:
                yield [*map(itemgetter(expert), self.parts)], ((start, end),)

    def matrices(self) -> Sequence[torch.Tensor]:
        """The matrices `[I, O]`."""
        # `unbind` once: indexing a stack per expert would write a full-size gradient for each of them.
        each = zip(*(part.unbind(0) for part in self.parts), strict=True)
        return [self.form.matrix(parts, self.sizes, self.form.compute_dtype).T for parts in each]

    def multiply_on_device(
        self, x_NI: torch.Tensor, groups: torch.Tensor, by_id: bool, transposed: bool
    ) -> torch.Tensor:
        """The product by kernels that take the groups from the device; arguments as in `packed_product`."""
        matrix = self.form.for_gpu_kernel(self.parts, self.sizes)
        assert matrix is not None, self.form.key
        return packed_product(x_NI, matrix, groups, self.num_experts, by_id, transposed)

    def multiply_by_grouped_mm(self, x_NI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """The product of all groups by torch's grouped one, which knows the stacks of one format."""
        form: Any = self.form
        return F.grouped_mm(x_NI, form.input_first(self.parts).to(x_NI.dtype), offs=ends_E)


def plain_stack(weight_EIO: torch.Tensor) -> Stack:
    """A stack of plain matrices in any strides."""
    lies_output_first = weight_EIO.stride(1) == 1 < weight_EIO.stride(2)
    # The gradient of a transposed view is made in the layout of the parameter: autograd would copy any other.
    part = weight_EIO.transpose(1, 2) if lies_output_first else weight_EIO
    _, num_in, num_out = weight_EIO.shape
    return Stack(plain_format(weight_EIO.dtype, not lies_output_first), [part], (num_out, num_in))


def multiply_groups(
    x_NI: torch.Tensor, stack: Stack, groups: Sequence[Group], transposed: bool = False
) -> torch.Tensor:
    """Multiply each group of rows by its own matrix; for neither gradients nor compilers.

    Args:
        x_NI: `[N, I]`, or `[N, O]` if `transposed`, in a dtype that the format takes.
        stack: of which only matrices of groups with rows are read.
        groups: cover all rows in their order; an expert may have several, and numbers from E on stand for none.
        transposed: whether the matrices are multiplied from the other side, as in the backward pass.

    Returns:
        `[N, O]`, or `[N, I]` if `transposed`; rows without an expert are zero.
    """
    if torch.is_autocast_enabled(x_NI.device.type):
        # It would cast rows and matrices to its dtype, and back.
        with torch.autocast(x_NI.device.type, enabled=False):
            return multiply_groups(x_NI, stack, groups, transposed)
    product = stack.form.multiply_transposed if transposed else stack.form.multiply
    out_NO = None
    brought: Any = stack.bring(groups, transposed)
    try:
        for parts, ranges in brought:
            for start, end in ranges:
                x = x_NI[start:end].to(parts[0].device)
                y = product(x, parts, stack.sizes).to(x_NI.device)
                if len(groups) == 1:
                    return y
                if out_NO is None:
                    out_NO = y.new_empty(len(x_NI), y.shape[1])
                out_NO[start:end] = y
    finally:
        # Lets go of what it has brought, whatever happens here.
        brought.close()
    if out_NO is None:
        return x_NI.new_zeros(len(x_NI), stack.sizes[int(transposed)])
    for expert, start, end in groups:
        if expert >= stack.num_experts:
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


_HOLDERS: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def register_holder(experts: Any) -> int:
    """A number by which the operator, which takes no objects, finds experts whose stacks are not in memory."""
    number = next(_NUMBERS)
    _HOLDERS[number] = experts
    return number


# The host counts the rows; a captured CUDA stream cannot wait for it.
_TAGS = (torch.Tag.cudagraph_unsafe,)


def _define_product(name: str, tags: Sequence[torch.Tag]) -> Any:
    """The operator of this name: rows times matrices, for autograd and compilers. All have one fake and one gradient.

    Its arguments are:
        x: `[N, I]`, or `[N, O]` if `transposed`; sorted by expert unless `by_id`.
        parts: of all experts, or of one matrix; none if there is a source.
        source: of a stack that is not in memory: the holder's number and the stack's name.
        key: of the format.
        sizes: O and I.
        ends_E: `[E]` integers, the index after each expert's last row; `[N]`, the expert of each, if `by_id`; None for
            one matrix.
        transposed: as in `multiply_groups`.
        by_id: for kernels of few rows in any order.
    """
    waits = len(tags) > 0

    @torch.library.custom_op(f"llamoe::{name}", mutates_args=(), tags=tuple(tags))
    def operator(
        x: torch.Tensor,
        parts: Sequence[torch.Tensor],
        source: str,
        key: str,
        sizes: Sequence[int],
        ends_E: torch.Tensor | None,
        transposed: bool,
        by_id: bool,
    ) -> torch.Tensor:
        form, stack = format_of(key), None
        # Autocast would cast rows and matrices to its dtype, and back.
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            if ends_E is None:
                y = (form.multiply_transposed if transposed else form.multiply)(x, parts, tuple(sizes))
            elif not waits:
                y = Stack(form, parts, tuple(sizes)).multiply_on_device(x, ends_E, by_id, transposed)
            else:
                if source:
                    number, _, stack_name = source.partition(":")
                    stack = _HOLDERS[int(number)].stack(stack_name)
                    stack.form = form
                else:
                    stack = Stack(form, parts, tuple(sizes))
                y = multiply_groups(x, stack, groups_between(ends_E, len(x)), transposed)
            # The results of operators may not be views.
            return y.clone(memory_format=torch.contiguous_format) if y._base is not None else y.contiguous()

    @operator.register_fake
    def _(x, parts, source, key, sizes, ends_E, transposed, by_id):
        return x.new_empty(x.shape[0], sizes[1] if transposed else sizes[0])

    def save(ctx, inputs, output):
        x, parts, ctx.source, ctx.key, ctx.sizes, ends_E, ctx.transposed, ctx.by_id = inputs
        needs_x, *needs_parts = ctx.needs_input_grad[: 1 + len(parts)]
        # The copy of a model may be gone before its last backward pass.
        ctx.holder = _HOLDERS[int(ctx.source.partition(":")[0])] if ctx.source else None
        # The weight's gradient needs the rows; frozen experts, as under LoRA, need not save them.
        ctx.save_for_backward(x if any(needs_parts) else None, ends_E, *(parts if needs_x else ()))

    def differentiate(ctx, grad):
        x, ends_E, *parts = ctx.saved_tensors
        needs_x, needs_parts = ctx.needs_input_grad[:2]
        grad = grad.contiguous()
        grad_x, grad_parts = None, [None] * len(needs_parts)
        if needs_x:
            given = grad, parts, ctx.source, ctx.key, ctx.sizes, ends_E
            grad_x = operator(*given, not ctx.transposed, ctx.by_id)
        if x is not None:
            assert not ctx.by_id, "gradients of weights need sorted rows"
            form: Any = format_of(ctx.key)
            rows = (x, grad) if form.is_input_first != ctx.transposed else (grad, x)
            outer = grouped_outer_product if waits else device_outer_product
            grad_parts = [outer(*rows, ends_E).to(form.compute_dtype)]
        # A list of inputs has a list of gradients.
        return grad_x, grad_parts, None, None, None, None, None, None

    operator.register_autograd(differentiate, setup_context=save)
    return operator


product_operator = _define_product("grouped_product", _TAGS)
"""`multiply_groups`, whose host counts the rows."""
device_operator = _define_product("device_product", ())
"""One matrix, or kernels that find the rows of each expert on the device: fit for CUDA graphs."""


def multiply_sorted(
    x_NI: torch.Tensor, stack: Stack, ends_E: torch.Tensor, transposed: bool = False
) -> torch.Tensor:
    """`multiply_groups` for autograd and compilers; `ends_E` has the index after each expert's last row, `[E]`."""
    # A tracer has tensors in the place of a weight's sizes.
    key, sizes = _followed(stack.form, x_NI).key, [int(size) for size in stack.sizes]
    return product_operator(x_NI, list(stack.parts), stack.source, key, sizes, ends_E, transposed, False)


def multiply_on_device(
    x_NI: torch.Tensor, stack: Stack, groups: torch.Tensor, by_id: bool = False
) -> torch.Tensor:
    """`multiply_sorted` by kernels that the host does not wait for, or, if `by_id`, of rows in any order.

    Args:
        groups: `ends_E`, or `[N]` integers, the expert of each row; what is outside of `0 … E - 1` stands for none.
        by_id: which of both; only without gradients of weights.
    """
    if not (torch.is_grad_enabled() or needs_operator(x_NI)):
        # An operator's call takes longer on the host than the launch of a kernel.
        return stack.multiply_on_device(x_NI, groups, by_id, transposed=False)
    key, sizes = _followed(stack.form, x_NI).key, [int(size) for size in stack.sizes]
    return device_operator(x_NI, list(stack.parts), "", key, sizes, groups, False, by_id)


def multiply_one(form: Format, x_NI: torch.Tensor, parts: Parts, sizes: Sizes) -> torch.Tensor:
    """Rows times the transpose of one matrix, which gets no gradient: `[N, O]` in the dtype of the rows."""
    x = form.cast(x_NI)
    if needs_operator(x):
        y = device_operator(x, list(parts), "", _followed(form, x).key, list(sizes), None, False, False)
    else:
        y = form.multiply(x, parts, sizes)
    return y if x is x_NI else y.to(x_NI.dtype)


def _followed(form: Format, x: torch.Tensor) -> Format:
    """The format as autograd follows it: gradients are those of products whose rows are not rounded."""
    is_trained = x.requires_grad and torch.is_grad_enabled() and not is_exported()
    return form.exact if is_trained else form


def needs_operator(x: torch.Tensor) -> bool:
    """Whether autograd or a compiler follows the rows, or autocast must be kept out."""
    return (
        (x.requires_grad and torch.is_grad_enabled())
        or is_recorded(x)
        or (is_any_autocast_on() and torch.is_autocast_enabled(x.device.type))
    )


def _define_outer_product(name: str, tags: Sequence[torch.Tag]) -> Any:
    """The operator of this name: the gradient of a product with respect to a plain weight, `[E, I, O]`.

    Its arguments are:
        x_NI: `[N, I]`, sorted by expert.
        grad_NO: `[N, O]`, gradient of the result.
        ends_E: as in `multiply_sorted`.
    """
    waits = len(tags) > 0

    @torch.library.custom_op(f"llamoe::{name}", mutates_args=(), tags=tuple(tags))
    def operator(x_NI: torch.Tensor, grad_NO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        return (_multiply_outer if waits else packed_outer_product)(x_NI, grad_NO, ends_E)

    @operator.register_fake
    def _(x_NI, grad_NO, ends_E):
        return x_NI.new_empty(ends_E.shape[0], x_NI.shape[1], grad_NO.shape[1])

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def differentiate(ctx, grad_EIO):
        x_NI, grad_NO, ends_E = ctx.saved_tensors
        needs_x, needs_grad = ctx.needs_input_grad[:2]
        stack = plain_stack(grad_EIO)
        return (
            multiply_sorted(grad_NO, stack, ends_E, transposed=True) if needs_x else None,
            multiply_sorted(x_NI, stack, ends_E) if needs_grad else None,
            None,
        )

    operator.register_autograd(differentiate, setup_context=save)
    return operator


grouped_outer_product = _define_outer_product("grouped_outer_product", _TAGS)
device_outer_product = _define_outer_product("device_outer_product", ())
