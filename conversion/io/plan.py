"""What a target folder will hold: tensors distributed over files, small files, and a fingerprint of it all."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...configuration.json_files import to_json
from .lazy_tensor import LazyTensor


class Progress(Protocol):
    """Receives the progress of writing, or of reading."""

    def start(self, total: int) -> None:
        """Begin; `total` is the number of bytes to read, or to write."""

    def advance(self, nbytes: int, file: str) -> None:
        """Count bytes that were read, written to a file, or were already there."""


@dataclass
class Plan:
    """Everything that a target folder will hold.

    Attributes:
        files: weight files, name to tensors.
        before: small files that are written first, name to content.
        last: small files that make the folder a checkpoint, in order.
        identity: source and options of the conversion; a resumed run must have the same.
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
        """Compute a digest of the plan: what is written, and from what."""
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

    A file does not exceed `shard_size` bytes; a larger tensor gets a file of its own. Returned are the files, and the
    index if there are several.
    """
    shards: list[dict[str, LazyTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}, {}
    count = len(shards)
    files = {f"model-{i:05d}-of-{count:05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}
    index = {
        "metadata": {
            "total_parameters": sum(tensor.numel for tensor in tensors.values()),
            "total_size": sum(tensor.nbytes for tensor in tensors.values()),
        },
        "weight_map": {key: name for name, shard in files.items() for key in sorted(shard)},
    }
    return files, {"model.safetensors.index.json": to_json(index)}
