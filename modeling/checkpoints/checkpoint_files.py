"""The weight files of a folder, their headers, and the context of a load."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configuration.errors import CheckpointError
from ...configuration.json_files import LARGE, check_regular, read_json, reading
from .safetensors_files import TensorHeader, read_safetensors
from .torch_files import read_torch

_STEMS = {"safetensors": "model", "bin": "pytorch_model"}


@dataclass
class _Loading:
    """The context of a load."""

    # The experts to offload (`offload.OffloadRequest`).
    offload: Any = None
    # The requested `activations` for a packed folder; None for those of its config.
    activations: str | None = None
    # The layout of another program's packed weights (`formats.packed.Layout`).
    layout: Any = None
    # The tensors in this layout (`quantization.Matrices`).
    matrices: Any = None


_current: ContextVar[_Loading | None] = ContextVar("llamoe_loading", default=None)


@contextmanager
def loading() -> Iterator[_Loading]:
    """Enter a new load's context; `current_loading` returns it."""
    state = _Loading()
    token = _current.set(state)
    try:
        yield state
    finally:
        _current.reset(token)


def current_loading() -> _Loading:
    """Return the context of the current load; an empty one outside of `loading`."""
    return _current.get() or _Loading()


def read_header(path: str | os.PathLike, kind: str | None = None) -> dict[str, TensorHeader]:
    """Read and check the header of a weight file: tensor name to header.

    `kind` is "safetensors" or "bin" (torch.save); None goes by the name, as transformers does.

    Raises:
        CheckpointError: the file is missing, cut short, or contradicts itself or its size; or it is a pickle that
            holds something else than a dictionary of tensors, or wants to run code.
    """
    # A name with a zero byte is a ValueError.
    with reading(path, ValueError):
        check_regular(path)
        if kind == "safetensors" or kind is None and str(path).endswith(".safetensors"):
            return read_safetensors(path)
        content = read_torch(path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(
            f"{path}: holds a {type(content).__name__}, not a dictionary of names to tensors."
        )
    tensors = {name: value for name, value in content.items() if isinstance(value, TensorHeader)}
    if not tensors:
        raise CheckpointError(
            f"{path}: has no tensor at its top, where transformers looks, but {', '.join(content)[:99] or 'nothing'}. "
            "If the weights are inside of that, save it by itself, or convert the folder with `llamoe convert`."
        )
    return tensors


def find_weights(folder: str | os.PathLike) -> list[Path] | None:
    """Find the weight files that transformers reads in a folder: one or many, safetensors before .bin.

    The result is None if the folder has neither a file nor an index under the expected names.

    Raises:
        CheckpointError: the index cannot be read, names a file outside of the folder or of another format, or there
            are both a single file and an index with its files, of which either may be the older one.
    """
    for suffix, stem in _STEMS.items():
        single, index = Path(folder, f"{stem}.{suffix}"), Path(folder, f"{stem}.{suffix}.index.json")
        if single.is_file():
            # A single file saved over shards leaves their index, but not their files.
            if index.is_file() and all(path.exists() for path in _read_index(index, suffix)):
                raise CheckpointError(
                    f"{folder}: holds both {single.name} and {index.name} with its files, and nothing says which are "
                    "the weights. Remove one of the two."
                )
            return [single]
        if index.is_file():
            return _read_index(index, suffix)
    return None


def _read_index(index: Path, suffix: str) -> list[Path]:
    weight_map = read_json(index, LARGE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map should say in which file each tensor is.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not _is_inside(name):
            raise CheckpointError(f"{index}: names {name[:200]!r}, which lies outside of the folder.")
        if name.endswith(".safetensors") != (suffix == "safetensors"):
            raise CheckpointError(f"{index}: names {name[:200]!r}, which is no .{suffix} file.")
    return [index.parent / name for name in names]


def _is_inside(name: str) -> bool:
    """Return True if a name stays inside the folder; the file itself may be a link out of it, as in the Hub's cache."""
    parts = re.split(r"[/\\]", name)
    is_name = "\0" not in name and all(len(part.encode(errors="replace")) <= 255 for part in parts)
    return is_name and ".." not in parts and bool(parts[0]) and ":" not in parts[0]
