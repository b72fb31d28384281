"""The weights beside offloaded experts: read into memory of their own, out of the files that they are maps of.

A file that is cut would end the process, and one that is rewritten would change the model, before an expert that is
needed can say so. Several threads read past the page cache, which costs less than touching mapped pages, and leaves the
cache to others.
"""

from contextlib import closing

import torch
from torch import nn

from ..checkpoints import MappedFiles, forget_pages
from .experts import OffloadedExperts
from .memory import ALIGNMENT, BLOCK, LEAST_BYTES_OF_DIRECT, pages
from .pieces import Piece
from .reading import Reader


def own_other_weights(model: nn.Module, threads: int, direct: bool | None) -> None:
    """Read weights on the CPU that are maps of files into memory of their own; offloaded experts are left alone.

    Args:
        model: with all of its weights.
        threads: that read.
        direct: whether files are read past the page cache; None: where the file system can.

    Raises:
        CheckpointError: a file cannot be read.
    """
    tensors = {
        id(tensor): tensor
        for module in model.modules()
        if not isinstance(module, OffloadedExperts)
        for tensor in [*module._parameters.values(), *module._buffers.values()]
        if tensor is not None
    }
    maps = MappedFiles()
    large: list[tuple[torch.Tensor, Piece, torch.Tensor]] = []
    with closing(Reader(threads, direct)) as reader:
        for tensor in tensors.values():
            mapped = tensor.data
            file = maps.file_of(mapped)
            if file is None:
                continue
            is_large = mapped.nbytes >= LEAST_BYTES_OF_DIRECT and mapped.is_contiguous()
            if is_large and reader.open_file(file.path, file.inode):
                piece = Piece(file.path, file.begin, tuple(mapped.shape), mapped.dtype, 0, None, True)
                large.append((tensor, piece, _blocks_around(piece)))
            else:
                _copy(tensor)
                forget_pages(mapped, maps)
        # When all memory is there: threads that write to new pages hold up whoever asks for more.
        readings = []
        for tensor, piece, blocks in large:
            around = piece.begin % BLOCK
            own = blocks[around : around + piece.nbytes].view(piece.dtype).view(piece.shape)
            readings.append(
                (tensor, own, reader.start([(piece, own, blocks)], "a weight", lambda count: None))
            )
        for tensor, own, reading in readings:
            reading.result()
            tensor.data = own


def _blocks_around(piece: Piece) -> torch.Tensor:
    """Memory for the whole blocks of the file that hold a piece: products keep their last bits where it lies so."""
    size = -(-(piece.begin % BLOCK + piece.nbytes) // BLOCK) * BLOCK
    return torch.frombuffer(pages(size), dtype=torch.uint8, count=size)


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
