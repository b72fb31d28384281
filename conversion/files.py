"""Weight files as dictionaries of lazy tensors: safetensors, and what `torch.save` writes (.pth, .pt, .bin).

Opening reads headers only. Tensors are read from the file at their offsets, never through a memory map: what was read
does not stay in memory, and a file that shrinks meanwhile gives an error instead of ending the process. A torch file is
unpickled with `weights_only=True`, without its numbers: torch gives tensors that know where theirs stand
(https://docs.pytorch.org/docs/stable/notes/serialization.html). Files in torch's format before 1.6 are read whole.
"""

import _codecs
import io
import json
import os
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..modeling._compat import load_without_storage, storage_offset
from ..modeling.weights import CheckpointError, read_header
from .lazy import LazyTensor, from_tensor
from .source_files import note

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_PIECE = 1 << 22  # bytes
# What a torch file may wrap its tensors in.
_WRAPPERS = ("state_dict", "model", "model_state_dict", "module")


class FileTensor(LazyTensor):
    """A tensor at an offset of a file, in any strides."""

    def __init__(self, path: Path, name: str, offset: int, dtype: torch.dtype, shape, strides=None):
        super().__init__(shape, dtype, f"{path}: {name}")
        self.path, self.offset = path, offset
        self.strides = tuple(strides) if strides is not None else None
        if self.strides == _row_major(self.shape):
            self.strides = None

    def _read(self, start, stop):
        if self.strides is not None and self.numel:
            # What these rows reach, from their first element; where the first axis is not the slowest, nearly all.
            shape = (stop - start, *self.shape[1:])
            if start == stop:
                return torch.empty(shape, dtype=self.dtype)
            span = 1 + sum((size - 1) * step for size, step in zip(shape, self.strides, strict=True))
            return self._bytes(start * self.strides[0], span).as_strided(shape, self.strides)
        width = self.numel // self.shape[0] if self.shape and self.shape[0] else 1
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        return self._bytes(start * width, (stop - start) * width if self.numel else 0).view(shape)

    def stream(self, start=0, stop=None):
        """Read pieces that stay in the processor's cache until they are written."""
        stop = self._rows() if stop is None else stop
        if self.strides is not None or not self.numel:
            yield from super().stream(start, stop)
            return
        width = self.numel // self._rows()
        step = max(_PIECE // self.dtype.itemsize, 1)
        for first in range(start * width, stop * width, step):
            yield self._bytes(first, min(step, stop * width - first))

    def _bytes(self, first: int, count: int) -> torch.Tensor:
        size = self.dtype.itemsize
        buffer = torch.empty(count * size, dtype=torch.uint8)
        view = memoryview(buffer.numpy())
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset + first * size)
                done = 0
                while done < len(view):
                    got = file.readinto(view[done:])
                    if not got:
                        raise CheckpointError(
                            f"{self.origin}: the file ended while the tensor was read; it became shorter."
                        )
                    done += got
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{self.origin}: cannot be read ({error.strerror or error}).") from error
        return buffer.view(self.dtype)


