"""Read the header of a GGUF file, or of each part of a split one: keys, and types, sizes and offsets of tensors.

The reader of the package gguf takes 18 seconds and a gigabyte for a vocabulary of 200,000 tokens, this one half a
second. transformers' reader refuses types that it does not dequantize, such as Q5_0.

Source: `docs/gguf.md` of ggml-org/ggml.
"""

import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import GGMLQuantizationType

from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ...configuration.json_files import reading
from ..io import FileTensor
from .blocks import PLAIN, SIZES

_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# The module struct's letter for each type of value, by the type's number; strings and arrays have none.
_NUMBERS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


class Tensor(FileTensor):
    """A tensor as it is stored: numbers of a plain type, or the bytes of blocks, `[..., bytes of a row]` uint8.

    Attributes:
        kind: the name of its type, such as "Q4_K".
        sizes: the shape of the dequantized tensor.
    """

    def __init__(self, path: Path, name: str, offset: int, kind: str, sizes: list[int]):
        self.kind, self.sizes = kind, sizes
        if kind not in PLAIN:
            numbers, nbytes = SIZES[kind]
            sizes = [*sizes[:-1], sizes[-1] // numbers * nbytes]
        super().__init__(path, name, offset, PLAIN.get(kind, torch.uint8), sizes)

    @property
    def dtype_name(self) -> str:
        """The tensor's type, such as "Q4_K"."""
        return self.kind


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], list[Path]]:
    """Read the header of a file; if it is one part of a split file, the headers of all parts.

    Returns:
        the keys; the tensors by name; and the files, all parts of a split one.

    Raises:
        CheckpointError: a part is missing; or a file is not GGUF, or is damaged.
    """
    keys, tensors = _read_part(path)
    count = keys.get("split.count", 1)
    if count < 2:
        return keys, tensors, [path]
    stem = _PART.sub("", path.name)
    files = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{path}: split.count is {count}, and {listed(missing)} missing beside it.")
    parts = [_read_part(file) for file in files]
    # Only the first part has the model's keys.
    return parts[0][0], {name: tensor for _, part in parts for name, tensor in part.items()}, files


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    keys, tensors = {}, {}
    with reading(path), open(path, "rb") as file:
        try:
            magic, version, num_tensors, num_keys = _numbers(file, "4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"begins with {magic!r}, version {version}")
            for _ in range(num_keys):
                name = _text(file)
                keys[name] = _value(file, *_numbers(file, "I"))
            for _ in range(num_tensors):
                name = _text(file)
                *sizes, kind, offset = _numbers(file, f"{_numbers(file, 'I')[0]}QIQ")
                tensors[name] = Tensor(path, name, offset, GGMLQuantizationType(kind).name, sizes[::-1])
            alignment = keys.get("general.alignment", 32)
            begin = -(-file.tell() // alignment) * alignment
        # Sizes, types and text of a damaged file raise errors of many classes.
        except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError, struct.error) as error:
            raise CheckpointError(f"{path}: is no GGUF file, or cut short or damaged ({error}).") from error
        size = file.seek(0, 2)
    for name, tensor in tensors.items():
        tensor.offset += begin
        if (end := tensor.offset + tensor.nbytes) > size:
            raise CheckpointError(
                f"{path}: is cut short: it has {size:,} bytes, and {name} ends at byte {end:,}."
            )
    return keys, tensors


def _numbers(file: BinaryIO, kinds: str) -> tuple[Any, ...]:
    """Read one number for each letter of `kinds`, which are types of the module struct."""
    return struct.unpack(f"<{kinds}", file.read(struct.calcsize(f"<{kinds}")))


def _text(file: BinaryIO) -> str:
    return file.read(*_numbers(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        kind, count = _numbers(file, "IQ")
        is_text = kind == _STRING
        return (
            [_text(file) for _ in range(count)] if is_text else [*_numbers(file, f"{count}{_NUMBERS[kind]}")]
        )
    [value] = _numbers(file, _NUMBERS[kind])
    # The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06.
    return float(str(np.float32(value))) if kind == _FLOAT32 else value
