"""Content of a file of torch.save (.bin, .pth, .pt), read without its numbers and checked against the file's size.

Since 1.6 torch writes a zip archive of uncompressed records: `data.pkl`, a pickle that describes the tensors, and the
numbers of each storage in a record of its own. Earlier it wrote several pickles, then the storages. A zip archive
could also unpack to any size, or have overlapping records or two of one name. torch writes none of that, and it is
refused.
"""

import os
import zipfile
from collections.abc import Callable, Iterable
from itertools import pairwise
from struct import error as StructError
from struct import unpack, unpack_from
from typing import Any, BinaryIO, NamedTuple, NoReturn
from zlib import crc32

import torch

from ...configuration.errors import CheckpointError
from ...configuration.json_files import check_regular
from .._private_api import open_archive
from .pickles import MOST_BYTES, Storage, Unpickler

_MOST_DIRECTORY_BYTES = 1 << 24
# Bytes behind the directory (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.14 to 4.3.16), the latter
# in archives of 4 GiB and more.
_ENDS = (22, 98)
# A flag of a record, 4.4.4: its sizes and checksum follow the content (4.3.9).
_DESCRIPTOR, _DESCRIPTOR_SIZES, _DESCRIPTOR_MARK = 1 << 3, (16, 24), b"PK\7\10"
# It is encrypted, patched, strongly encrypted, or in a directory with hidden values.
_ENCRYPTED = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 13
_MAGIC_NUMBER, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_AGAIN = "Download or copy it again."


class Record(NamedTuple):
    """Offset and length of a record's content, and its CRC-32; 0 where torch was told not to compute that."""

    begin: int
    nbytes: int
    crc: int


def read_torch(path: str | os.PathLike, allowed: Iterable[str] = ()) -> Any:
    """Content of a file of `torch.save`, without the numbers of its tensors.

    Args:
        path: the file.
        allowed: names of further classes that the file may hold, beside those that torch was told of
            (`torch.serialization.add_safe_globals`). No instances are made.

    Returns:
        dictionaries, lists, tuples, numbers and texts as they are, tensors as `TensorHeader`, anything else as
        `Named`.

    Raises:
        CheckpointError: the file is damaged, is no such file, wants to run code, or is made to take memory or time
            beyond its size.
        OSError: it cannot be read.
    """
    check_regular(path)
    names = {*allowed, *_safe_globals()}
    with open(path, "rb") as file:
        begin = file.read(4)
        if not begin:
            raise CheckpointError(f"{path}: is empty. {_AGAIN}")
        if begin == b"PK\3\4":
            return _read_archive(path, file, names)
        # Pickles of protocol 2 and later begin with this byte.
        if begin[0] != 0x80:
            raise CheckpointError(f"{path}: is neither a safetensors file nor one of torch.save.")
        return _read_legacy(path, file, names)


def _safe_globals() -> set[str]:
    listed = (
        entry if isinstance(entry, tuple) else (entry, None)
        for entry in torch.serialization.get_safe_globals()
    )
    return {name or f"{known.__module__}.{known.__qualname__}" for known, name in listed}


def _read_archive(path: str | os.PathLike, file: BinaryIO, allowed: set[str]) -> Any:
    records = read_records(path, file)
    folder = next(iter(records)).partition("/")[0]
    pickled = records.get(f"{folder}/data.pkl")
    if pickled is None:
        raise CheckpointError(f"{path}: has no record {folder}/data.pkl, as files of torch.save do.")

    def find(dtype: torch.dtype, key: str, numel: int) -> Storage:
        record = records.get(f"{folder}/data/{key}")
        nbytes = numel * dtype.itemsize
        if record is None or record.nbytes != nbytes:
            found = "none" if record is None else f"one of {record.nbytes} bytes"
            raise CheckpointError(
                f"{path}: needs a record data/{key[:99]} of {nbytes} bytes, but has {found}. {_AGAIN}"
            )
        return Storage(dtype, record.begin, nbytes)

    file.seek(pickled.begin)
    return Unpickler(file.read(pickled.nbytes), find, str(path), allowed).run()


