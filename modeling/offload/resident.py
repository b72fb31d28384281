"""The weights beside offloaded experts: read into memory of their own, out of the files that they are maps of.

A file that is cut would end the process, and one that is rewritten would change the model, before an expert that is
needed can say so. Reading past the page cache, with several threads, takes half of the time of touching mapped pages.
"""

from contextlib import closing

import torch
from torch import nn

from ..checkpoints import MappedFile, forget_pages, mapped_file
from .experts import OffloadedExperts
from .memory import ALIGNMENT, BLOCK, LEAST_BYTES_OF_DIRECT, pages
from .pieces import Piece
from .reading import Reader, Reading
from .statistics import Counter


def own_other_weights(model: nn.Module, threads: int, direct: bool | None) -> None:
    """Give weights on the CPU that are maps of files memory of their own; experts that are offloaded stay.

    Args:
        model: with all of its weights.
        threads: that read.
        direct: whether files are read past the page cache; None: where the file system can.

    Raises:
        CheckpointError: a file cannot be read.
    """
    coming: list[tuple[torch.Tensor, torch.Tensor, Reading]] = []
    tensors = {
        id(tensor): tensor
        for module in model.modules()
        if not isinstance(module, OffloadedExperts)
        for tensor in [*module._parameters.values(), *module._buffers.values()]
        if tensor is not None
    }
    with closing(Reader(threads, direct)) as reader:
        for tensor in tensors.values():
            file = mapped_file(tensor.data)
            started = None if file is None else _start(reader, tensor.data, file)
            if started is not None:
                coming.append((tensor, *started))
            elif file is not None:
                _copy(tensor)
        for tensor, own, reading in coming:
            reading.result()
            tensor.data = own


def _start(reader: Reader, mapped: torch.Tensor, file: MappedFile) -> tuple[torch.Tensor, Reading] | None:
    """Begin to read a large tensor; what it will be, and what says when it is. None where it must be copied."""
    if mapped.nbytes < LEAST_BYTES_OF_DIRECT or not mapped.is_contiguous():
        return None
    if not reader.open_file(file.path, file.inode):
        return None
    # As far from the beginning of a block as in the file: blocks go straight to it, and products keep their last bits.
    around = file.begin % BLOCK
    size = -(-(around + mapped.nbytes) // BLOCK) * BLOCK
    blocks = torch.frombuffer(pages(size), dtype=torch.uint8, count=size)
    own = blocks[around : around + mapped.nbytes].view(mapped.dtype).view(mapped.shape)
    piece = Piece(file.path, file.begin, tuple(mapped.shape), mapped.dtype, 0, None, True)
    return own, reader.start([(piece, own, blocks)], "a weight", Counter())


def _copy(tensor: torch.Tensor) -> None:
    mapped = tensor.data
    # Of the same alignment: products may differ with it in their last bits.
    memory = torch.empty(mapped.nbytes + ALIGNMENT, dtype=torch.uint8)
    first = (mapped.data_ptr() - memory.data_ptr()) % ALIGNMENT
    if first % mapped.itemsize:
        tensor.data = mapped.clone()
    else:
        own = memory[first : first + mapped.nbytes].view(mapped.dtype)
        tensor.data = own.view(mapped.shape).copy_(mapped)
    forget_pages(mapped)
