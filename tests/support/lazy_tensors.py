"""Lazy tensors of tests."""

import torch

from llamoe.conversion.io import LazyTensor


class InMemory(LazyTensor):
    """A tensor that is in memory."""

    def __init__(self, tensor: torch.Tensor, origin: str = ""):
        super().__init__(tensor.shape, tensor.dtype, origin)
        self.tensor = tensor.detach()

    def _read(self, start, stop):
        return self.tensor[start:stop] if self.shape else self.tensor