def open_safetensors(path: str | os.PathLike) -> dict[str, LazyTensor]:
    """Open a safetensors file.

    Args:
        path: the file.

    Returns:
        name to tensor, in the order of the header.

    Raises:
        CheckpointError: the file is missing or damaged, or a dtype is none of torch's.
    """
    path = Path(path)
    note(path)
    headers = read_header(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    tensors: dict[str, LazyTensor] = {}
    for name, header in headers.items():
        if header.dtype not in DTYPES:
            raise CheckpointError(f"{path}: {name} has dtype {header.dtype}, which cannot be converted.")
        offset = 8 + length + entries[name]["data_offsets"][0]
        tensors[name] = FileTensor(path, name, offset, DTYPES[header.dtype], header.shape)
    return tensors


def open_pickle(path: str | os.PathLike) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Open a file of `torch.save`: a dictionary of tensors, by itself or under "state_dict" or "model".

    Args:
        path: the file.

    Returns:
        name to tensor, and name to type of the entries that are no tensors.

    Raises:
        CheckpointError: the file is missing, damaged, holds something else, or wants to run code.
    """
    path = Path(path)
    note(path)
    try:
        with open(path, "rb") as file:
            begin = file.read(4)
        if not begin:
            raise CheckpointError(f"{path}: is empty. Download or copy it again.")
        is_zip = begin == b"PK\x03\x04"
        if not is_zip and begin[0] != 0x80:  # what every other pickle begins with
            raise CheckpointError(f"{path}: is neither a safetensors file nor one of torch.save.")
        records = _records(path) if is_zip else None
        # Meta's files hold BytesIO objects as `_extra_state`; these are what bytes are unpickled with.
        with warnings.catch_warnings(), torch.serialization.safe_globals([io.BytesIO, _codecs.encode, bytes]):
            warnings.simplefilter(
                "ignore"
            )  # of formats of pickle: what cannot be read is an error all the same
            content = load_without_storage(path) if is_zip else torch.load(path, "cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file.") from error
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)|Unsupported (?:class|global) (\S+)", str(error))
        raise CheckpointError(
            f"{path}: is no plain file of tensors, and may want to run code"
            f"{f' ({wanted[1] or wanted[2]})' if wanted else ''}. It is not opened; get the weights as safetensors or "
            "from their original source."
        ) from error
    except CheckpointError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path}: is cut short or damaged ({error}). Download or copy it again."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(
            f"{path}: cannot be read as a file of torch.save ({type(error).__name__}: {str(error)[:200]}). Download or "
            "copy it again."
        ) from error
    others: dict[str, str] = {}
    for _ in range(3):  # wrapped in one another, but not without end
        wrapper = next(
            (
                name
                for name in _WRAPPERS
                if isinstance(content, Mapping) and isinstance(content.get(name), Mapping)
            ),
            None,
        )
        if wrapper is None:
            break
        for name, value in content.items():
            if isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{path}: has {name} beside {wrapper!r}; one of them only was expected."
                )
            if name != wrapper:
                others[str(name)] = type(value).__name__
        content = content[wrapper]
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a dictionary of tensors.")
    tensors: dict[str, LazyTensor] = {}
    for name, value in content.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: a key is {name!r}, where names of tensors were expected.")
        if not isinstance(value, torch.Tensor):
            others[name] = type(value).__name__
        elif value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(f"{path}: {name} is stored as {value.layout}; plain tensors were expected.")
        elif records is None:
            tensors[name] = from_tensor(value, f"{path}: {name}")
        else:
            tensors[name] = _stored(path, name, value, records)
    return tensors, others


def open_weights(path: str | os.PathLike) -> dict[str, LazyTensor]:
    """Open a file of weights of either format, whatever it is called.

    Args:
        path: the file.

    Returns:
        name to tensor.

    Raises:
        CheckpointError: as `open_safetensors` and `open_pickle`.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            begin = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error
    if path.suffix == ".safetensors" or begin[8:] == b"{":
        return open_safetensors(path)
    return open_pickle(path)[0]


def read_bytes(path: Path) -> bytes:
    """Read a small file of a source whole."""
    note(path)
    return path.read_bytes()


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is missing, no JSON, or no object.
    """
    note(Path(path))
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: should hold a JSON object, not {type(content).__name__}.")
    return content


def check_sums(paths: Sequence[Path]) -> None:
    """Read files whole and compare them with the checksums that come with them.

    Those are `checklist.chk` beside the file, lines of an MD5 sum and a name as Meta ships them, and the CRC-32 of
    every record of a torch file.

    Args:
        paths: files of weights.

    Raises:
        CheckpointError: a sum differs.
    """
    import hashlib

    for path in paths:
        listed = _checklist(path.parent / "checklist.chk").get(path.name)
        if listed is not None:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "md5").hexdigest()
            if found != listed:
                raise CheckpointError(
                    f"{path}: its MD5 sum is {found}, but checklist.chk says {listed}. Download it again."
                )
        if zipfile.is_zipfile(path):
            _check_records(path)


def _check_records(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for info in filter(_has_checksum, archive.infolist()):
            try:
                with archive.open(info) as record:
                    while record.read(1 << 24):
                        pass
            except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
                raise CheckpointError(
                    f"{path}: record {info.filename} is damaged ({error}). Download it again."
                ) from error


def _checklist(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error
    entries = (line.split() for line in lines)
    return {entry[1].lstrip("*"): entry[0].lower() for entry in entries if len(entry) == 2}


def _records(path: Path) -> dict[int, int]:
    """Offset of the bytes of each record of a torch file to how many they are.

    The small ones, which say what the numbers mean, are compared with their checksums: torch itself does not look.
    """
    size = os.path.getsize(path)
    records: dict[int, int] = {}
    names: set[str] = set()
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            if "/code/" in info.filename:
                raise CheckpointError(
                    f"{path}: is a TorchScript program, as OpenAI's files of CLIP are, and is not run. Get the weights "
                    "as safetensors, or save the state_dict() of what torch.jit.load gives."
                )
            file.seek(info.header_offset)
            header = file.read(30)
            name_length, extra_length = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
            name = file.read(name_length)
            if header[:4] != b"PK\x03\x04" or name != info.orig_filename.encode():
                raise CheckpointError(f"{path}: record {info.filename} is not where the directory says.")
            offset = info.header_offset + 30 + name_length + extra_length
            is_plain = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
            if offset + info.file_size > size or not is_plain or info.filename in names:
                raise CheckpointError(
                    f"{path}: record {info.filename} is cut short, compressed or twice there. Download or copy it "
                    "again."
                )
            names.add(info.filename)
            records[offset] = info.file_size
            if "/data/" in info.filename:
                continue
            file.seek(offset)
            content = file.read(info.file_size)
            if _has_checksum(info) and zlib.crc32(content) != info.CRC:
                raise CheckpointError(
                    f"{path}: record {info.filename} is damaged (CRC-32 differs). Download or copy it again."
                )
            if info.filename.endswith("/byteorder") and content != b"little":
                raise CheckpointError(
                    f"{path}: was written on a big-endian machine; save it again on a usual one."
                )
    return records


def _has_checksum(info: zipfile.ZipInfo) -> bool:
    """Whether a record's checksum was computed: torch writes 0 where `torch.utils.serialization` says not to."""
    return info.CRC != 0


def _stored(path: Path, name: str, tensor: torch.Tensor, records: Mapping[int, int]) -> LazyTensor:
    if not tensor.numel():
        return from_tensor(torch.empty(tensor.shape, dtype=tensor.dtype), f"{path}: {name}")
    offset, size = storage_offset(tensor), tensor.untyped_storage().nbytes()
    if records.get(offset) != size:
        raise CheckpointError(
            f"{path}: {name} needs a record of {size} bytes at {offset}, but there is "
            f"{'none' if offset not in records else f'one of {records[offset]} bytes'}. Download or copy it again."
        )
    itemsize = tensor.dtype.itemsize
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if (tensor.storage_offset() + last + 1) * itemsize > size:
        raise CheckpointError(f"{path}: {name} of shape {list(tensor.shape)} reaches past its {size} bytes.")
    begin = offset + tensor.storage_offset() * itemsize
    return FileTensor(path, name, begin, tensor.dtype, tensor.shape, tensor.stride())


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
