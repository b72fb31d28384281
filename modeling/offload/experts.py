"""Routed experts whose matrices are offloaded.

A product asks for one matrix at a time. It is in a slot of the memory for recently used ones, or it is brought there,
and is multiplied as a slice of a stack would be, in the same order.

Shapes: N rows, E experts, S slots, I columns in, O columns out.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from ..formats import Format, Parts
from ..kernels import has_feed_forward
from ..moe import STACKS, Experts, Group, Ranges, Stack, multiply_sorted, register_holder
from .store import Store


class OffloadedExperts(Experts):
    """The experts of one layer, of which a `Store` has the matrices.

    Parameters give names, shapes and dtypes, and what `save_pretrained` writes: a memory map where the file has the
    whole stack in the model's dtype, else a meta tensor. Products read the store instead.
    """

    is_offloaded = True

    def __init__(self, experts: Experts, name: str):
        """Take the place of empty experts.

        Args:
            experts: on the meta device, plain or packed.
            name: of the experts in the model, for errors.
        """
        self.take_after(experts)
        # Not a submodule: nothing of it is in the model.
        self.__dict__["_shapes"] = experts
        self.name = name
        # Where they are, the dtype cannot change.
        self._formats = experts.formats
        self.number = register_holder(self)
        self.store: Store | None = None

    def __deepcopy__(self, memo: dict) -> "OffloadedExperts":
        """A copy of the layer, with the same store."""
        new: Any = object.__new__(type(self))
        memo[id(self)] = new
        for shared in (self.store, self._shapes, *self._parameters.values(), *self._buffers.values()):
            memo[id(shared)] = shared
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        new.number = register_holder(new)
        return new

    def __reduce__(self):
        raise TypeError(
            f"{self.name} cannot be pickled: its experts are in the files of the checkpoint. Save the model by "
            "save_pretrained, or load it in each process."
        )

    @property
    def storage(self) -> str:
        """Where they are, for errors."""
        return "not in memory" if self.store is None else f"on {self.store.place!r}"

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor on the device of the products, to which peft moves new adapters."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.store.device

    def stack_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stack in the family's own order."""
        return self._shapes.stack_shape(name)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, strict: bool, *lists: list[str]
    ) -> None:
        for name, own in [*self._parameters.items(), *self._buffers.items()]:
            given = state_dict.get(prefix + name)
            if given is not None and not (given.is_meta or given.data_ptr() == own.data_ptr()):
                lists[-1].append(
                    f"{prefix}{name} is {self.storage}, and is read from the files that the model was loaded "
                    "from: load the model into memory to give it other weights."
                )

    def check_cast(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Check that a function for all tensors leaves the dtype.

        Raises:
            ValueError: it does not.
        """
        moved = fn(torch.empty(0, dtype=self.dtype))
        if moved.dtype != self.dtype and not self.is_packed:
            raise ValueError(
                f"{self.name} is read in {self.dtype} from where it lies, and cannot become {moved.dtype} in place: "
                f"load the model with dtype={moved.dtype}."
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        # Nothing moves: a product brings matrices to the rows, or rows to the matrices.
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
                    f"{self.name}.{own_name} shall be trained, but is {self.storage}, where nothing can "
                    "change it: set requires_grad_(False) for it, as LoRA does, or load it into memory."
                )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Experts.forward`.

        Raises:
            ValueError: these experts are to be trained.
        """
        if self.training and torch.is_grad_enabled():
            self.check_frozen()
        return super().forward(*args, **kwargs)

    def stack(self, name: str) -> "OffloadedStack":
        """The matrices of a stack, for products."""
        return OffloadedStack(self, name)

    def _kernel_takes(self, form: Format, x_NH: torch.Tensor, groups: list[Group]) -> bool:
        if self.store.is_remote or not super()._kernel_takes(form, x_NH, groups):
            return False
        # Asked before any of them is read.
        probe = self.store.probe(self.name)
        gate_up, down = (form.for_kernel([part[0] for part in probe.parts(name)]) for name in STACKS)
        return gate_up is not None and down is not None and has_feed_forward(x_NH.shape[1], gate_up, down)

    def _bring_both(self, groups: list[Group]) -> Iterator[tuple[Parts, Parts, Ranges]]:
        hit = _by_expert(groups)
        sizes = _sizes(hit)
        self.store.prefetch(self.name, "down_proj", [expert for expert, _ in hit])
        with closing(self.store.walk(self.name, "gate_up_proj", sizes)) as gate_ups:
            for size, (_, ranges), gate_up in zip(sizes, hit, gate_ups, strict=True):
                # A down matrix is let go before the next gate is waited for, so that threads cannot block each other.
                with closing(self.store.walk(self.name, "down_proj", [size])) as downs:
                    yield gate_up, next(downs), ranges

    def fits_grouped_mm(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> bool:
        """As `Experts.fits_grouped_mm`."""
        return self.store.probe(self.name).fits_grouped_mm(device or self.device, dtype)

    def extra_repr(self) -> str:
        """Show the sizes and the place in `print(model)`."""
        return f"{self._shapes.extra_repr()}, on={None if self.store is None else self.store.place!r}"


class OffloadedStack(Stack):
    """The matrices of one stack, which a store brings."""

    def __init__(self, experts: OffloadedExperts, name: str):
        self.experts, self.name, self.parts = experts, name, []
        self.form, self.sizes = experts.formats[name], experts.sizes_of(name)
        self.num_experts = experts.num_experts
        self.source = f"{experts.number}:{name}"

    def bring(self, groups: Sequence[Group], transposed: bool) -> Iterator[tuple[Parts, Ranges]]:
        """As `Stack.bring`, in the order of the experts; they are brought to the rows, or stay where they are.

        Raises:
            CheckpointError: a file has changed or cannot be read, or the model is closed.
            ValueError: a backward pass, if these experts are to be trained.
        """
        if transposed:
            # Outside of training mode a forward pass may be for its results alone, also with gradients switched on.
            self.experts.check_frozen()
        store, layer = self.experts.store, self.experts.name
        hit = _by_expert(group for group in groups if group[0] < self.num_experts)
        # The stack that multiplies the results, in a forward pass or back.
        later = STACKS[not transposed] if self.name == STACKS[transposed] else None
        # At most as many as there are slots: more would evict the first ones before they are used.
        ahead = [] if later is None else [expert for expert, _ in hit][: store.num_slots(layer)]
        store.prefetch(layer, later, ahead[:1])
        others = set(ahead[1:])
        with closing(store.walk(layer, self.name, _sizes(hit))) as found:
            for (expert, ranges), parts in zip(hit, found, strict=True):
                if expert in others:
                    # Behind this stack's next matrices, which are needed first.
                    store.prefetch(layer, later, [expert])
                yield parts, ranges

    def matrices(self) -> "OffloadedStack":
        """The matrices `[I, O]`, each read when it is asked for."""
        return self

    def __getitem__(self, expert: int) -> torch.Tensor:
        store, layer = self.experts.store, self.experts.name
        with closing(store.walk(layer, self.name, [(expert, 1)], may_compute=False)) as found:
            matrix = self.form.matrix(next(found), self.sizes, self.form.compute_dtype).T
            # The slot is free for another expert when this returns.
            return matrix.to(self.experts.device, copy=True)

    def multiply_by_grouped_mm(self, x_NI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """As `Stack.multiply_by_grouped_mm`, one expert after the other."""
        self.form = self.form.with_grouped_mm()
        return multiply_sorted(x_NI, self, ends_E)


def _by_expert(groups: Iterable[Group]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Each expert once, in ascending order, with the first and last row + 1 of each of its groups."""
    found: dict[int, list[tuple[int, int]]] = {}
    for expert, start, end in groups:
        found.setdefault(expert, []).append((start, end))
    return sorted(found.items())


def _sizes(hit: list[tuple[int, list[tuple[int, int]]]]) -> list[tuple[int, int]]:
    """Each expert and its number of rows."""
    return [(expert, sum(end - start for start, end in ranges)) for expert, ranges in hit]
