"""Read the header of a GGUF file or its parts: keys, and offsets of tensors.

The package gguf takes 16 seconds and a gigabyte for a vocabulary of 200 000 tokens, and transformers reads no parts.

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
# By the number of a value's type: those of struct, strings and arrays.
_NUMBERS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")
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
    return params, tensors, files


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    types, last = library(path).GGMLQuantizationType, ""
    keys, tensors = {}, {}
    with reading(path), open(path, "rb") as file:
        size = file.seek(0, 2)
        try:
            content = _Content(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            magic, version, num_tensors, num_keys = content.numbers("4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"begins with {magic!r}, version {version}")
            for _ in range(num_keys):
                last = content.text()
                keys[last] = content.value(*content.numbers("I"))
            for _ in range(num_tensors):
                last = content.text()
                [axes] = content.numbers("I")
                *shape, kind, offset = content.numbers(f"{axes}QIQ")
                if last in tensors:
                    raise ValueError("it is there twice")
                tensors[last] = Tensor(path, last, offset, types(kind), shape[::-1])
            alignment = keys.get("general.alignment", 32)
            begin = -(-content.position // alignment) * alignment
        # A damaged file has invalid sizes, types or text.
        except (ValueError, IndexError, TypeError, ArithmeticError, struct.error) as error:
            after = f" after {last}" if last else ""
            raise CheckpointError(
                f"{path}: is no GGUF file, or cut short or damaged{after} ({error})."
            ) from error
    for name, tensor in tensors.items():
        tensor.offset += begin
        if (end := tensor.offset + tensor.nbytes) > size:
            raise CheckpointError(
                f"{path}: is cut short: it has {size:,} bytes, and {name} ends at byte {end:,}."
            )
    return keys, tensors


class _Content:
    """The bytes of a file, read in their order."""

    def __init__(self, content: mmap.mmap):
        self._content, self.position = content, 0

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        """Read numbers, whose types are letters of struct."""
        values = struct.unpack_from(f"<{kinds}", self._content, self.position)
        self.position += struct.calcsize(f"<{kinds}")
        return values

    def text(self) -> str:
        """Read a string."""
        [length] = self.numbers("Q")
        return self.numbers(f"{length}s")[0].decode()

    def value(self, kind: int) -> Any:
        """Read a value of a type."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.numbers("IQ")
            if kind == _STRING:
                return [self.text() for _ in range(count)]
            return [*self.numbers(f"{count}{_NUMBERS[kind]}")]
        [value] = self.numbers(_NUMBERS[kind])
        # The shortest decimal of the float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value
