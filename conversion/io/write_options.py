"""The options of all commands that write a folder."""

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
        layout: which config.json a Hugging Face folder gets. "stock": with transformers' own model type, which llamoe,
            transformers, vLLM and others read. "llamoe": with llamoe's model type, and llamoe_hub.py beside it. None:
            stock if it can express the model, else llamoe.
        dtype: "float32", "float16" or "bfloat16" for all floating-point tensors; None keeps the dtype of each.
        shard_size: limit of a weight file in bytes, or a text such as "5GB"; a larger tensor gets its own file.
        resume: continue a folder that an earlier run left unfinished.
        dry_run: check and plan everything, write nothing.
        progress: an object with the methods `start(total_bytes)` and `advance(nbytes, file)`; `advance` is called for
            every block that is written.

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
                f"layout = {self.layout!r}: valid are 'stock', 'llamoe' and None (stock if it can express the model)."
            )
        if self.dtype is not None and self.cast_to is None:
            raise ValueError(
                f"dtype = {str(self.dtype).removeprefix('torch.')!r}: valid are float32, float16, bfloat16 and None "
                "(the source's)."
            )
        bytes_of("shard_size", self.shard_size, 1)

    @property
    def cast_to(self) -> torch.dtype | None:
        """The dtype for all floating-point tensors; None keeps the dtype of each."""
        return _DTYPES.get(str(self.dtype).removeprefix("torch."))

    def cast(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """View the floating-point tensors in the dtype of the options."""
        return {name: tensor.cast(self.cast_to or tensor.dtype) for name, tensor in tensors.items()}


DEFAULTS = WriteOptions()
