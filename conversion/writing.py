"""Checkpoints written block by block, so that at any moment what has its final name is whole.

A file is made in full size under a temporary name, filled, flushed to the disk and renamed. What makes a folder a
checkpoint (the index of several shards, Meta's params.json) is written last. Until then `UNFINISHED` lies in the folder
and says what is being made from what; with it, a later run goes on after the last whole file.
"""

import errno
import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..modeling._compat import load_without_storage, save_without_storage, storage_offset
from ..modeling.weights import CheckpointError
from .lazy import LazyTensor, blocks

UNFINISHED = ".llamoe-unfinished.json"
_TEMPORARY = ".{}.partial"
_DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_CHECKED_AT_ONCE = 1 << 24  # elements
_BEHIND = 1 << 27  # bytes that may wait to be written
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


class Progress(Protocol):
    """What is told how far the writing has come."""

    def start(self, total: int) -> None:
        """Begin; `total` is the bytes of weights that will be written."""

    def advance(self, nbytes: int, file: str) -> None:
        """Count bytes that were written to a file, or were there already."""


@dataclass
class Plan:
    """Everything that a target folder will hold.

    Attributes:
        groups: files that are written together, as name to tensors; the groups one after the other.
        before: small files that come first, name to content.
        last: small files that make the folder a checkpoint, in order.
        identity: what the folder is made from and how; a run that goes on must have the same.
    """

    groups: list[dict[str, dict[str, LazyTensor]]]
    before: dict[str, bytes] = field(default_factory=dict)
    last: dict[str, bytes] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, dict[str, LazyTensor]]:
        """All files of weights, name to tensors."""
        return {name: tensors for group in self.groups for name, tensors in group.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors.values())

    def fingerprint(self) -> str:
        """Digest of what will be written and from what."""
        layout = {
            file: {name: [str(tensor.dtype), tensor.shape] for name, tensor in tensors.items()}
            for file, tensors in self.files.items()
        }
        content = {
            name: hashlib.sha256(data).hexdigest() for name, data in {**self.before, **self.last}.items()
        }
        described = json.dumps([self.identity, layout, content], sort_keys=True, default=str)
        return hashlib.sha256(described.encode()).hexdigest()


def parse_size(size: int | str) -> int:
    """Read a size such as "5GB", "500MB" or "2GiB" as bytes.

    Args:
        size: bytes, or a number with a unit.

    Raises:
        ValueError: it is none, or not above zero.
    """
    if isinstance(size, str):
        digits = size.strip().rstrip("BbKkMmGgTtIi ")
        unit = size.strip()[len(digits) :].strip().upper()
        try:
            size = int(float(digits) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            raise ValueError(
                f"shard_size = {size!r}: should be a size such as '5GB', '500MB' or '2GiB'."
            ) from None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"shard_size = {size!r}: should be bytes, 1 or more, or a text such as '5GB'.")
    return size


