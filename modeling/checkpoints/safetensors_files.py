"""Content of a safetensors file, read from its header and checked before a tensor is read.

The format: 8 bytes, little endian, the length of a JSON header; the header, name to dtype, shape and byte offsets;
then the bytes of all tensors without gaps (https://github.com/huggingface/safetensors).
"""

import json
import os
import reprlib
from math import prod
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from ...configuration.errors import CheckpointError
from ...configuration.json_files import check_regular, without_duplicates

# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000
# A larger header is checked before it is parsed, since parsing can take sixty times its size.
_LARGE_HEADER_BYTES = 10_000_000
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
# Limits of axes, and of indices along one. Without them, the product of a shape could take hours.
MOST_AXES, MOST_INDICES = 64, 1 << 62


class TensorHeader(NamedTuple):
    """A file's description of one tensor.

    Attributes:
        dtype: in safetensors' spelling: "F32", "BF16", "BOOL", …
        shape: as a tuple.
        begin: byte of the file at which the first element stands.
        strides: in elements; None for contiguous tensors, the last axis fastest.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    strides: tuple[int, ...] | None = None


def read_safetensors(path: str | os.PathLike) -> dict[str, TensorHeader]:
    """Checked header of one safetensors file: tensor name to header, in the file's order.

    Raises:
        CheckpointError: the file is cut short, or its header contradicts itself or the file's size.
        OSError: it cannot be read.
    """
    size = check_regular(path).st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        is_possible = len(prefix) == 8 and length <= min(size - 8, _MAX_HEADER_BYTES)
        header = file.read(length) if is_possible else b""
    if not is_possible:
        raise CheckpointError(
            f"{path}: the header should be {length} bytes long, but the file has {size} bytes in all; it is "
            "cut short or no safetensors file. Download or copy it again."
        )
    if length > _LARGE_HEADER_BYTES:
        # Each entry is one object with two lists; few files have anything else in so large a header.
        entries = header.count(b'"data_offsets"')
        limits = {b"{": entries + 2, b"[": 2 * entries, b",": (MOST_AXES + 4) * entries}
        if any(header.count(sign) > most for sign, most in limits.items()):
            raise CheckpointError(
                f"{path}: its header of {length} bytes does not describe {entries} tensors."
            )
    entries = _parse(path, header)
    spans = sorted(_check_entry(path, name, entry) for name, entry in entries.items())
    position = 0
    for begin, end, name in spans:
        if begin != position:
            raise CheckpointError(
                f"{path}: tensor {name[:200]!r} begins at byte {begin} of the data where {position} was expected: the "
                "offsets overlap or leave a gap. Download or copy it again."
            )
        position = end
    data = 8 + length
    if data + position != size:
        raise CheckpointError(
            f"{path}: its tensors need {data + position} bytes, but the file has {size}; it is "
            f"{'cut short' if size < data + position else 'too long'}. Download or copy it again."
        )
    _ask_the_library(path)
    return {
        name: TensorHeader(entry["dtype"], tuple(entry["shape"]), data + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def _ask_the_library(path: str | os.PathLike) -> None:
    """Let the library that will read the file check it too.

    Opened for torch it would reserve memory for the whole file, which a machine with less memory refuses.
    """
    try:
        with safe_open(path, framework="np"):
            pass
    except MemoryError:
        # Mapping the whole file needs more memory than this process has; reading parts of it does not.
        return
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}. Download or copy it again.") from error


def _parse(path: str | os.PathLike, header: bytes) -> dict[str, dict]:
    try:
        raw = json.loads(header)
        # Slow, so only done where the first parsing may have dropped a duplicate entry.
        if isinstance(raw, dict) and header.count(b'"data_offsets"') > len(raw) - ("__metadata__" in raw):
            json.loads(header, object_pairs_hook=without_duplicates)
    # Not UTF-8, not JSON, or numbers or nesting without end.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the header is not JSON ({str(error)[:200]}). Download or copy it again."
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: the header should be a JSON object, not {type(raw).__name__}.")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{path}: __metadata__ in the header should map strings to strings: {reprlib.repr(metadata)}."
        )
    return raw


def _check_entry(path: str | os.PathLike, name: str, entry: object) -> tuple[int, int, str]:
    """Begin, end and name of a tensor; a checkpoint has thousands, so this is written to be quick."""
    try:
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        bits = DTYPE_BITS[entry["dtype"]]
        is_readable = (
            type(shape) is list
            and type(entry["data_offsets"]) is list
            and type(begin) is type(end) is int
            and {*map(type, shape)} <= {int}
            and min(shape, default=0) >= 0
            and max(shape, default=0) <= MOST_INDICES
            and len(shape) <= MOST_AXES
        )
    except (KeyError, TypeError, ValueError):
        is_readable = False
    if not is_readable:
        raise CheckpointError(
            f"{path}: the header's entry for {name[:200]!r} cannot be read: {reprlib.repr(entry)}."
        )
    needed = -(-prod(shape) * bits // 8)
    if end - begin != needed:
        raise CheckpointError(
            f"{path}: tensor {name[:200]!r} of shape {shape} and dtype {entry['dtype']} has {end - begin} bytes in the "
            f"header where {needed} are needed."
        )
    return begin, end, name
