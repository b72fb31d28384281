"""Weight files as dictionaries of lazy tensors: safetensors, and the format of `torch.save` (.pth, .pt, .bin).

Opening reads only headers. A tensor's rows are mapped into memory while they are used.
"""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch

from ...configuration.errors import CheckpointError
from ...configuration.json_files import LARGE, check_regular, reading
from ...modeling.checkpoints import DTYPES, TensorHeader, read_header, read_torch
from .lazy_tensor import LazyTensor

# Keys under which training code stores the dictionary of tensors in a torch file.
_WRAPPERS = ("state_dict", "model", "model_state_dict", "module")


class FileTensor(LazyTensor):
    """A tensor at an offset of a file, with any strides."""

    def __init__(self, path: Path, name: str, offset: int, dtype: torch.dtype, shape, strides=None):
        super().__init__(shape, dtype, f"{path}: {name}")
        self.path, self.offset = path, offset
        # None means row-major.
        self.strides = None if strides is None or tuple(strides) == _row_major(self.shape) else tuple(strides)

    def _read(self, start, stop):
        shape = self._piece_shape(start, stop)
        count = prod(shape)
        if self.strides is None or not count:
            return self._bytes(start * prod(self.shape[1:]), count).view(shape)
        # Map everything between the first and the last element of the rows, and view it with the strides.
        span = 1 + sum((size - 1) * step for size, step in zip(shape, self.strides, strict=True))
        return self._bytes(start * self.strides[0], span).as_strided(shape, self.strides)

    def _bytes(self, first: int, count: int) -> torch.Tensor:
        if not count:
            return torch.empty(0, dtype=self.dtype)
        size = self.dtype.itemsize
        # numpy raises a ValueError for a file that has become shorter.
        with reading(self.origin, ValueError):
            mapped = np.memmap(
                self.path, np.uint8, "c", offset=self.offset + first * size, shape=count * size
            )
        return torch.from_numpy(mapped).view(self.dtype)


def open_safetensors(path: str | os.PathLike) -> dict[str, LazyTensor]:
    """Open a safetensors file: name to tensor, in the header's order.

    Raises:
        CheckpointError: the file is missing or damaged, or has a dtype that torch lacks.
    """
    path = Path(path)
    return {name: _in_file(path, name, header) for name, header in read_header(path, "safetensors").items()}


def open_pickle(path: str | os.PathLike) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Open a file of `torch.save`: a dictionary of tensors, or one nested under "state_dict" or a similar key.

    Returns:
        name to tensor, and for the entries that are not tensors, name to type.

    Raises:
        CheckpointError: the file is missing or damaged, holds no such dictionary, or would run code.
    """
    path = Path(path)
    with reading(path):
        content = read_torch(path)
    others: dict[str, str] = {}
    while isinstance(content, dict) and (
        wrapper := next((name for name in _WRAPPERS if isinstance(content.get(name), dict)), None)
    ):
        beside = {str(name): value for name, value in content.items() if name != wrapper}
        if tensors := [name for name, value in beside.items() if isinstance(value, TensorHeader)]:
            raise CheckpointError(
                f"{path}: has the tensor {tensors[0]} beside {wrapper!r}; only one of the two was expected."
            )
        others |= {name: _kind(value) for name, value in beside.items()}
        content = content[wrapper]
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {_kind(content)}, not a dictionary of tensors.")
    tensors: dict[str, LazyTensor] = {}
    for name, value in content.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: a key is {name!r}; names of tensors were expected.")
        if isinstance(value, TensorHeader):
            tensors[name] = _in_file(path, name, value)
        else:
            others[name] = _kind(value)
    return tensors, others


def _kind(value: object) -> str:
    return type(value).__name__


def _in_file(path: Path, name: str, header: TensorHeader) -> LazyTensor:
    if header.dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {header.dtype}, which llamoe does not read.")
    return FileTensor(path, name, header.begin, DTYPES[header.dtype], header.shape, header.strides)


def open_weights(path: str | os.PathLike) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Open a safetensors or torch file, which its content tells apart; see `open_safetensors` and `open_pickle`."""
    path = Path(path)
    with reading(path):
        check_regular(path)
        with open(path, "rb") as file:
            begin = file.read(9)
    if path.suffix == ".safetensors" or begin[8:] == b"{":
        return open_safetensors(path), {}
    return open_pickle(path)


def read_bytes(path: Path) -> bytes:
    """Read a small file of a source.

    Raises:
        CheckpointError: it is too large for such a file.
    """
    if check_regular(path).st_size > LARGE:
        raise CheckpointError(f"{path}: has more than {LARGE} bytes, where a small file was expected.")
    return path.read_bytes()


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