def split_shards(
    tensors: Mapping[str, LazyTensor], shard_size: int, stem: str = "model"
) -> tuple[list[dict[str, dict[str, LazyTensor]]], dict[str, bytes]]:
    """Lay tensors out over safetensors files, as transformers names them.

    Args:
        tensors: name to tensor.
        shard_size: bytes that a file should not exceed; a tensor that is larger gets a file of its own.
        stem: beginning of the file names.

    Returns:
        one group a file, and the index where there are several.
    """
    shards: list[dict[str, LazyTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        return [{f"{stem}.safetensors": shards[0]}], {}
    names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    index = {
        "metadata": {
            "total_parameters": sum(tensor.numel for tensor in tensors.values()),
            "total_size": sum(tensor.nbytes for tensor in tensors.values()),
        },
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in sorted(shard)},
    }
    groups = [{name: shard} for name, shard in zip(names, shards, strict=True)]
    return groups, {f"{stem}.safetensors.index.json": to_json(index)}


def to_json(content: Any) -> bytes:
    """Write an object as the JSON files of a checkpoint are written."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def check_target(target: Path, resume: bool) -> None:
    """Refuse a target that is in use, before any work.

    Raises:
        ValueError: the target exists and is not empty, or is a file, or there is nothing to resume.
    """
    if target.is_symlink() and not target.exists():
        raise ValueError(f"{target}: is a link to nothing. Remove it or choose another target.")
    if not target.exists():
        parent = next(parent for parent in target.absolute().parents if parent.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ValueError(
                f"{target}: {parent} is no folder that can be written to. Choose another target."
            )
        return
    if not target.is_dir():
        raise ValueError(f"{target}: is a file, where a folder will be written. Choose another target.")
    if _is_empty(target):
        return
    is_unfinished = (target / UNFINISHED).exists()
    if not resume:
        state, hint = ("is unfinished", "go on with resume=True (--resume)") if is_unfinished else (
            "exists already", "choose another target, or remove it"
        )  # fmt: skip
        raise ValueError(f"{target}: {state}; nothing is overwritten: {hint}.")
    if not is_unfinished:
        raise ValueError(
            f"{target}: there is nothing to resume: it is no folder that a conversion left unfinished. If it is "
            "finished, use it; otherwise choose another target."
        )


def _is_empty(target: Path) -> bool:
    """Whether a folder holds nothing, or only what a run left that was killed at its very first file."""
    return all(path.name == _TEMPORARY.format(UNFINISHED) for path in target.iterdir())


def write(plan: Plan, target: Path, resume: bool = False, progress: Progress | None = None) -> None:
    """Write a planned checkpoint.

    Args:
        plan: what to write.
        target: the folder; it is made, or must be empty, or with `resume` one that an earlier run left unfinished.
        resume: keep the whole files of an earlier run of the same plan.
        progress: is told of every block.

    Raises:
        ValueError: the target is in use, the earlier run made something else, or a weight is not finite. What this run
            made is removed.
        OSError: the disk is full or fails. Whole files stay, for `resume`.
    """
    check_target(target, resume)
    is_new = not target.exists()
    fingerprint = plan.fingerprint()
    done = set() if is_new or _is_empty(target) else _whole_files(plan, target, fingerprint)
    files = plan.files
    _check_room(target, sum(_nbytes(files[name]) for name in files if name not in done))
    if progress:
        progress.start(plan.nbytes)
        for name in done:
            progress.advance(_nbytes(files[name]), name)
    target.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    try:
        if not (target / UNFINISHED).exists():
            made.append(target / UNFINISHED)
            _write_small(
                target / UNFINISHED, to_json({"fingerprint": fingerprint, "made_from": plan.identity})
            )
        for name, content in plan.before.items():
            made.append(target / name)
            _write_small(target / name, content)
        for group in plan.groups:
            if not done.issuperset(group):
                made.extend(target / name for name in group)
                _write_group(group, target, progress)
        for name, content in plan.last.items():
            made.append(target / name)
            _write_small(target / name, content)
        (target / UNFINISHED).unlink()
    except BaseException as error:
        for path in made:
            (path.parent / _TEMPORARY.format(path.name)).unlink(missing_ok=True)
        if isinstance(error, ValueError):
            _remove(target, made, is_new)
        if isinstance(error, OSError) and not isinstance(error, ValueError):
            raise _explain(error, target) from error
        raise


def _whole_files(plan: Plan, target: Path, fingerprint: str) -> set[str]:
    """Names of the weight files that an earlier run of the same plan has finished."""
    try:
        state = json.loads((target / UNFINISHED).read_text(encoding="utf-8"))
        earlier = state["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{target / UNFINISHED}: cannot be read ({error!r}). Begin again elsewhere."
        ) from error
    if earlier != fingerprint:
        made_from, now = state.get("made_from"), json.loads(json.dumps(plan.identity, default=str))
        raise ValueError(
            f"{target}: was begun from another source or with other options, so that it cannot go on: then "
            f"{made_from}, now {now}. Give the same ones, or another target."
        )
    groups = [group for group in plan.groups if all((target / name).is_file() for name in group)]
    return {name for group in groups for name in group}


def _check_room(target: Path, needed: int) -> None:
    folder = next(parent for parent in (target.absolute(), *target.absolute().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{target}: {needed / 1e9:.2f} GB have to be written, but only {free / 1e9:.2f} GB are free",
        )


def _explain(error: OSError, target: Path) -> OSError:
    return OSError(
        error.errno,
        f"{target}: writing failed ({error.strerror or error}). Whole files were kept; make room or repair the disk, "
        "then go on with resume=True (--resume)",
    )


def _remove(target: Path, made: Sequence[Path], is_new: bool) -> None:
    for path in made:
        path.unlink(missing_ok=True)
    if is_new and not any(target.iterdir()):
        target.rmdir()


def _write_small(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.parent / _TEMPORARY.format(path.name)
    with open(temporary, "wb") as file:
        file.write(content)
        _flush(file)
    os.replace(temporary, path)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _nbytes(tensors: Mapping[str, LazyTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_group(
    group: Mapping[str, Mapping[str, LazyTensor]], target: Path, progress: Progress | None
) -> None:
    """Write files side by side, so that a block of the source is read once for all of them."""
    outputs: dict[str, _Output] = {}
    try:
        for name, tensors in group.items():
            make = _SafetensorsOutput if name.endswith(".safetensors") else _TorchOutput
            outputs[name] = make(target / _TEMPORARY.format(name), tensors)
        with _Behind() as behind:
            for unit in _units(group):
                pending = [(name, key, tensor, blocks(tensor)) for name, key, tensor in unit]
                for step in range(max((len(ranges) for *_, ranges in pending), default=0)):
                    for name, key, tensor, ranges in pending:
                        for piece in tensor.stream(*ranges[step]) if step < len(ranges) else ():
                            _check_finite(key, tensor, piece)
                            behind.run(piece.nbytes, outputs[name].append, key, piece)
                            if progress:
                                progress.advance(piece.nbytes, name)
        for output in outputs.values():
            output.finish()
    finally:
        for output in outputs.values():
            output.close()
    for name in group:
        os.replace(target / _TEMPORARY.format(name), target / name)
    _flush_folder(target)


def _flush_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _units(
    group: Mapping[str, Mapping[str, LazyTensor]],
) -> list[list[tuple[str, str, LazyTensor]]]:
    """Tensors of a group that are made of the same ones of the source; their blocks are written in turn."""
    units: dict[tuple[int, ...], list[tuple[str, str, LazyTensor]]] = {}
    for name, tensors in group.items():
        for key, tensor in tensors.items():
            leaves = tuple(sorted({id(leaf) for leaf in tensor.leaves()}))
            units.setdefault(leaves, []).append((name, key, tensor))
    return list(units.values())


def _check_finite(key: str, tensor: LazyTensor, block: torch.Tensor) -> None:
    if block.is_floating_point() and block.dtype.itemsize > 1:
        for piece in block.split(_CHECKED_AT_ONCE):
            # A sum is many times faster; where it is not finite, so may be the numbers all the same.
            if not bool(torch.isfinite(piece.sum())) and not bool(piece.isfinite().all()):
                _refuse_numbers(key, tensor, piece)


def _refuse_numbers(key: str, tensor: LazyTensor, block: torch.Tensor) -> None:
    count = int((~block.isfinite()).sum())
    leaf = next(tensor.leaves())
    cause = (
        f"numbers too large for {tensor.dtype} (cast from {leaf.dtype}), NaN or infinity; another dtype may hold them"
        if leaf.dtype != tensor.dtype
        else "NaN or infinity; the source is damaged"
    )
    raise CheckpointError(f"{leaf.origin} (as {key}): {count} of its numbers are {cause}.")


class _Behind:
    """Does one thing after the other in a thread, while the next block is read."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(1)
        self.waiting: deque[tuple[int, Future]] = deque()
        self.nbytes = 0

    def __enter__(self) -> "_Behind":
        return self

    def run(self, nbytes: int, function: Callable[..., None], *args: Any) -> None:
        """Add a call that holds so many bytes; wait while too many are held."""
        while self.waiting and (self.nbytes + nbytes > _BEHIND or self.waiting[0][1].done()):
            self._wait()
        self.nbytes += nbytes
        self.waiting.append((nbytes, self.thread.submit(function, *args)))

    def _wait(self) -> None:
        nbytes, call = self.waiting.popleft()
        call.result()
        self.nbytes -= nbytes

    def __exit__(self, kind, error, trace) -> None:
        try:
            while self.waiting and kind is None:
                self._wait()
        finally:
            self.thread.shutdown(cancel_futures=True)


class _Output:
    """A file of weights in full size, of which each tensor is filled from its beginning to its end."""

    def __init__(self, path: Path, offsets: Mapping[str, int], size: int):
        self.path, self.offsets = path, offsets
        self.written = dict.fromkeys(offsets, 0)
        self.file = open(path, "r+b" if path.exists() else "w+b", buffering=0)
        if hasattr(os, "posix_fallocate"):  # a disk that is too small is known before hours of work
            try:
                os.posix_fallocate(self.file.fileno(), 0, max(size, 1))
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    self.close()
                    raise
        self.file.truncate(size)

    def append(self, key: str, block: torch.Tensor) -> None:
        data = memoryview(block.reshape(-1).view(torch.uint8).numpy())
        self.file.seek(self.offsets[key] + self.written[key])
        done = 0
        while done < len(data):
            done += self.file.write(data[done:])
        self.written[key] += len(data)

    def finish(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class _SafetensorsOutput(_Output):
    def __init__(self, path: Path, tensors: Mapping[str, LazyTensor]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        # Wide dtypes first, as the library lays them out: every tensor begins at a multiple of its item size.
        for key in sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize):
            tensor = tensors[key]
            header[key] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, position + tensor.nbytes],
            }
            position += tensor.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        offsets = {key: begin + header[key]["data_offsets"][0] for key in tensors}
        path.unlink(missing_ok=True)
        super().__init__(path, offsets, begin + position)
        self.file.write(len(text).to_bytes(8, "little") + text)


