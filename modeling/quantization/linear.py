"""A linear layer whose weight is quantized."""

from typing import Any

import torch
from torch import nn

from ..formats import Format
from ..layers import Linear
from ..moe import multiply_one
from .packed import Packed


class QuantizedLinear(Packed, nn.Linear):
    """A linear layer with a packed weight, which has no gradient.

    An `nn.Linear`, so that peft adapts it. `weight` holds the codes; buffers beside it hold the other parts.
    """

    def __init__(self, linear: nn.Linear, form: Format):
        """Make empty parts in the place of a layer's weight."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format = form
        self._names = tuple(f"weight{suffix}" for suffix in form.suffixes)
        self._make_parts(["weight"])
        bias = None if linear.bias is None else torch.empty(self.out_features, dtype=form.compute_dtype)
        self.bias = None if bias is None else nn.Parameter(bias)

    def part_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part, by its name."""
        return dict(zip(self._names, self.format.parts((self.out_features, self.in_features)), strict=True))

    def parts(self) -> list[torch.Tensor]:
        """The parts of the weight."""
        # Twice as fast as by attribute, for each layer of each token.
        found: list[Any] = [self._parameters["weight"], *map(self._buffers.__getitem__, self._names[1:])]
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]` in the dtype of `x`.

        Raises:
            ValueError: rows of another size, of which kernels would read what is not theirs, or of integers.
        """
        if x.shape[-1] != self.in_features or not x.is_floating_point():
            raise ValueError(
                f"A layer of {self.format.exact.key} takes floats [..., {self.in_features}], not {x.dtype} "
                f"{list(x.shape)}."
            )
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        y = multiply_one(self.format, rows, self.parts(), (self.out_features, self.in_features))
        if x.dim() != 2:
            y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def unpacked_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the weight that the parts mean, by its name."""
        return {"weight": (self.out_features, self.in_features)}

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor, name: str = "weight") -> dict[str, torch.Tensor]:
        """The parts of a weight `[out_features, in_features]`, by name."""
        return dict(zip(self._names, self.format.quantize(weight), strict=True))

    @torch.no_grad()
    def dequantized_weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the parts mean, `[out_features, in_features]`; `name` is "weight"."""
        sizes = self.out_features, self.in_features
        return self.format.matrix(self.parts(), sizes, dtype).to(dtype).contiguous()

    def dequantized(self, dtype: torch.dtype) -> nn.Linear:
        """An ordinary layer with the weight that this one means."""
        with torch.device("meta"):
            linear = Linear(self.in_features, self.out_features, self.bias is not None)
        linear.weight = nn.Parameter(self.dequantized_weight("weight", dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().to(dtype))
        return linear.train(self.training)
