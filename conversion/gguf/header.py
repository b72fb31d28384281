"""Read the header of a GGUF file or its parts: keys, and offsets of tensors.

The package gguf reads headers, too, but a vocabulary of 200 000 tokens in 16 seconds and a gigabyte.

Source: `docs/gguf.md` of ggml-org/ggml.
"""

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ...configuration.json_files import reading
from ..consolidated import Params
from ..io import FileTensor, LazyTensor
from .blocks import Blocks, library

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
# By the number of a value's type: those of numpy, strings and arrays.
_NUMBERS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


class Tensor(FileTensor):
    """A stored tensor: numbers of a plain type, or bytes of quantized blocks.

    Attributes:
        kind: its type, a member of gguf's `GGMLQuantizationType`.
        numbers: count of its elements.
    """

    def __init__(self, path: Path, name: str, offset: int, kind: Any, shape: list[int]):
        plain, numbers = _PLAIN.get(kind.name), math.prod(shape)
        if plain is None:
            size, nbytes = library(path).GGML_QUANT_SIZES[kind]
            if shape[-1] % size:
                raise CheckpointError(f"{path}: {name}: {shape[-1]} inputs are no blocks of {kind.name}.")
            shape = [*shape[:-1], shape[-1] // size * nbytes]
        super().__init__(path, name, offset, plain or torch.uint8, shape)
        self.kind, self.numbers = kind, numbers

    @property
    def dtype_name(self) -> str:
        """The type, such as "Q4_K"."""
        return self.kind.name

    @property
    def is_plain(self) -> bool:
        """Return True if the tensor is not quantized."""
        return self.kind.name in _PLAIN

    def read_as(self, dtype: torch.dtype) -> LazyTensor:
        """View the dequantized tensor."""
        return self.cast(dtype) if self.is_plain else Blocks(self, self.kind, dtype)


def read_header(path: Path) -> tuple[Params, dict[str, Tensor], list[Path]]:
    """Read the header of a file, and of the other parts of a split one.

    Returns:
        the keys; the tensors by name; and the files.

    Raises:
        CheckpointError: a file is no GGUF file or damaged, a part is missing, or a type of blocks is not known.
    """
    keys, tensors = _read_part(path)
    params, files = Params(keys, str(path)), [path]
    if (count := params.optional_integer("split.count") or 1) > 1:
        match = _PART.fullmatch(path.name)
        if match is None or int(match[3]) != count:
            params.reject(
                "split.count", f"a file whose name ends in -00001-of-{count:05}.gguf, for so many parts"
            )
        files = [
            path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)
        ]
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(f"{path}: split.count is {count}, and {listed(missing)} missing beside it.")
        parts = [_read_part(file) for file in files]
        # Only the first part has the model's keys.
        params = Params(parts[0][0], str(files[0]))
        tensors = {name: tensor for _, part in parts for name, tensor in part.items()}
        if params.optional_integer("split.tensors.count") not in (None, len(tensors)):
            params.reject("split.tensors.count", f"the number of its files' tensors, {len(tensors)}")
    gguf = library(path)
    for name, tensor in {tensor.kind: (name, tensor) for name, tensor in tensors.items()}.values():
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[tensor.kind][1]), np.uint8), tensor.kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{tensor.path}: {name} is of type {tensor.kind.name}, which gguf does not unpack."
            ) from error
    return params, tensors, files


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with reading(path), open(path, "rb") as file:
        size = file.seek(0, 2)
        content = _Content(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
        try:
            return content.read(path, size)
        # A damaged file has invalid sizes, types or text.
        except (ValueError, IndexError, struct.error) as error:
            after = f" after {content.last}" if content.last else ""
            raise CheckpointError(
                f"{path}: is no GGUF file, or cut short or damaged{after} ({error})."
            ) from error


class _Content:
    """The bytes of a file, read in their order.

    Attributes:
        last: the key or tensor that was read last.
    """

    def __init__(self, content: mmap.mmap | bytes):
        self._content, self._position, self.last = content, 0, ""

    def read(self, path: Path, size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if self._content[:4] != b"GGUF":
            raise ValueError("its first bytes are not GGUF")
        self._position = 4
        [version] = self._numbers("<u4")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        num_tensors, num_keys = self._numbers("<u8", 2)
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._text()
            keys[name] = self._value(*self._numbers("<u4"))
            self.last = name
        headers = {}
        for _ in range(num_tensors):
            name = self._text()
            [axes] = self._numbers("<u4")
            headers[name] = self._numbers("<u8", axes)[::-1], *self._numbers("<u4"), *self._numbers("<u8")
            self.last = name
        if len(headers) != num_tensors:
            raise ValueError("a tensor is there twice")
        alignment = keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment = {alignment!r}")
        begin = -(-self._position // alignment) * alignment
        types = library(path).GGMLQuantizationType
        tensors = {
            name: Tensor(path, name, begin + offset, types(kind), shape)
            for name, (shape, kind, offset) in headers.items()
        }
        for name, tensor in tensors.items():
            if tensor.offset + tensor.nbytes > size:
                raise CheckpointError(
                    f"{path}: has {size:,} bytes, and {name} ends at byte {tensor.offset + tensor.nbytes:,}: the file "
                    "is cut short."
                )
        return keys, tensors

    def _numbers(self, dtype: str, count: int = 1) -> list[Any]:
        numbers = np.frombuffer(self._content, dtype, count, self._position)
        self._position += numbers.nbytes
        return numbers.tolist()

    def _text(self) -> str:
        [length] = struct.unpack_from("<Q", self._content, self._position)
        begin = self._position + 8
        self._position = begin + length
        if self._position > len(self._content):
            raise ValueError(f"a text of {length} bytes")
        return self._content[begin : self._position].decode()

    def _value(self, kind: int) -> Any:
        if kind == _ARRAY:
            [kind], [count] = self._numbers("<u4"), self._numbers("<u8")
            if kind == _STRING:
                return [self._text() for _ in range(count)]
            return self._numbers(_NUMBERS[kind], count)
        if kind == _STRING:
            return self._text()
        [value] = self._numbers(_NUMBERS[kind])
        # The shortest decimal of the float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value
