"""The tensors of a checkpoint, and checks of their shapes and dtypes."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ...configuration.errors import CheckpointError
from .checkpoint_files import read_header
from .safetensors_files import DTYPE_NAMES, DTYPES, WEIGHT_DTYPES


class Stored(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        origin: path of the file, or "state_dict" for a tensor in memory.
        name: name in the file or state dict.
        dtype: in safetensors' spelling, such as "BF16".
        shape: as stored.
        content: the tensor if it is in memory; its `TensorHeader` if it is in a file.
    """

    origin: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Any

    def __str__(self) -> str:
        return f"{self.origin}: {self.name}"


def headers_of(files: Iterable[str]) -> list[Stored]:
    """Return the tensors of files, without reading their data."""
    return [
        Stored(str(file), name, header.dtype, header.shape, header)
        for file in files
        for name, header in read_header(file).items()
    ]


def tensors_of(state_dict: Mapping[str, Any]) -> list[Stored]:
    """Return the tensors of a state dict."""
    return [
        Stored(
            "state_dict", name, DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), tensor
        )
        for name, tensor in state_dict.items()
        if isinstance(tensor, torch.Tensor)
    ]


def check_tensor(stored: Stored, wanted: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """Raise a `CheckpointError` if a checkpoint's tensor has another shape, or a dtype that `check_dtype` refuses."""
    if stored.shape != wanted:
        raise CheckpointError(
            f"{stored} has shape {list(stored.shape)}, but the model that config.json describes has {list(wanted)}. "
            "Weights and config.json do not belong together."
        )
    check_dtype(stored, dtype)


def check_dtype(stored: Stored, wanted: torch.dtype | None) -> None:
    """Raise a `CheckpointError` if a tensor has another dtype; `wanted` None accepts every dtype of plain weights."""
    is_right = stored.dtype in WEIGHT_DTYPES if wanted is None else DTYPES.get(stored.dtype) == wanted
    if not is_right:
        raise CheckpointError(
            f"{stored} has dtype {stored.dtype}, where the model needs {wanted or ', '.join(sorted(WEIGHT_DTYPES))}. "
            "Weights and quantization_config in config.json do not belong together."
        )
