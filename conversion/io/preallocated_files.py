"""Weight files that are created in full size and then filled: safetensors, and the format of `torch.save`."""

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...modeling._private_api import save_without_storage
from ...modeling.checkpoints import DTYPE_NAMES, read_header
from .lazy_tensor import LazyTensor


class Output:
    """A weight file of full size, in which each tensor is filled from its beginning to its end.

    Attributes:
        path: the file's temporary name.
        offsets: first byte of each tensor in the file.
        written: number of bytes of each tensor that are filled.
    """

    def __init__(self, path: Path, offsets: Mapping[str, int], size: int, mode: str):
        self.path, self.offsets = path, offsets
        self.written = dict.fromkeys(offsets, 0)
        self.file: Any = open(path, mode, buffering=0)
        self.file.truncate(size)

    def append(self, key: str, block: torch.Tensor) -> None:
        """Write the next block of a tensor."""
        data = memoryview(block.reshape(-1).view(torch.uint8).numpy())
        self.file.seek(self.offsets[key] + self.written[key])
        done = 0
        while done < len(data):
            done += self.file.write(data[done:])
        self.written[key] += len(data)

    def finish(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class SafetensorsOutput(Output):
    """A safetensors file."""

    def __init__(self, path: Path, tensors: Mapping[str, LazyTensor]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        # Wide dtypes first, as the safetensors library does: then each tensor starts at a multiple of its item size.
        for key in sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize):
            tensor = tensors[key]
            header[key] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, position + tensor.nbytes],
            }
            position += tensor.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        offsets = {key: begin + header[key]["data_offsets"][0] for key in tensors}
        super().__init__(path, offsets, begin + position, "w+b")
        self.file.write(len(text).to_bytes(8, "little") + text)


class TorchOutput(Output):
    """A file of `torch.save`: torch writes the archive without elements, which are then filled in with checksums."""

    def __init__(self, path: Path, tensors: Mapping[str, LazyTensor]):
        empty = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for key, tensor in tensors.items()
        }
        save_without_storage(empty, path)
        placed = read_header(path, "bin")
        offsets = {key: placed[key].begin if tensor.numel else 0 for key, tensor in tensors.items()}
        super().__init__(path, offsets, path.stat().st_size, "r+b")
        self.sums = dict.fromkeys(offsets, 0)

    def append(self, key: str, block: torch.Tensor) -> None:
        """Write the next block of a tensor and add it to the tensor's CRC-32."""
        super().append(key, block)
        self.sums[key] = zlib.crc32(memoryview(block.reshape(-1).view(torch.uint8).numpy()), self.sums[key])

    def finish(self) -> None:
        """Write the CRC-32 of each tensor into the archive, and flush the file."""
        by_offset = {offset: self.sums[key] for key, offset in self.offsets.items() if offset}
        _set_checksums(self.path, self.file, by_offset)
        super().finish()


def _set_checksums(path: Path, file: Any, by_offset: Mapping[int, int]) -> None:
    """Write CRC-32 sums into a zip archive, by the offset at which the content of each record begins.

    A record's sum stands in the archive's directory, and in a descriptor behind the record's content
    (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.9 and 4.3.12).
    """
    with zipfile.ZipFile(path) as archive:
        position, records = archive.start_dir, archive.infolist()
    for info in records:
        file.seek(position)
        entry = file.read(46)
        assert entry[:4] == b"PK\x01\x02", (path, info.filename)
        lengths = [int.from_bytes(entry[i : i + 2], "little") for i in (28, 30, 32)]
        file.seek(info.header_offset)
        local = file.read(30)
        begin = info.header_offset + 30 + sum(int.from_bytes(local[i : i + 2], "little") for i in (26, 28))
        if begin in by_offset and info.file_size:
            value = by_offset[begin].to_bytes(4, "little")
            file.seek(position + 16)
            file.write(value)
            file.seek(begin + info.file_size)
            if file.read(4) == b"PK\x07\x08":
                file.seek(begin + info.file_size + 4)
                file.write(value)
        position += 46 + sum(lengths)