class _TorchOutput(_Output):
    """What `torch.save` would write: torch lays the file out, and the numbers and their checksums follow."""

    def __init__(self, path: Path, tensors: Mapping[str, LazyTensor]):
        empty = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for key, tensor in tensors.items()
        }
        path.unlink(missing_ok=True)
        save_without_storage(empty, path)
        placed = load_without_storage(path)
        offsets = {key: storage_offset(placed[key]) if tensor.numel else 0 for key, tensor in tensors.items()}
        super().__init__(path, offsets, path.stat().st_size)
        self.sums = dict.fromkeys(offsets, 0)

    def append(self, key: str, block: torch.Tensor) -> None:
        super().append(key, block)
        self.sums[key] = zlib.crc32(memoryview(block.reshape(-1).view(torch.uint8).numpy()), self.sums[key])

    def finish(self) -> None:
        by_offset = {offset: self.sums[key] for key, offset in self.offsets.items() if self.written[key]}
        _set_checksums(self.path, self.file, by_offset)
        super().finish()


def _set_checksums(path: Path, file: Any, by_offset: Mapping[int, int]) -> None:
    """Enter the CRC-32 of records that were filled after the archive was laid out.

    It stands in the archive's directory, and in a descriptor after the bytes of each record
    (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.9 and 4.3.12).
    """
    with zipfile.ZipFile(path) as archive:
        position, records = archive.start_dir, archive.infolist()
    for info in records:
        file.seek(position)
        entry = file.read(46)
        assert entry[:4] == b"PK\x01\x02", (path, info.filename)
        lengths = [int.from_bytes(entry[i : i + 2], "little") for i in (28, 30, 32)]
        file.seek(info.header_offset)
        local = file.read(30)
        begin = info.header_offset + 30 + sum(int.from_bytes(local[i : i + 2], "little") for i in (26, 28))
        if begin in by_offset and info.file_size:
            value = by_offset[begin].to_bytes(4, "little")
            file.seek(position + 16)
            file.write(value)
            file.seek(begin + info.file_size)
            if file.read(4) == b"PK\x07\x08":
                file.seek(begin + info.file_size + 4)
                file.write(value)
        position += 46 + sum(lengths)
