"""Lazy tensors of tests."""

import torch

from llamoe.conversion.io import LazyTensor


class InMemory(LazyTensor):
    """A tensor that is in memory; with `reads`, what is read of it is appended there: origin and range of rows."""

    def __init__(self, tensor: torch.Tensor, origin: str = "", reads: list | None = None):
        super().__init__(tensor.shape, tensor.dtype, origin)
        self.tensor, self.reads = tensor.detach(), reads

    def _read(self, start, stop):
        if self.reads is not None:
            self.reads.append((self.origin, start, stop))
        return self.tensor[start:stop] if self.shape else self.tensor
