"""Is a checkpoint whole, and does it fit the model? Answered from file headers, before a tensor is read.

The safetensors format: 8 bytes, little endian, the length of a JSON header; the header, name to dtype, shape and
byte offsets; then the bytes of all tensors without gaps (https://github.com/huggingface/safetensors).
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Lies in a folder that a conversion has not finished.
UNFINISHED = ".llamoe-unfinished.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_WEIGHT_DTYPES = {"F16", "BF16", "F32", "F64"}


class CheckpointError(OSError, ValueError):
    """A checkpoint's file is missing, damaged, or does not fit the model."""


class TensorHeader(NamedTuple):
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


# By what changes when a file does.
_headers_read: ContextVar[dict[tuple[int, int, int, int], dict[str, TensorHeader]] | None] = ContextVar(
    "headers_read", default=None
)


@contextmanager
def each_header_once() -> Iterator[None]:
    """Inside, read each file's header only once: loading asks first whether the folder is whole, then if it fits."""
    token = _headers_read.set({})
    try:
        yield
    finally:
        _headers_read.reset(token)


def read_header(path: str | os.PathLike) -> dict[str, TensorHeader]:
    """Read and check the header of one safetensors file.

    Args:
        path: the file.

    Returns:
        tensor name to dtype and shape; not to be changed inside `each_header_once`.

    Raises:
        CheckpointError: the file is missing, cut short, or its header contradicts itself or the file's size.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    known = _headers_read.get()
    if known is None:
        return _read_header(path, status.st_size)
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if key not in known:
        known[key] = _read_header(path, status.st_size)
    return known[key]


def _unreadable(path: str | os.PathLike, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path}: no such file, though the checkpoint's index names it.")
    if isinstance(error, IsADirectoryError):
        return CheckpointError(f"{path}: is a folder, where the checkpoint should have a file.")
    return CheckpointError(f"{path}: cannot be read ({error.strerror}).")


def _read_header(path: str | os.PathLike, size: int) -> dict[str, TensorHeader]:
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            header_length = int.from_bytes(prefix, "little")
            is_possible = len(prefix) == 8 and header_length <= min(size - 8, _MAX_HEADER_BYTES)
            header = file.read(header_length) if is_possible else b""
    except OSError as error:
        raise _unreadable(path, error) from error
    if not is_possible:
        raise CheckpointError(
            f"{path}: the header should be {header_length} bytes long, but the file has {size} bytes in all; it is "
            "cut short or no safetensors file. Download or copy it again."
        )
    try:
        raw = json.loads(header)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or numbers and nesting without end
        raise CheckpointError(
            f"{path}: the header is not JSON ({error}). Download or copy it again."
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: the header should be a JSON object, not {type(raw).__name__}.")
    metadata = raw.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{path}: __metadata__ in the header should map strings to strings: {str(metadata)[:99]}."
        )
    entries = {name: entry for name, entry in raw.items() if name != "__metadata__"}
    spans = sorted(_check_entry(path, name, entry) for name, entry in entries.items())
    position = 0
    for begin, end, name in spans:
        if begin != position:
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at byte {begin} of the data where {position} was expected: the "
                "offsets overlap or leave a gap. Download or copy it again."
            )
        position = end
    if 8 + header_length + position != size:
        raise CheckpointError(
            f"{path}: its tensors need {8 + header_length + position} bytes, but the file has {size}; it is "
            f"{'cut short' if size < 8 + header_length + position else 'too long'}. Download or copy it again."
        )
    try:
        # The library that will read it has the last word. For torch it would map the whole file as its own memory,
        # which a machine with less than that refuses.
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}. Download or copy it again.") from error
    return {name: TensorHeader(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}


def _check_entry(path: str | os.PathLike, name: str, entry: object) -> tuple[int, int, str]:
    # A checkpoint has thousands of entries, and nearly all of them pass here. What does not is looked at closely.
    try:
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        if (
            type(shape) is list
            and type(entry["data_offsets"]) is list
            and type(begin) is type(end) is int
            and {*map(type, shape)} <= {int}
            and min(shape, default=0) >= 0
            and (end - begin) * 8 == prod(shape) * _DTYPE_BITS[entry["dtype"]]
        ):
            return begin, end, name
    except (KeyError, TypeError, ValueError):
        pass
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            dtype in _DTYPE_BITS and all(isinstance(axis, int) and axis >= 0 for axis in shape)
        ):
            if end - begin != -(-prod(shape) * _DTYPE_BITS[dtype] // 8):
                raise CheckpointError(
                    f"{path}: tensor {name!r} of shape {shape} and dtype {dtype} has {end - begin} bytes in the "
                    f"header where {-(-prod(shape) * _DTYPE_BITS[dtype] // 8)} are needed."
                )
            return begin, end, name
    raise CheckpointError(f"{path}: the header's entry for {name!r} cannot be read: {str(entry)[:200]}.")


def check_finished(folder: str | os.PathLike) -> None:
    """Refuse a folder that a conversion is writing, or has left unfinished.

    Raises:
        CheckpointError: it is such a folder.
    """
    if os.path.exists(os.path.join(folder, UNFINISHED)):
        raise CheckpointError(
            f"{os.path.normpath(folder)}: is unfinished. If no llamoe command is writing it any more, run that command "
            "again with --resume (resume=True); or remove the folder."
        )


def check_place(name_or_path: str | os.PathLike, subfolder: str = "") -> None:
    """Check that what is meant as a local folder is one, and of a checkpoint; names on a hub pass.

    Args:
        name_or_path: a folder, or `owner/name`.
        subfolder: where in the folder the checkpoint is.

    Raises:
        CheckpointError: no such folder, a file in its place, or a folder that is unfinished or without config.json.
    """
    path = os.fspath(name_or_path)
    if os.path.isfile(path):
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json and the weights.")
    if os.path.isdir(path):
        check_finished(os.path.join(path, subfolder))
        described = ("config.json", "adapter_config.json")
        if not any(os.path.isfile(os.path.join(path, subfolder, name)) for name in described):
            raise CheckpointError(
                f"{os.path.join(path, subfolder)}: no file named config.json in this folder."
            )
    elif os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") > 1:
        raise CheckpointError(f"{path}: no such folder.")


def check_folder(folder: str | os.PathLike, subfolder: str = "", variant: str | None = None) -> None:
    """Check every safetensors file of a local checkpoint; other formats are left to transformers.

    Args:
        folder: a checkpoint's folder.
        subfolder: where in it the weights are.
        variant: as in `from_pretrained`: part of the file names.

    Raises:
        CheckpointError: the folder is unfinished, a shard is missing or damaged, or the index cannot be read.
    """
    check_finished(os.path.join(folder, subfolder))
    infix = f".{variant}" if variant else ""
    single = os.path.join(folder, subfolder, f"model{infix}.safetensors")
    if os.path.isfile(single):
        read_header(single)
        return
    index = os.path.join(folder, subfolder, f"model.safetensors.index{infix}.json")
    if not os.path.isfile(index):
        return
    try:
        with open(index, encoding="utf-8") as file:
            content = json.load(file)
        weight_map, metadata = content["weight_map"], content["metadata"]
        shards = sorted(set(weight_map.values()))
        if not shards or not isinstance(metadata, dict):
            raise TypeError("weight_map names no shard, or metadata is no object")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors shards ({error!r}).") from error
    found: dict[str, set[str]] = {
        shard: set(read_header(os.path.join(folder, subfolder, shard))) for shard in shards
    }
    for name, shard in weight_map.items():
        if name not in found[shard]:
            raise CheckpointError(f"{index}: says that {name!r} is in {shard}, which does not hold it.")


def check_fit(
    files: Iterable[str],
    expected: Mapping[str, tuple[int, ...]],
    prefixes: Mapping[str, str],
    quantized: bool,
) -> None:
    """Compare the shapes in the headers with the model's.

    Args:
        files: safetensors files; others are passed over.
        expected: the model's keys and shapes.
        prefixes: beginnings (patterns) of keys in the files, and what they are in the model.
        quantized: the checkpoint is quantized, so that shapes and dtypes are the quantizer's business.

    Raises:
        CheckpointError: a tensor has another shape than the model, or a dtype that no weight has.
    """
    if quantized:
        return
    patterns = [(re.compile(f"^{old}"), new) for old, new in prefixes.items()]
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        for name, header in read_header(path).items():
            key = name if name in expected else None
            if key is None:
                renamed = (pattern.sub(new, name) for pattern, new in patterns)
                key = next((other for other in renamed if other in expected), None)
            if key is None:
                continue
            if header.shape != expected[key]:
                raise CheckpointError(
                    f"{path}: {name} has shape {list(header.shape)}, but the model that config.json describes has "
                    f"{list(expected[key])}. Weights and config.json do not belong together."
                )
            if header.dtype not in _WEIGHT_DTYPES:
                raise CheckpointError(
                    f"{path}: {name} has dtype {header.dtype}, which is no dtype of plain weights "
                    f"({', '.join(sorted(_WEIGHT_DTYPES))}), and config.json has no quantization_config for it."
                )


def check_complete(model: "PreTrainedModel", missing: Iterable[str], load_config: Any) -> None:
    """Check that a checkpoint of a model's own class gave all of its weights.

    A class may be loaded from a checkpoint of another one, as a classifier is from a language model. What such a
    checkpoint cannot have begins fresh, and transformers reports it.

    Args:
        model: the model, loaded.
        missing: names of what the checkpoint did not have and nothing is tied to.
        load_config: what transformers notes of a loading: from where, and by which quantizer.

    Raises:
        CheckpointError: config.json names the model's class, and weights of it are missing.
    """
    place = load_config.pretrained_model_name_or_path
    lost = [name for name in sorted(missing) if _is_plain_weight(model, name, load_config.hf_quantizer)]
    if not lost or place is None:  # a state dict has no config.json
        return
    architectures = model.config.architectures
    with suppress(OSError):  # the model may have been given another configuration than the checkpoint's
        content, _ = model.config.get_config_dict(place, **(load_config.download_kwargs or {}))
        architectures = content.get("architectures")
    name = type(model).__name__.removeprefix("FSDP")  # FSDP2 makes classes of its own
    if name in (architectures or ()):
        shown = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
        raise CheckpointError(
            f"{place}: config.json says that this is a {name}, but {len(lost)} of its weights are missing: {shown}. "
            "Download or copy the checkpoint again, or load it with the configuration that it was saved with. To "
            f"begin with fresh weights, build {name}(config) and load the others with "
            "load_state_dict(..., strict=False)."
        )


def _is_plain_weight(model: "PreTrainedModel", name: str, quantizer: Any) -> bool:
    """Whether a name is a parameter's, and not one that a quantizer made or left out."""
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    is_plain = type(module).__module__.startswith(("torch.nn.", "llamoe."))
    return own_name in module._parameters and (quantizer is None or is_plain)
