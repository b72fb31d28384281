"""Content of a file of torch.save (.bin, .pth, .pt), read without its numbers and checked against the file's size.

Since 1.6 torch writes a zip archive of uncompressed records: `data.pkl`, a pickle that describes the tensors, and the
numbers of each storage in a record of its own. Earlier it wrote several pickles, then the storages. A zip archive
could also unpack to any size, or have overlapping records or two of one name. torch writes none of that, and it is
refused.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from struct import iter_unpack, unpack, unpack_from
from typing import Any, BinaryIO, NamedTuple, NoReturn
from zlib import crc32

import torch

from ...configuration.errors import CheckpointError
from ...configuration.json_files import check_regular
from .._private_api import open_archive
from .pickles import BITS, MOST_BYTES, Machine, Storage

# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.7, 4.3.12, 4.3.14 to 4.3.16
_LOCAL, _ENTRY, _END64, _LOCATOR, _END = b"PK\3\4", b"PK\1\2", b"PK\6\6", b"PK\6\7", b"PK\5\6"
_MOST_DIRECTORY_BYTES = 1 << 26
# Flags of a record, 4.4.4: its sizes and checksum follow the content (4.3.9).
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
        if begin == _LOCAL:
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
    try:
        open_archive(path)
    # The last two: where a number or a text should stand.
    except (RuntimeError, IndexError, ValueError) as error:
        reason = str(error).partition(". ")[0]
        raise CheckpointError(f"{path}: torch cannot read this archive ({reason}). {_AGAIN}") from error
    folder = next(iter(records)).partition("/")[0]
    pickled = records.get(f"{folder}/data.pkl")
    if pickled is None:
        raise CheckpointError(f"{path}: has no record {folder}/data.pkl, as files of torch.save do.")

    def find(dtype: str, key: str, numel: int) -> Storage:
        record = records.get(f"{folder}/data/{key}")
        nbytes = numel * BITS[dtype] // 8
        if record is None or record.nbytes != nbytes:
            found = "none" if record is None else f"one of {record.nbytes} bytes"
            raise CheckpointError(
                f"{path}: needs a record data/{key[:99]} of {nbytes} bytes, but has {found}. {_AGAIN}"
            )
        return Storage(dtype, record.begin, nbytes)

    file.seek(pickled.begin)
    return Machine(file.read(pickled.nbytes), find, str(path), allowed).run()


def read_records(path: str | os.PathLike, file: BinaryIO) -> dict[str, Record]:
    """Directory of an open torch file: name to record, in the directory's order; at least one.

    The small records, which describe the numbers, are compared with their checksums, which torch does not check.

    Raises:
        CheckpointError: the archive is damaged, or differs from what torch writes.
    """

    def fail(problem: str) -> NoReturn:
        raise CheckpointError(f"{path}: {problem}. {_AGAIN}")

    close, count, directory = _read_directory(file, os.fstat(file.fileno()).st_size, fail)
    records: dict[str, Record] = {}
    spans: list[tuple[int, int, bool]] = []
    seen: set[str] = set()
    for raw_name, begin, nbytes, crc in _entries(directory, fail):
        name = raw_name.decode("utf-8", "replace")
        shown = f"record {name[:99]}"
        if "/code/" in name:
            raise CheckpointError(
                f"{path}: is a TorchScript program, as OpenAI's files of CLIP are, and is not run. Get the weights "
                "as safetensors, or save the state_dict() of what torch.jit.load gives."
            )
        # torch looks names up without regard to case.
        if name.lower() in seen:
            fail(f"{shown} is twice there")
        seen.add(name.lower())
        if begin + 30 > close:
            fail(f"{shown} is cut short")
        file.seek(begin)
        signature, flags, method, name_length, extra_length = unpack("<4s2xHH16xHH", file.read(30))
        if signature != _LOCAL or method or file.read(name_length) != raw_name:
            fail(f"{shown} is not where the directory says")
        content = begin + 30 + name_length + extra_length
        if content + nbytes > close:
            fail(f"{shown} is cut short")
        records[name] = Record(content, nbytes, crc)
        spans.append((begin, content + nbytes, bool(flags & _DESCRIPTOR)))
        if "/data/" not in name:
            _check_small(records[name], shown, file, fail)
    if not records or len(records) != count:
        fail("is cut short or damaged in its directory")
    spans.sort()
    for (_, end, has_descriptor), (start, *_) in pairwise([*spans, (close, close, False)]):
        if end > start:
            fail("has records that overlap")
        # A wrong offset in the directory would read other numbers.
        file.seek(end)
        is_marked = not has_descriptor or file.read(4) == _DESCRIPTOR_MARK
        if not is_marked or start - end not in (_DESCRIPTOR_SIZES if has_descriptor else (0,)):
            fail(f"has {start - end} bytes between two records")
    return records


def _entries(directory: bytes, fail: Callable[[str], NoReturn]) -> Iterator[tuple[bytes, int, int, int]]:
    """For each entry: name, offset of its record, length of its content, and checksum."""
    position = 0
    while position < len(directory):
        if directory[position : position + 4] != _ENTRY or position + 46 > len(directory):
            fail("is cut short or damaged in its directory")
        flags, method, crc, packed, nbytes, *lengths, begin = unpack_from(
            "<HH4xLLLHHH8xL", directory, position + 8
        )
        middle = position + 46 + lengths[0]
        name, extra = directory[position + 46 : middle], directory[middle : middle + lengths[1]]
        position += 46 + sum(lengths)
        packed, nbytes, begin = _widen(packed, nbytes, begin, extra)
        # A program's code is compressed; a later check reports that it is a program.
        if b"/code/" not in name and (method or flags & _ENCRYPTED or packed != nbytes):
            fail(
                f"record {name[:99].decode(errors='replace')} is compressed or encrypted, which torch never does"
            )
        yield name, begin, nbytes, crc


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
        fail(f"{shown} is no alignment")


def _read_directory(file: BinaryIO, size: int, fail: Callable[[str], NoReturn]) -> tuple[int, int, bytes]:
    """Offset of the directory, its number of entries, and its bytes.

    It must end where the file does: if there were several, readers that search would find different ones.
    """
    tail = min(size, 98)
    file.seek(size - tail)
    end = file.read(tail)
    if tail < 22 or end[-22:-18] != _END:
        fail("is cut short or damaged: its directory is not at its end")
    *disks, here, entries, length, begin, comment = unpack("<HHHHLLH", end[-18:])
    close = size - 22
    if end[-42:-38] == _LOCATOR:
        first_disk, at, all_disks = unpack_from("<LQL", end, len(end) - 38)
        close = size - 98
        if at != close or end[:4] != _END64:
            fail("is damaged: its directory is not at its end")
        (*disks64, here, entries, length, begin) = unpack_from("<LLQQQQ", end, 16)
        disks += [first_disk, *disks64, all_disks - 1]
    if any(disks) or here != entries or comment or begin + length != close or length > _MOST_DIRECTORY_BYTES:
        fail("is cut short or damaged in its directory")
    file.seek(begin)
    return begin, entries, file.read(length)


def _widen(packed: int, nbytes: int, begin: int, extra: bytes) -> tuple[int, int, int]:
    """Sizes and offset of a record of 4 GiB or more, which an extra field holds (4.5.3)."""
    full = 0xFFFFFFFF
    while full in (packed, nbytes, begin) and len(extra) >= 4:
        kind, length = unpack_from("<HH", extra)
        if kind == 1:
            wide = [number for (number,) in iter_unpack("<Q", extra[4 : 4 + length // 8 * 8])]
            nbytes = wide.pop(0) if nbytes == full and wide else nbytes
            packed = wide.pop(0) if packed == full and wide else packed
            begin = wide.pop(0) if begin == full and wide else begin
            break
        extra = extra[4 + length :]
    return packed, nbytes, begin


def _read_legacy(path: str | os.PathLike, file: BinaryIO, allowed: set[str]) -> Any:
    """Read torch's format before 1.6: magic number, protocol, system, content, keys of the storages, the storages."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    # Size of each storage, in elements and bytes.
    sizes: dict[str, tuple[int, int]] = {}
    places: dict[str, int] = {}

    def find(dtype: str, key: str, numel: int, part: object) -> Storage:
        found = numel, numel * BITS[dtype] // 8
        if part is not None or sizes.setdefault(key, found) != found:
            raise CheckpointError(
                f"{path}: names a part of a storage, which torch has not written since 0.3."
            )
        return Storage(dtype, places.get(key, 0), found[1])

    machine = Machine(file.read(MOST_BYTES), find, str(path), allowed)
    if machine.run() != _MAGIC_NUMBER or machine.run() != _PROTOCOL:
        raise CheckpointError(f"{path}: is a pickle, but none of torch.save.")
    system = machine.run()
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise CheckpointError(f"{path}: was written on a big-endian machine; save it again on a usual one.")
    content = machine.position
    machine.run()
    keys = machine.run()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or {*keys} != {*sizes}:
        raise CheckpointError(f"{path}: does not say in which order its storages stand. {_AGAIN}")
    position = machine.position
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
    machine.position = content
    return machine.run()
