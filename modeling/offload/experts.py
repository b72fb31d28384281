"""Routed experts whose matrices are on disk or in RAM, and the product of rows with an offloaded stack in training.

A product requests one matrix at a time. The store has the matrix in a slot of memory, or loads it into one. Rows are
then multiplied as by one matrix of a stack in memory, with sums in the same order.

Shapes: N rows, E experts, I columns in, O columns out.
"""

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..formats import Format, Parts
from ..moe import Experts, Group, Stack, groups_between, multiply_groups
from .pieces import StoredLayer
from .store import Store


class OffloadedExperts(Experts):
    """The experts of one layer, whose matrices a `Store` loads.

    Products use the store. Parameters only give names, shapes, dtypes and the content for `save_pretrained`: each is a
    memory map if a file has the whole stack in the model's dtype, else a meta tensor. `connect` makes them after
    loading, so that transformers does not load them.

    Args:
        experts: the experts to replace, on the meta device, plain or packed.
        name: name of the experts in the model.
        place: "disk" or "cpu" (RAM).
        stored: location of the experts in the files.
    """

    is_offloaded = True

    def __init__(self, experts: Experts, name: str, place: str, stored: StoredLayer):
        self.copy_attributes_from(experts)
        # Set in `__dict__`, so that it does not become a submodule.
        self.__dict__["shapes"] = experts
        self.name, self.place, self.stored = name, place, stored
        # Offloaded weights keep their dtype, on which their format depends.
        self._formats = experts.formats
        self.store: Store | None = None

    def connect(self, store: Store) -> None:
        """Load matrices by this store from now on, and make the parameters."""
        self.store = store
        for name, tensor in self.shapes.state_dict(keep_vars=True).items():
            content = tensor.data
            if name in self.stored.whole:
                path, stored_name = self.stored.whole[name]
                with safe_open(path, framework="pt") as file:
                    content = file.get_tensor(stored_name)
            if isinstance(tensor, nn.Parameter):
                trains = content.is_floating_point() and not self.is_packed
                self.register_parameter(name, nn.Parameter(content, requires_grad=trains))
            else:
                self.register_buffer(name, content)

    def __deepcopy__(self, memo: dict) -> "OffloadedExperts":
        """Copy the layer; the copy uses the same store."""
        new: Any = object.__new__(type(self))
        memo[id(self)] = new
        shared = self.store, self.shapes, self.stored, *self.parameters(), *self.buffers()
        memo |= {id(item): item for item in shared}
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    @property
    def storage(self) -> str:
        """The experts' place in words, for error messages."""
        return f"on {self.place!r}"

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor on the device of the tokens: peft moves new adapters to the device of `weight`."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self.store.device

    def stack_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a stack in memory would have, in the model family's order of axes."""
        return self.shapes.stack_shape(name)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, strict: bool, *lists: list[str]
    ) -> None:
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            new = state_dict.get(prefix + name)
            if new is not None and not (new.is_meta or new.data_ptr() == tensor.data_ptr()):
                lists[-1].append(
                    f"{prefix}{name} is {self.storage}, and is read from the files that the model was loaded "
                    "from: load the model into memory to give it other weights."
                )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        # Do not move the experts: each product moves its matrices or its rows.
        dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        if dtype != self.dtype and not self.is_packed:
            raise ValueError(
                f"{self.name} is {self.storage}, where it has {self.dtype}, and cannot be cast to {dtype}: load the "
                f"model with dtype={dtype}."
            )
        return self

    def check_frozen(self) -> None:
        """Raise a `ValueError` if a parameter of these experts requires a gradient."""
        for stack, parameter in self._parameters.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"{self.name}.{stack} shall be trained, but is {self.storage}, where nothing can "
                    "change it: set requires_grad_(False) for it, as LoRA does, or load it into memory."
                )

    def stack(self, name: str) -> "OffloadedStack":
        """Return the matrices of a stack, for products; raise a `ValueError` if these experts are to be trained."""
        # In eval mode gradients may not be wanted: there only a backward pass checks.
        if self.training and torch.is_grad_enabled():
            self.check_frozen()
        return OffloadedStack(self, name, self._formats[name])

    def extra_repr(self) -> str:
        """Show the sizes and the place in `print(model)`."""
        return f"{self.shapes.extra_repr()}, on={self.place!r}"


