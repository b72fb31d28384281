"""Reading of tensor headers in files of torch.save (.bin, .pth, .pt), without the tensors' data.

Since 1.6 torch writes a zip archive of uncompressed records: a pickle that describes the tensors, and a record for the
data of each storage. torch's `weights_only` runs the pickle without calling unknown functions.
"""

import io
import os
import pickle
import zipfile
from typing import Any

import torch

from ...configuration.errors import CheckpointError
from ...configuration.json_files import check_regular
from .._private_api import load_without_storage
from .safetensors_files import DTYPE_NAMES, TensorHeader


def read_torch(path: str | os.PathLike) -> Any:
    """Read a file of `torch.save`, without its tensors' data.

    Returns:
        the content as torch loads it, with `TensorHeader`s in place of tensors in dictionaries.

    Raises:
        CheckpointError: the file is damaged, is no such file, or holds what `torch.load(weights_only=True)` refuses.
        OSError: it cannot be read.
    """
    check_regular(path)
    try:
        _check_records(path)
        # Meta's files have byte streams beside the weights.
        with torch.serialization.safe_globals([io.BytesIO, bytes]):
            content = load_without_storage(path)
        return _with_headers(content)
    # Damaged archives and pickles make torch raise errors of many types.
    except (
        zipfile.BadZipFile,
        RuntimeError,
        pickle.PickleError,
        LookupError,
        ValueError,
        TypeError,
    ) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = str(error).strip().partition("\n")[0][:300]
        raise CheckpointError(
            f"{path}: is no file of weights that torch.load(weights_only=True) reads, or damaged ({reason}). A file of "
            "torch before 1.6 has to be saved again."
        ) from error


def _check_records(path: str | os.PathLike) -> None:
    """Check that each record is at its place in the archive's directory, and the checksums of records without data."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            with archive.open(record) as file:
                is_order = record.filename.endswith("/byteorder")
                if "/data/" not in record.filename and file.read() != b"little" and is_order:
                    raise CheckpointError(
                        f"{path}: was written on a big-endian machine; save it again on a usual one."
                    )


def _with_headers(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _with_headers(value) for name, value in content.items()}
    if not isinstance(content, torch.Tensor):
        return content
    if content.is_conj() or content.is_neg():
        raise ValueError("it holds conjugate or negative views")
    dtype, size = content.dtype, content.dtype.itemsize
    begin: Any = content.untyped_storage()._checkpoint_offset  # pyright: ignore[reportAttributeAccessIssue]
    begin = (begin or 0) + content.storage_offset() * size
    shape, strides = tuple(content.shape), tuple(content.stride())
    is_plain = content.is_contiguous()
    nbytes = content.numel() * size
    return TensorHeader(DTYPE_NAMES[dtype], shape, begin, nbytes, None if is_plain else strides)