def read_records(path: str | os.PathLike, file: BinaryIO) -> dict[str, Record]:
    """Directory of an open torch file: name to record, in the directory's order; at least one.

    The small records, which describe the numbers, are compared with their checksums, which torch does not check.

    Raises:
        CheckpointError: the archive is damaged, or differs from what torch writes.
    """

    def fail(problem: str) -> NoReturn:
        raise CheckpointError(f"{path}: {problem}. {_AGAIN}")

    size = os.fstat(file.fileno()).st_size
    file.seek(max(size - _ENDS[1], 0))
    end = file.read().rjust(_ENDS[1], b"\0")
    if end[-22:-18] != b"PK\5\6":
        fail("is cut short or damaged: its directory is not at its end")
    (length,) = unpack_from("<Q", end, 40) if end[:4] == b"PK\6\6" else unpack_from("<L", end, len(end) - 10)
    if length > _MOST_DIRECTORY_BYTES:
        fail("is cut short or damaged in its directory")
    try:
        known = open_archive(path)
        with zipfile.ZipFile(path) as archive:
            close, entries = archive.start_dir, archive.infolist()
    # Both libraries raise many types where a number or a text should stand.
    except (zipfile.BadZipFile, StructError, RuntimeError, LookupError, ValueError, OverflowError) as error:
        fail(f"torch cannot read this archive ({str(error).partition('. ')[0][:200]})")
    records: dict[str, Record] = {}
    spans: list[tuple[int, int, bool]] = []
    seen: set[str] = set()
    for entry in entries:
        name, begin, nbytes = entry.orig_filename, entry.header_offset, entry.file_size
        raw_name = name.encode("utf-8" if entry.flag_bits & 1 << 11 else "cp437")
        size -= 46 + len(raw_name) + len(entry.extra) + len(entry.comment)
        shown = f"record {name[:99]}"
        if "/code/" in name:
            raise CheckpointError(
                f"{path}: is a TorchScript program, as OpenAI's files of CLIP are, and is not run. Get the weights "
                "as safetensors, or save the state_dict() of what torch.jit.load gives."
            )
        if entry.compress_type or entry.flag_bits & _ENCRYPTED or entry.compress_size != nbytes:
            fail(f"{shown} is compressed or encrypted, which torch never does")
        # torch looks names up without regard to case.
        if name.lower() in seen:
            fail(f"{shown} is twice there")
        seen.add(name.lower())
        if not 0 <= begin <= close - 30:
            fail(f"{shown} is cut short")
        file.seek(begin)
        signature, flags, method, name_length, extra_length = unpack("<4s2xHH16xHH", file.read(30))
        if signature != b"PK\3\4" or method or file.read(name_length) != raw_name:
            fail(f"{shown} is not where the directory says")
        content = begin + 30 + name_length + extra_length
        if content + nbytes > close:
            fail(f"{shown} is cut short")
        records[name] = Record(content, nbytes, entry.CRC)
        spans.append((begin, content + nbytes, bool(flags & _DESCRIPTOR)))
        if "/data/" not in name:
            _check_small(records[name], shown, file, fail)
    # torch's reader counts what the end of the file says, and Python's what it finds.
    if not records or size - close not in _ENDS or {name.partition("/")[2] for name in records} != {*known}:
        fail("is cut short or damaged in its directory")
    spans.sort()
    if spans[0][0]:
        fail(f"has {spans[0][0]} bytes before its first record")
    for (_, end, has_descriptor), (start, *_) in pairwise([*spans, (close, close, False)]):
        if end > start:
            fail("has records that overlap")
        # A wrong offset in the directory would read other numbers.
        file.seek(end)
        is_marked = not has_descriptor or file.read(4) == _DESCRIPTOR_MARK
        if not is_marked or start - end not in (_DESCRIPTOR_SIZES if has_descriptor else (0,)):
            fail(f"has {start - end} bytes between two records")
    return records


def _check_small(record: Record, shown: str, file: BinaryIO, fail: Callable[[str], NoReturn]) -> None:
    """Check a record that holds no numbers."""
    if record.nbytes > MOST_BYTES:
        fail(f"{shown} has {record.nbytes} bytes, where at most {MOST_BYTES} were expected")
    file.seek(record.begin)
    content = file.read(record.nbytes)
    if record.crc and crc32(content) != record.crc:
        fail(f"{shown} is damaged (CRC-32 differs)")
    if shown.endswith("/byteorder") and content != b"little":
        fail("was written on a big-endian machine; save it again on a usual one")
    # torch divides by this number.
    if shown.endswith("/.storage_alignment") and not (content.isdigit() and 0 < int(content) <= 1 << 20):
        fail(f"{shown} is not an alignment")


def _read_legacy(path: str | os.PathLike, file: BinaryIO, allowed: set[str]) -> Any:
    """Read torch's format before 1.6: magic number, protocol, system, content, keys of the storages, the storages."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    # Size of each storage, in elements and bytes.
    sizes: dict[str, tuple[int, int]] = {}
    places: dict[str, int] = {}

    def find(dtype: torch.dtype, key: str, numel: int, part: object) -> Storage:
        found = numel, numel * dtype.itemsize
        if part is not None or sizes.setdefault(key, found) != found:
            raise CheckpointError(
                f"{path}: names a part of a storage, which torch has not written since 0.3."
            )
        return Storage(dtype, places.get(key, 0), found[1])

    reader = Unpickler(file.read(MOST_BYTES), find, str(path), allowed)
    if reader.run() != _MAGIC_NUMBER or reader.run() != _PROTOCOL:
        raise CheckpointError(f"{path}: is a pickle, but none of torch.save.")
    system = reader.run()
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise CheckpointError(f"{path}: was written on a big-endian machine; save it again on a usual one.")
    content = reader.stream.tell()
    reader.run()
    keys = reader.run()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or {*keys} != {*sizes}:
        raise CheckpointError(f"{path}: does not say in which order its storages stand. {_AGAIN}")
    position = reader.stream.tell()
    for key in keys:
        numel, nbytes = sizes[key]
        file.seek(position)
        if file.read(8) != numel.to_bytes(8, "little") or key in places:
            raise CheckpointError(f"{path}: storage {key[:99]} is not where it should be. {_AGAIN}")
        places[key] = position + 8
        position += 8 + nbytes
    if position != size:
        raise CheckpointError(f"{path}: needs {position} bytes, but has {size}. {_AGAIN}")
    # Run the pickle again, now that all offsets are known.
    reader.stream.seek(content)
    return reader.run()
