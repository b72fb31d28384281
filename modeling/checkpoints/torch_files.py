"""Reads the headers of tensors in files of torch.save (.bin, .pth, .pt), without the tensors' data.

Since torch 1.6 such a file is a zip archive of uncompressed records: a pickle that describes the tensors, and for each
storage a record with its data. `torch.load(weights_only=True)` runs the pickle, but lets it call only known functions.
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
        the content as `torch.load` gives it, with a `TensorHeader` in place of each tensor in a dictionary.

    Raises:
        CheckpointError: the file is damaged, was not written by `torch.save`, or holds something that
            `torch.load(weights_only=True)` refuses.
        OSError: the file does not exist or is not accessible.
    """
    check_regular(path)
    try:
        _check_records(path)
        # Meta's checkpoints also hold byte streams, which torch refuses by default.
        with torch.serialization.safe_globals([io.BytesIO, bytes]):
            content = load_without_storage(path)
        return _with_headers(content)
    # For a damaged archive or pickle torch raises errors of many types.
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
            f"{path}: is damaged, or is no file of weights that torch.load(weights_only=True) reads ({reason}). "
            "Download it again. A file of torch before 1.6 has to be saved again by a newer one."
        ) from error


def _check_records(path: str | os.PathLike) -> None:
    """Check the archive's directory, the checksums of all records but tensor data, and the byte order.

    torch checks neither directory nor checksums.
    """
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            # Opening a record checks that it begins where the directory says, reading it checks its checksum.
            with archive.open(record) as file:
                content = b"" if "/data/" in record.filename else file.read()
            if record.filename.endswith("/byteorder") and content != b"little":
                raise CheckpointError(
                    f"{path}: was written on a big-endian machine. Load it and save it again on a little-endian one."
                )


def _with_headers(content: Any) -> Any:
    """Replace the tensors in nested dictionaries by `TensorHeader`s."""
    if isinstance(content, dict):
        return {name: _with_headers(value) for name, value in content.items()}
    if not isinstance(content, torch.Tensor):
        return content
    if content.is_conj() or content.is_neg():
        raise ValueError("it holds conjugate or negative views, whose stored numbers are not their values")
    # An empty storage has the offset None.
    begin: Any = content.untyped_storage()._checkpoint_offset or 0  # pyright: ignore[reportAttributeAccessIssue]
    begin += content.storage_offset() * content.dtype.itemsize
    strides = None if content.is_contiguous() else tuple(content.stride())
    return TensorHeader(DTYPE_NAMES[content.dtype], tuple(content.shape), begin, content.nbytes, strides)
