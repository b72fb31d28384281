"""Reading of safetensors headers, with checks, also for duplicate keys.

The format: 8 bytes, little endian, the length of a JSON header; the header, name to dtype, shape and byte offsets;
then the bytes of all tensors without gaps (https://github.com/huggingface/safetensors).
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
"""torch's dtype for each name that safetensors has for one; C128 is torch.save's alone."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHT_DTYPES = {"F16", "BF16", "F32", "F64"}
"""Names of the dtypes that plain weights have."""


class TensorHeader(NamedTuple):
    """A file's description of one tensor.

    Attributes:
        dtype: in safetensors' spelling: "F32", "BF16", "BOOL", …
        shape: as a tuple.
        begin: byte of the file at which the first element stands.
        nbytes: of its elements.
        strides: in elements; None for contiguous tensors, the last axis fastest.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    strides: tuple[int, ...] | None = None


def read_safetensors(path: str | os.PathLike) -> dict[str, TensorHeader]:
    """Read and check the header of one safetensors file: tensor name to header, in the file's order.

    Raises:
        CheckpointError: the file is cut short or too long, or its header contradicts itself or has a name twice.
        OSError: it cannot be read.
    """
    size = check_regular(path).st_size
    try:
        # Open it for NumPy: for torch the library would reserve memory for the whole file, which may be refused.
        with safe_open(path, framework="np"):
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # The library takes the last of two tensors of one name.
            content = json.loads(file.read(length), object_pairs_hook=without_duplicates)
    except (SafetensorError, OSError, MemoryError, ValueError) as error:
        if "Cannot allocate memory" in str(error):
            raise CheckpointError(
                f"{path}: its {size} bytes cannot be mapped, since this process may not take so many addresses "
                "(`ulimit -v`). Raise that limit."
            ) from error
        raise CheckpointError(
            f"{path}: is damaged or cut short ({str(error)[:300]}). Download or copy it again."
        ) from error
    content.pop("__metadata__", None)
    return {
        name: TensorHeader(entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
        for name, entry in content.items()
        for begin, end in [entry["data_offsets"]]
    }
