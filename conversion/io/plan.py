"""The planned content of a target folder: weight files, small files, and a fingerprint of all of them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from huggingface_hub import split_state_dict_into_shards_factory

from ...configuration.json_files import to_json
from .lazy_tensor import LazyTensor


class Progress(Protocol):
    """An object of the caller's, whose methods are called while weights are written or read."""

    def start(self, total: int) -> None:
        """Take the total number of bytes to read or write."""

    def advance(self, nbytes: int, file: str) -> None:
        """Add the bytes that were just read or written, or that an earlier run has written to `file`."""


@dataclass
class Plan:
    """Everything that a target folder will hold.

    Attributes:
        files: weight files, name to tensors.
        before: small files that are written before the weights, name to content.
        last: small files that are written after the weights, in this order: with them the folder is a checkpoint.
        identity: source and options of the conversion, which must be the same when it is resumed.
    """

    files: dict[str, dict[str, LazyTensor]]
    before: dict[str, bytes] = field(default_factory=dict)
    last: dict[str, bytes] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Total bytes of all weights."""
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors.values())

    def fingerprint(self) -> str:
        """Compute a digest of all that the plan writes, and of its source and options."""
        layout = {
            file: {name: [str(tensor.dtype), tensor.shape] for name, tensor in tensors.items()}
            for file, tensors in self.files.items()
        }
        content = {
            name: hashlib.sha256(data).hexdigest() for name, data in {**self.before, **self.last}.items()
        }
        described = json.dumps([self.identity, layout, content], sort_keys=True, default=str)
        return hashlib.sha256(described.encode()).hexdigest()


def split_shards(
    tensors: Mapping[str, LazyTensor], shard_size: int
) -> tuple[dict[str, dict[str, LazyTensor]], dict[str, bytes]]:
    """Distribute tensors over safetensors files, named as transformers names them.

    A file does not exceed `shard_size` bytes; a larger tensor gets a file of its own.

    Returns:
        file name to tensors by name; and the index by its file name, empty if there is only one file.
    """
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_size,
    )
    files = {name: {key: tensors[key] for key in keys} for name, keys in split.filename_to_tensors.items()}
    parameters = {"total_parameters": sum(tensor.numel for tensor in tensors.values())}
    index = {"metadata": parameters | split.metadata, "weight_map": split.tensor_to_filename}
    return files, {"model.safetensors.index.json": to_json(index)} if split.is_sharded else {}
