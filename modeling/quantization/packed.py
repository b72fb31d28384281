"""Linear layers and routed experts with packed weights.

Their attribute `is_packed` is True, by which `moe` and `parallel` recognise them without importing this folder.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..formats import Format, Parts, Sizes
from ..layers import Linear
from ..moe import STACKS, Experts, OutputFirstExperts, multiply_one


class Packed(nn.Module):
    """A mixin for layers with packed weights: codes are parameters, other parts are buffers. Name it before the layer.

    Attributes:
        format: the format by which messages describe the weights.
        formats: the format of each weight, by the weight's name.
        sizes: O and I of each weight's matrices, by the weight's name.
        stacked: `(E,)` if a weight is a stack of E matrices, `()` if it is one matrix.
    """

    is_packed = True
    format: Format
    formats: Mapping[str, Format]
    sizes: Mapping[str, Sizes]
    stacked: tuple[int, ...] = ()

    @property
    def storage(self) -> str:
        """How the weights are stored, such as "stored as int4:32", for error messages."""
        return f"stored as {self.format.exact.key}"

    def parts(self, name: str = "weight") -> list[torch.Tensor]:
        """Return the parts of the weight with this name."""
        return [getattr(self, name + suffix) for suffix in self.formats[name].suffixes]

    def part_shapes(self, *names: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each part of these weights (default: of all), by the part's name."""
        return {
            name + suffix: ((*self.stacked, *shape), dtype)
            for name, form in self.formats.items()
            if name in (names or self.formats)
            for suffix, (shape, dtype) in zip(form.suffixes, form.parts(self.sizes[name]), strict=True)
        }

    def _make_parts(self) -> None:
        for name, (shape, dtype) in self.part_shapes().items():
            part = torch.empty(shape, dtype=dtype)
            if name in self.sizes:
                self.register_parameter(name, nn.Parameter(part, requires_grad=False))
            else:
                self.register_buffer(name, part)

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dequantized weight, in the order of axes of the model family."""
        return self.sizes[name]

    def matrices(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return views of the matrices `[O, I]` of a weight of `weight_shape`."""
        return [weight]

    @torch.no_grad()
    def fill(self, name: str, matrices: Iterable[Parts], device: torch.device) -> dict[str, torch.Tensor]:
        """Return the parts of a weight, by the parts' names, from the parts of each of its matrices."""
        wholes = {
            part: torch.empty(shape, dtype=dtype, device=device)
            for part, (shape, dtype) in self.part_shapes(name).items()
        }
        for number, parts in enumerate(matrices):
            for whole, part in zip(wholes.values(), parts, strict=True):
                (whole[number] if self.stacked else whole).copy_(part)
        return wholes

    def quantize(self, weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        """Quantize a weight of `weight_shape`; return its parts by the parts' names."""
        form = self.formats[name]
        return self.fill(name, (form.quantize(matrix) for matrix in self.matrices(weight)), weight.device)

    @torch.no_grad()
    def dequantized_weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight with this name, of `weight_shape`."""
        parts = self.parts(name)
        weight = torch.empty(self.weight_shape(name), dtype=dtype, device=parts[0].device)
        parts_of_matrices = zip(*parts, strict=True) if self.stacked else [parts]
        for matrix, parts in zip(self.matrices(weight), parts_of_matrices, strict=True):
            matrix.copy_(self.formats[name].matrix(parts, self.sizes[name], dtype))
        return weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        # `model.to(dtype)` must not cast scales: kernels read scales in one dtype, and rounding would change weights.
        kept = {id(getattr(self, name)) for name in self.part_shapes()}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in kept and moved.dtype != tensor.dtype else moved

        return super()._apply(move, recurse)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, strict: bool, *lists: list[str]
    ) -> None:
        # torch would cast a plain weight to integers, and load the integers as codes.
        wrong = [
            f"{prefix}{name} is {tensor.dtype}, where this packed weight has {dtype}."
            for name, (_, dtype) in self.part_shapes().items()
            if (tensor := state_dict.get(prefix + name)) is not None and tensor.dtype != dtype
        ]
        lists[-1].extend(wrong)
        if not wrong:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


class QuantizedLinear(Packed, nn.Linear):
    """A linear layer with a packed weight, which has no gradient.

    The class derives from `nn.Linear`, so that peft adapts it. `weight` holds the codes, buffers hold the other parts.
    """

    def __init__(self, linear: nn.Linear, form: Format):
        """Make a layer with the sizes of `linear`, whose parts and bias are not filled."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format, self.formats = form, {"weight": form}
        self.sizes = {"weight": (self.out_features, self.in_features)}
        self._make_parts()
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(torch.empty(self.out_features, dtype=form.compute_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]` in the dtype of `x`."""
        rows = x.reshape(-1, self.in_features)
        y = multiply_one(self.format, rows, self.parts(), self.sizes["weight"])
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dequantized(self, dtype: torch.dtype) -> nn.Linear:
        """Return an ordinary layer with the dequantized weight, and the same bias."""
        with torch.device("meta"):
            linear = Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(self.dequantized_weight("weight", dtype))
        linear.bias = self.bias
        return linear.train(self.training)


class QuantizedExperts(Packed, Experts):
    """Routed experts with packed stacks, which have no gradient.

    `gate_up_proj` and `down_proj` hold the codes, output-first in every family; buffers hold the other parts. Each of
    these tensors has an axis for experts in front.
    """

    def __init__(self, experts: Experts, form: Format, gate_up_form: Format | None = None):
        """Make experts with the sizes of `experts`, whose parts are not filled; `gate_up_form` defaults to `form`."""
        self.copy_attributes_from(experts)
        self._formats = {"gate_up_proj": gate_up_form or form, "down_proj": form}
        self.sizes = {name: experts.sizes_of(name) for name in STACKS}
        self.stacked = (self.num_experts,)
        self._make_parts()
        self.check_implementation(self.config._experts_implementation)

    def sizes_of(self, name: str) -> Sizes:
        """Return O and I of the matrices in this stack."""
        return self.sizes[name]

    def stack_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the dequantized stack, in the order of axes of the model family."""
        return (self.num_experts, *self.sizes[name][:: -1 if self.is_transposed else 1])

    weight_shape = stack_shape

    def matrices(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return views of the matrices `[O, I]` of a stack."""
        return [*(weight.mT if self.is_transposed else weight)]

    def dequantized(self, dtype: torch.dtype) -> Experts:
        """Return ordinary experts with the dequantized stacks."""
        with torch.device("meta"):
            experts = (Experts if self.is_transposed else OutputFirstExperts)(self.config)
        for name in STACKS:
            setattr(experts, name, nn.Parameter(self.dequantized_weight(name, dtype)))
        return experts.train(self.training)


def holds_packed(model: nn.Module, name: str) -> bool:
    """Return True if a packed module holds the weight that has this name in the model."""
    path, _, weight = name.rpartition(".")
    module = model.get_submodule(path)
    return isinstance(module, Packed) and weight in module.sizes


def packed_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the paths and the modules of all packed modules."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Packed)]
