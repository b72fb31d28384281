"""The tensors of a checkpoint, and whether one has the shape and dtype that a model needs."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ...configuration.errors import CheckpointError
from .checkpoint_files import read_header
from .safetensors_files import DTYPE_NAMES, WEIGHT_DTYPES

OTHER_MODEL = "Weights and config.json do not belong together."


class Stored(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        origin: the file, or "state_dict".
        name: name in the origin.
        dtype: in safetensors' spelling.
        shape: as stored.
        content: the tensor, which may be mapped from the file; or its header.
    """

    origin: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Any

    def __str__(self) -> str:
        return f"{self.origin}: {self.name}"


def headers_of(files: Iterable[str]) -> list[Stored]:
    """Return the tensors of files, with headers as content."""
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
    """Check the shape and dtype of a checkpoint's tensor; `dtype` None accepts every dtype of plain weights.

    Raises:
        CheckpointError: the tensor has another shape or dtype.
    """
    if stored.shape != wanted:
        raise CheckpointError(
            f"{stored} has shape {list(stored.shape)}, but the model that config.json describes has {list(wanted)}. "
            + OTHER_MODEL
        )
    if dtype is None and stored.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(
            f"{stored} has dtype {stored.dtype}, which is not a dtype of plain weights "
            f"({', '.join(sorted(WEIGHT_DTYPES))}), and config.json has no quantization_config for it. Load the "
            "unquantized checkpoint."
        )
    if dtype is not None and stored.dtype != DTYPE_NAMES[dtype]:
        raise CheckpointError(
            f"{stored} has dtype {stored.dtype}, but the quantization_config in config.json means "
            f"{DTYPE_NAMES[dtype]}. {OTHER_MODEL}"
        )
