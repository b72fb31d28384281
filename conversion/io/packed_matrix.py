"""A lazy tensor that dequantizes matrices that another program has packed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...configuration.json_files import reading
from ...modeling.formats import Format
from .lazy_tensor import LazyTensor


class PackedMatrix(LazyTensor):
    """The weight of a linear layer or of one expert, dequantized when it is read."""

    def __init__(
        self,
        layout: Any,
        linears: Sequence[Mapping[str, LazyTensor]],
        sizes: tuple[int, int],
        dtype: torch.dtype,
        is_input_first: bool = False,
    ):
        """Make the view.

        Args:
            layout: object with the methods `weight_of` and `parts_of` of `modeling.formats.packed.Layout`.
            linears: the tensors of each linear layer, by kind; an expert's gate and up are joined by rows.
            sizes: outputs and inputs of each linear layer.
            dtype: of the dequantized matrix.
            is_input_first: True if the matrix is `[in, out]`, not `[out, in]`.
        """
        shape = (len(linears) * sizes[0], sizes[1])
        origin = next(iter(linears[0].values())).origin
        super().__init__(shape[::-1] if is_input_first else shape, dtype, origin)
        self._layout, self._linears, self._sizes = layout, linears, sizes
        self._is_input_first = is_input_first

    def packed_as(self, form: Format) -> list[torch.Tensor] | None:
        """Return the tensors in which `form` stores the same codes; None if it cannot hold them."""
        with reading(self.origin, ValueError, RuntimeError):
            return self._layout.parts_of(self._tensors(), self._sizes, form)

    def _tensors(self) -> list[dict[str, torch.Tensor]]:
        return [{kind: tensor.read() for kind, tensor in kinds.items()} for kinds in self._linears]

    def _read(self, start, stop):
        with reading(self.origin, ValueError, RuntimeError):
            weights = [
                self._layout.weight_of(tensors, self._sizes, self.dtype).to(self.dtype)
                for tensors in self._tensors()
            ]
        matrix = weights[0] if len(weights) == 1 else torch.cat(weights)
        return (matrix.T if self._is_input_first else matrix)[start:stop]
