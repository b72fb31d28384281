"""The options that all commands share which write a folder."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...configuration.sizes import bytes_of
from .lazy_tensor import LazyTensor, dtype_name
from .plan import Progress

_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class WriteOptions:
    """How a folder is written.

    Attributes:
        layout: of Hugging Face's config.json: "stock" has transformers' own model type, which llamoe, transformers,
            vLLM and others read; "llamoe" ours, with llamoe_hub.py; None takes stock where it can express the model.
        dtype: "float32", "float16" or "bfloat16" for all floating tensors; None keeps the dtype of each.
        shard_size: bytes that a file should not exceed, as a number or a text such as "5GB".
        resume: continue a folder that an earlier run left unfinished.
        dry_run: check and plan everything, write nothing.
        progress: an object with `start(total_bytes)` and `advance(nbytes, file)`, called for every block.

    Raises:
        ValueError: layout, dtype or shard_size has another value.
    """

    layout: str | None = None
    dtype: str | torch.dtype | None = None
    shard_size: int | str = "5GB"
    resume: bool = False
    dry_run: bool = False
    progress: Progress | None = None

    def __post_init__(self):
        if self.layout not in ("stock", "llamoe", None):
            raise ValueError(
                f"layout = {self.layout!r}: valid are 'stock' and 'llamoe', or none for the first that fits."
            )
        if self.dtype is not None and self.cast_to is None:
            raise ValueError(
                f"dtype = {str(self.dtype).removeprefix('torch.')!r}: valid are float32, float16 and bfloat16, or none "
                "to keep the source's."
            )
        bytes_of("shard_size", self.shard_size, 1)

    @property
    def cast_to(self) -> torch.dtype | None:
        """The dtype of all floating tensors; None for the dtype of each."""
        return _DTYPES.get(str(self.dtype).removeprefix("torch."))

    def cast(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Cast the tensors to the dtype of the options."""
        return {name: tensor.cast(self.cast_to or tensor.dtype) for name, tensor in tensors.items()}


DEFAULTS = WriteOptions()
