"""Routed experts whose matrices are elsewhere: a store beside the resident stack (`moe.stores`).

A product asks for one matrix at a time. It is in a slot of the memory for recently used ones, or it is brought there,
and is multiplied as a slice of a stack would be, in the same order.

Shapes: N rows, E experts, S slots, I columns in, O columns out.
"""

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import torch
from torch import nn

from ..checkpoints import STACKS
from ..kernels import cpp_feed_forward, has_feed_forward, is_recorded
from ..moe import Experts, Group, groups_between, is_torchs_product
from .products import matrix_for_kernel, matrix_of, product
from .store import Store

_REGISTERED: "weakref.WeakValueDictionary[int, ExpertsElsewhere]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class ExpertsElsewhere(Experts):
    """The experts of one layer, of which a `Store` has the matrices.

    Parameters give names, shapes and dtypes, and what `save_pretrained` writes: a memory map where the file has the
    whole stack in the model's dtype, else a meta tensor. Products read the store instead.
    """

    is_elsewhere = True

    def __init__(self, experts: Experts, name: str, dtype: torch.dtype):
        """Take the place of empty experts.

        Args:
            experts: on the meta device, plain or packed.
            name: of the experts in the model, for errors.
            dtype: of the products.
        """
        nn.Module.__init__(self)
        self.__dict__.update({k: v for k, v in experts.__dict__.items() if k not in nn.Module().__dict__})
        self.act_fn = experts.act_fn
        # Not a submodule: nothing of it is in the model.
        self.__dict__["_shapes"] = experts
        self.name = name
        self.is_packed = experts.is_packed
        self.is_transposed = experts.is_transposed
        self._dtype = dtype
        self.number = next(_NUMBERS)
        _REGISTERED[self.number] = self
        self.store: Store | None = None

    def __deepcopy__(self, memo: dict) -> "ExpertsElsewhere":
        """A copy of the layer, with the same store."""
        new: Any = object.__new__(type(self))
        memo[id(self)] = new
        for shared in (self.store, self._shapes, *self._parameters.values(), *self._buffers.values()):
            memo[id(shared)] = shared
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        new.number = next(_NUMBERS)
        _REGISTERED[new.number] = new
        return new

    def __reduce__(self):
        raise TypeError(
            f"{self.name} cannot be pickled: its experts are in the files of the checkpoint. Save the model by "
            "save_pretrained, or load it in each process."
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the products."""
        return self._dtype

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor on the device of the products, to which peft moves new adapters."""
        return torch.empty(0, dtype=self._dtype, device=self.device)

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.store.device

    def stack_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stack in the family's own order."""
        return self._shapes.stack_shape(name)

    def unpacked_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stacks, by their names."""
        return {name: self.stack_shape(name) for name in STACKS}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, strict: bool, *lists: list[str]
    ) -> None:
        for name, own in [*self._parameters.items(), *self._buffers.items()]:
            given = state_dict.get(prefix + name)
            if given is not None and not (given.is_meta or given.data_ptr() == own.data_ptr()):
                lists[-1].append(
                    f"{prefix}{name} is on {self.store.place!r}, and is read from the files that the model was loaded "
                    "from: load the model into memory to give it other weights."
                )

    def check_cast(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Check that a function for all tensors leaves the dtype.

        Raises:
            ValueError: it does not.
        """
        moved = fn(torch.empty(0, dtype=self._dtype))
        if moved.dtype != self._dtype and not self.is_packed:
            raise ValueError(
                f"{self.name} is read in {self._dtype} from where it lies, and cannot become {moved.dtype} in place: "
                f"load the model with dtype={moved.dtype}."
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        # Nothing moves: `multiply_groups` brings matrices to the rows, or rows to the matrices.
        self.check_cast(fn)
        return self

    def check_frozen(self) -> None:
        """Check that nothing of these experts is to be trained.

        Raises:
            ValueError: a parameter that requires gradients.
        """
        for own_name, parameter in self._parameters.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"{self.name}.{own_name} shall be trained, but is on {self.store.place!r}, where nothing can "
                    "change it: set requires_grad_(False) for it, as LoRA does, or load it into memory."
                )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Experts.forward`.

        Raises:
            ValueError: these experts are to be trained, or an experts implementation wants whole stacks.
        """
        if self.training and torch.is_grad_enabled():
            self.check_frozen()
        chosen = self.config._experts_implementation
        if chosen not in (None, "llamoe", "llamoe_loop", "llamoe_grouped", "eager"):
            raise ValueError(
                f'experts_implementation="{chosen}" needs stacks in memory, but {self.name} is on '
                f'{self.store.place!r}: choose "llamoe".'
            )
        return super().forward(*args, **kwargs)

    def matrices(self, name: str) -> "_Matrices":
        """The experts' matrices `[in, out]`, each read when it is asked for."""
        return _Matrices(self, name)

    def input_first(self, name: str) -> torch.Tensor:
        """Refused: there is no such tensor.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.name}.{name} is on {self.store.place!r}, and is no stack in memory.")

    def multiply_stack(self, x_NI: torch.Tensor, name: str, groups: Any, multiply: Callable) -> torch.Tensor:
        """The products of rows with their experts' matrices; arguments as in `Experts`."""
        x_NI = x_NI.to(self.dtype) if self.is_packed else x_NI
        if not isinstance(groups, list):
            return product_elsewhere(x_NI, self.number, name, groups, False, is_torchs_product(multiply))
        return self.multiply_groups(x_NI, name, groups)

    def multiply_groups(
        self,
        x_NI: torch.Tensor,
        name: str,
        groups: list[Group],
        transposed: bool = False,
        is_grouped: bool = False,
    ) -> torch.Tensor:
        """Each group of rows times its expert's matrix; for neither gradients nor compilers.

        Args:
            x_NI: `[N, I]`, or `[N, O]` if `transposed`.
            name: of the stack.
            groups: cover all rows in their order; numbers from E on stand for no expert.
            transposed: whether the matrices are multiplied from the other side, as in a backward pass.
            is_grouped: by torch's grouped product.

        Returns:
            `[N, O]`, or `[N, I]` if `transposed`, in the dtype of the products; 0 in rows of no expert.

        Raises:
            CheckpointError: a file has changed or cannot be read, or the model is closed.
        """
        hit = _by_expert(group for group in groups if group[0] < self.num_experts)
        out_NO = None
        # The stack that multiplies the results, in a forward pass or back.
        later = STACKS[not transposed] if name == STACKS[transposed] else None
        # At most as many as there are slots: more would evict the first ones before they are used.
        ahead = [] if later is None else [expert for expert, _ in hit][: self.store.num_slots(self.name)]
        self.store.prefetch(self.name, later, ahead[:1])
        others = set(ahead[1:])
        with closing(self.store.walk(self.name, name, _sizes(hit))) as found:
            for (expert, ranges), parts in zip(hit, found, strict=True):
                if expert in others:
                    # Behind this stack's next matrices, which are needed first.
                    self.store.prefetch(self.name, later, [expert])
                for start, end in ranges:
                    x = x_NI[start:end].to(parts[0].device)
                    y = product(self._shapes, x, name, parts, transposed, is_grouped).to(x_NI.device)
                    if len(groups) == 1:
                        return y
                    if out_NO is None:
                        out_NO = x_NI.new_empty(len(x_NI), y.shape[1])
                    out_NO[start:end] = y
        if out_NO is None:
            out_NO = x_NI.new_empty(len(x_NI), self.size_out(name, transposed))
        for expert, start, end in groups:
            if expert >= self.num_experts:
                out_NO[start:end].zero_()
        return out_NO

    def size_out(self, name: str, transposed: bool) -> int:
        """Columns of a stack's products."""
        first, second = self.stack_shape(name)[1:]
        return first if self.is_transposed == transposed else second

    def _products_by_kernel(self, x_NH: torch.Tensor, groups: list[Group]) -> torch.Tensor | None:
        if self.store.is_remote or not self._shapes._kernel_takes(x_NH, groups):
            return None
        if any(expert >= self.num_experts for expert, _, _ in groups) or not self._has_kernel(x_NH.shape[1]):
            return None
        hit = _by_expert(groups)
        sizes = _sizes(hit)
        self.store.prefetch(self.name, "down_proj", [expert for expert, _ in hit])
        out_NH = None
        with closing(self.store.walk(self.name, "gate_up_proj", sizes)) as gate_ups:
            for size, (_, ranges), parts in zip(sizes, hit, gate_ups, strict=True):
                gate_up = matrix_for_kernel(self._shapes, "gate_up_proj", parts)
                # A down matrix is let go before the next gate is waited for, so that threads cannot block each other.
                with closing(self.store.walk(self.name, "down_proj", [size])) as downs:
                    down = matrix_for_kernel(self._shapes, "down_proj", next(downs))
                    if gate_up is None or down is None:
                        return None
                    for start, end in ranges:
                        y = cpp_feed_forward(x_NH[start:end], gate_up, None, down)
                        if y is None or len(groups) == 1:
                            return y
                        out_NH = x_NH.new_empty(x_NH.shape) if out_NH is None else out_NH
                        out_NH[start:end] = y
        return out_NH

    def _has_kernel(self, hidden_size: int) -> bool:
        """Whether a compiled kernel takes these experts; asked before any of them is read."""
        gate_up, down = (self.store.probe(self.name).matrix_for_kernel(stack, 0) for stack in STACKS)
        return gate_up is not None and down is not None and has_feed_forward(hidden_size, gate_up, down)

    def fits_grouped_mm(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> bool:
        """As `Experts.fits_grouped_mm`."""
        return self.store.probe(self.name).fits_grouped_mm(device or self.device, dtype)

    def extra_repr(self) -> str:
        """Show the sizes and the place in `print(model)`."""
        hidden_size, intermediate_size = self.hidden_and_intermediate_size
        form = f", format={self.format.key}" if self.is_packed else ""
        place = None if self.store is None else self.store.place
        return f"num_experts={self.num_experts}, {hidden_size=}, {intermediate_size=}{form}, on={place!r}"


class _Matrices:
    """What the loop over experts asks for a matrix."""

    def __init__(self, experts: ExpertsElsewhere, name: str):
        self.experts, self.name = experts, name

    def __getitem__(self, expert: int) -> torch.Tensor:
        store, layer = self.experts.store, self.experts.name
        with closing(store.walk(layer, self.name, [(expert, 1)], may_compute=False)) as found:
            matrix = matrix_of(self.experts._shapes, self.name, next(found))
            # The slot is free for another expert when this returns.
            return matrix.to(self.experts.device, copy=True)


def _by_expert(groups: Iterable[Group]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Each expert once, in ascending order, with the first and last row + 1 of each of its groups."""
    found: dict[int, list[tuple[int, int]]] = {}
    for expert, start, end in groups:
        found.setdefault(expert, []).append((start, end))
    return sorted(found.items())


def _sizes(hit: list[tuple[int, list[tuple[int, int]]]]) -> list[tuple[int, int]]:
    """Each expert and its number of rows."""
    return [(expert, sum(end - start for start, end in ranges)) for expert, ranges in hit]


# The host counts the rows; a captured CUDA stream cannot wait for it.
@torch.library.custom_op("llamoe::product_elsewhere", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _product_elsewhere(
    x_NI: torch.Tensor, number: int, name: str, ends_E: torch.Tensor, transposed: bool, is_grouped: bool
) -> torch.Tensor:
    experts = _REGISTERED[number]
    with torch.no_grad():
        groups = groups_between(ends_E, len(x_NI))
        y = experts.multiply_groups(x_NI, name, groups, transposed, is_grouped)
        # The results of operators may not be views.
        return y.clone(memory_format=torch.contiguous_format) if y._base is not None else y.contiguous()


def product_elsewhere(
    x_NI: torch.Tensor, number: int, name: str, ends_E: torch.Tensor, transposed: bool, is_grouped: bool
) -> torch.Tensor:
    """`ExpertsElsewhere.multiply_groups` for autograd and compilers.

    Args:
        x_NI: `[N, I]`, or `[N, O]` if `transposed`, sorted by expert.
        number: of the experts: operators take no objects.
        name: of the stack.
        ends_E: `[E]` integers, the index after each expert's last row.
        transposed: as in `multiply_groups`.
        is_grouped: as in `multiply_groups`.
    """
    if is_recorded(x_NI) or (x_NI.requires_grad and torch.is_grad_enabled()):
        return _product_elsewhere(x_NI, number, name, ends_E, transposed, is_grouped)
    return _REGISTERED[number].multiply_groups(
        x_NI, name, groups_between(ends_E, len(x_NI)), transposed, is_grouped
    )


@_product_elsewhere.register_fake
def _(x_NI, number, name, ends_E, transposed, is_grouped):
    return x_NI.new_empty(x_NI.shape[0], _REGISTERED[number].size_out(name, transposed))


def _save(ctx, inputs, output):
    _, ctx.number, ctx.name, ends_E, ctx.transposed, ctx.is_grouped = inputs
    # The copy of a model may be gone before its last backward pass.
    ctx.experts = _REGISTERED[ctx.number]
    ctx.save_for_backward(ends_E)


def _differentiate(ctx, grad):
    # Outside of training mode a forward pass may be for its results alone, also with gradients switched on.
    ctx.experts.check_frozen()
    (ends_E,) = ctx.saved_tensors
    grad_x = product_elsewhere(
        grad.contiguous(), ctx.number, ctx.name, ends_E, not ctx.transposed, ctx.is_grouped
    )
    return grad_x, None, None, None, None, None


_product_elsewhere.register_autograd(_differentiate, setup_context=_save)
