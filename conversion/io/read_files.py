"""Weight files as dictionaries of lazy tensors: safetensors, and the format of `torch.save` (.pth, .pt, .bin).

Opening reads only headers. A tensor's rows are mapped into memory while they are used.
"""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...configuration.errors import CheckpointError
from ...configuration.json_files import check_regular, reading
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


def open_weights(path: str | os.PathLike) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Open a safetensors file, or a file of `torch.save` with a dictionary of tensors; its content tells them apart.

    The dictionary may be nested in another one under "state_dict" or a similar key.

    Returns:
        name to tensor, and for the entries that are not tensors, name to type.

    Raises:
        CheckpointError: the file is missing or damaged, holds no dictionary of tensors or an unknown dtype, or would
            run code.
    """
    path = Path(path)
    with reading(path):
        check_regular(path)
        with open(path, "rb") as file:
            begin = file.read(9)
        is_safetensors = path.suffix == ".safetensors" or begin[8:] == b"{"
        content = read_header(path, "safetensors") if is_safetensors else _unnested(read_torch(path))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a dictionary of tensors.")
    tensors: dict[str, LazyTensor] = {}
    others: dict[str, str] = {}
    for name, value in content.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: a key is {name!r}; names of tensors were expected.")
        if not isinstance(value, TensorHeader):
            others[name] = type(value).__name__
        elif value.dtype not in DTYPES:
            raise CheckpointError(f"{path}: {name} has dtype {value.dtype}, which llamoe does not read.")
        else:
            tensors[name] = FileTensor(
                path, name, value.begin, DTYPES[value.dtype], value.shape, value.strides
            )
    return tensors, others


def _unnested(content: Any) -> Any:
    """Flatten: replace each nested dictionary of tensors (`_WRAPPERS`) by its entries."""
    while isinstance(content, dict):
        wrapper = next((name for name in _WRAPPERS if isinstance(content.get(name), dict)), None)
        if wrapper is None:
            break
        content = {name: value for name, value in content.items() if name != wrapper} | content[wrapper]
    return content


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
