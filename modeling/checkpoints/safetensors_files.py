"""Reads the headers of safetensors files, and refuses names that occur twice.

A safetensors file (https://github.com/huggingface/safetensors) begins with the length of its header: 8 bytes, little
endian. The header follows, a JSON object from each tensor's name to its dtype, shape and byte offsets; then come the
bytes of all tensors, without gaps.
"""

import json
import os
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ...configuration.errors import CheckpointError
from ...configuration.json_files import check_regular, without_duplicates

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "C128": torch.complex128, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""torch's dtypes by safetensors' names. C128 is llamoe's own: torch.save can store complex128, safetensors cannot."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHT_DTYPES = {"F16", "BF16", "F32", "F64"}
"""Names of the dtypes in which weights that are not packed may be stored."""


class TensorHeader(NamedTuple):
    """A file's description of one tensor.

    Attributes:
        dtype: in safetensors' spelling: "F32", "BF16", "BOOL", …
        shape: sizes of the axes.
        begin: offset of the first element in the file, in bytes.
        nbytes: size of all elements, in bytes.
        strides: as `torch.Tensor.stride()`, in elements; None if the elements lie in the file in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    strides: tuple[int, ...] | None = None


def read_safetensors(path: str | os.PathLike) -> dict[str, TensorHeader]:
    """Read the header of a safetensors file: tensor name to `TensorHeader`, in the order of the file.

    Raises:
        CheckpointError: the file is too short or too long for its header, the header contradicts itself or has a name
            twice, or there is no memory to map the file.
        OSError: the file does not exist or is not accessible.
    """
    check_regular(path)
    try:
        # safetensors checks the header here. For torch in place of NumPy it would reserve memory for the whole file.
        with safe_open(path, framework="np"):
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # Of two tensors with one name safetensors keeps the last, without an error.
            content = json.loads(file.read(length), object_pairs_hook=without_duplicates)
    except (SafetensorError, OSError, MemoryError, ValueError) as error:
        raise CheckpointError(
            f"{path}: is damaged or cut short, or there is no memory to map it ({str(error)[:300]}). Download or copy "
            "it again; if memory is the reason, raise the limit of `ulimit -v`."
        ) from error
    content.pop("__metadata__", None)
    return {
        name: TensorHeader(entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
        for name, entry in content.items()
        for begin, end in [entry["data_offsets"]]
    }
