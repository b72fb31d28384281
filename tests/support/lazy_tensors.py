"""A lazy tensor whose numbers are in memory, in place of one that reads a file."""

import torch

from llamoe.conversion.io import LazyTensor


class InMemory(LazyTensor):
    """A lazy tensor in memory; appends the origin and rows (start, stop) of each read to `reads`, if given."""

    def __init__(self, tensor: torch.Tensor, origin: str = "", reads: list | None = None):
        super().__init__(tensor.shape, tensor.dtype, origin)
        self.tensor, self.reads = tensor.detach(), reads

    def _read(self, start, stop):
        if self.reads is not None:
            self.reads.append((self.origin, start, stop))
        return self.tensor[start:stop] if self.shape else self.tensor
