"""What linear layers and experts with packed weights have in common: their tensors keep the dtypes of their format.

The mark `is_packed` tells them from others; `moe` and `parallel` stand before this folder and ask for no class.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from ...configuration.errors import CheckpointError
from ..formats import Format


class Packed(nn.Module):
    """A base class to name before the layer's own: codes are parameters, and what belongs to them buffers."""

    is_packed = True
    format: Format

    @property
    def storage(self) -> str:
        """How the weights are kept, for errors."""
        return f"stored as {self.format.exact.key}"

    def extra_repr(self) -> str:
        """Show the sizes and the format in `print(model)`."""
        return f"{super().extra_repr()}, format={self.format.exact.key}"

    def part_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of the weights, by its name."""
        raise NotImplementedError

    def _make_parts(self, weights: Sequence[str]) -> None:
        """Make the empty parts: parameters of these names, and buffers."""
        for name, (shape, dtype) in self.part_shapes().items():
            part = torch.empty(shape, dtype=dtype)
            if name in weights:
                self.register_parameter(name, nn.Parameter(part, requires_grad=False))
            else:
                self.register_buffer(name, part)

    def _packed_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            if tensor is not None and name != "bias":
                yield name, tensor

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        # `model.to(dtype)` and its kin: kernels read the scales in one dtype, and rounding them would change weights.
        kept = {id(tensor) for _, tensor in self._packed_tensors()}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in kept and moved.dtype != tensor.dtype else moved

        return super()._apply(move, recurse)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, strict: bool, *lists: list[str]
    ) -> None:
        # torch would cast: the codes of a 16-bit weight would be its numbers without their fractions.
        wrong = [
            f"{prefix}{name} is {given.dtype}, where this packed weight has {tensor.dtype}."
            for name, tensor in self._packed_tensors()
            if (given := state_dict.get(prefix + name)) is not None and given.dtype != tensor.dtype
        ]
        lists[-1].extend(wrong)
        if not wrong:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


class QuantizeWeight(ConversionOps):
    """The operation by which transformers' loader quantizes a weight that it has read, before it reads the next."""

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """The parts by their names in the model, of one weight."""
        path, _, name = full_layer_name.rpartition(".")
        [weight] = input_dict.values()
        parts = model.get_submodule(path).quantize(weight[0] if isinstance(weight, list) else weight, name)
        return {f"{path}.{part}": tensor for part, tensor in parts.items()}


def holds_packed(model: nn.Module, name: str) -> bool:
    """Whether a weight of this name has a module of ours that stores it packed."""
    path, _, own_name = name.rpartition(".")
    module: Any = model.get_submodule(path)
    return isinstance(module, Packed) and own_name in module.unpacked_shapes()


def packed_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules with packed weights, by their paths."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Packed)]


def check_scales(model: nn.Module) -> None:
    """Check the scales of all packed weights of a loaded model.

    Raises:
        CheckpointError: some are NaN or infinite, so that whatever they multiply would be.
    """
    for path, module in packed_modules(model):
        for name, scales in module._buffers.items():
            if scales is None or scales.is_meta or not scales.is_floating_point() or not scales.numel():
                continue
            # The largest and smallest number take no memory of their own, and are NaN if one is.
            if not torch.stack(scales.aminmax()).isfinite().all():
                raise CheckpointError(
                    f"{path}.{name}: {int((~scales.isfinite()).sum())} of {scales.numel()} scales are NaN or infinite. "
                    "The checkpoint is damaged, or its weights overflowed: quantize the original one."
                )