def offloaded_in(model: nn.Module) -> list[OffloadedExperts]:
    """Return the offloaded experts of a model."""
    return [module for module in model.modules() if isinstance(module, OffloadedExperts)]


def freeze_for_training(prepare: Callable, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call `prepare`, peft's function that freezes all weights of a model and casts those in 16 bits.

    Offloaded experts cannot be cast: they are frozen here, and their parameters are hidden during the call.
    """
    hidden = [(experts, dict(experts._parameters)) for experts in offloaded_in(model)]
    try:
        for experts, parameters in hidden:
            experts._parameters.clear()
            for parameter in parameters.values():
                parameter.requires_grad_(False)
        return prepare(model, *args, **kwargs)
    finally:
        for experts, parameters in hidden:
            experts._parameters.update(parameters)


class OffloadedStack(Stack):
    """The matrices of one offloaded stack, read from a store."""

    is_offloaded = True

    def __init__(self, experts: OffloadedExperts, name: str, form: Format):
        self.experts, self.name, self.form, self.parts = experts, name, form, []
        self.sizes, self.num_experts = experts.sizes_of(name), experts.num_experts

    def parts_of(
        self, groups: Sequence[Group], transposed: bool
    ) -> Generator[tuple[Parts, Group], None, None]:
        """Yield matrices as `Stack.parts_of`: on the device of the rows, or in RAM if the CPU multiplies the rows.

        Forward passes read experts in ascending order, backward passes in descending order, to begin with the experts
        that are still in memory.

        Raises:
            CheckpointError: a file has changed or cannot be read, or the model is closed.
            ValueError: in a backward pass, a parameter of these experts requires a gradient.
        """
        if transposed:
            self.experts.check_frozen()
        groups = sorted(groups, reverse=transposed)
        rows = {expert: end - start for expert, start, end in groups}
        with closing(self.experts.store.walk(self.experts.name, self.name, rows, transposed)) as matrices:
            yield from zip(matrices, groups, strict=True)

    # Compilers cannot trace the reading of files.
    @torch.compiler.disable
    def multiply_sorted(self, x_NI: torch.Tensor, ends_E: torch.Tensor, transposed: bool) -> torch.Tensor:
        """Multiply rows as `moe.multiply_sorted`: `[N, I]` to `[N, O]`."""
        return _Product.apply(x_NI, self, ends_E, transposed)

    def matrices(self) -> "OffloadedStack":
        """Return a sequence of the matrices `[I, O]`, each read when it is indexed."""
        return self

    def __getitem__(self, expert: int) -> torch.Tensor:
        with closing(self.experts.store.walk(self.experts.name, self.name, {expert: 1})) as matrices:
            matrix = self.form.matrix(next(matrices), self.sizes, self.form.compute_dtype).T
            # Copy: the slot may be given to another expert as soon as this returns.
            return matrix.to(self.experts.device, copy=True)


class _Product(torch.autograd.Function):
    """The product of rows, sorted by expert, with an offloaded stack, which is frozen: only rows have a gradient.

    The backward pass reads the matrices from the store again.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, stack: OffloadedStack, ends_E: torch.Tensor, transposed: bool
    ) -> torch.Tensor:
        ctx.stack, ctx.transposed = stack, transposed
        ctx.save_for_backward(ends_E)
        return multiply_groups(x_NI, stack, groups_between(ends_E, len(x_NI)), transposed).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ends_E,) = ctx.saved_tensors
        return _Product.apply(grad.contiguous(), ctx.stack, ends_E, not ctx.transposed), None, None, None
