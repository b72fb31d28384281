"""The weight files of a folder, their headers, and the settings of the load that is running."""

import os
from collections.abc import Iterable, Iterator
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
    """Settings that one `from_pretrained` hands to functions that transformers' loader calls."""

    # Which experts to keep in RAM or on disk (`offload.OffloadRequest`).
    offload: Any = None
    # `activations` in the quantization config of `from_pretrained`'s caller; None: the folder's own config decides.
    activations: str | None = None
    # How another program has packed the folder's weights (`formats.packed.Layout`); None if none has.
    layout: Any = None
    # The folder's matrices in that layout (`quantization.Matrices`).
    matrices: Any = None


_current: ContextVar[_Loading | None] = ContextVar("llamoe_loading", default=None)


@contextmanager
def loading() -> Iterator[_Loading]:
    """Enter a load: within the context `current_loading` returns the yielded settings."""
    state = _Loading()
    token = _current.set(state)
    try:
        yield state
    finally:
        _current.reset(token)


def current_loading() -> _Loading:
    """Return the settings of the load that is running; default settings outside of `loading`."""
    return _current.get() or _Loading()


def read_header(path: str | os.PathLike, kind: str | None = None) -> dict[str, TensorHeader]:
    """Read the header of a weight file: tensor name to `TensorHeader`.

    Args:
        path: the file.
        kind: "safetensors" or "bin" (torch.save); None decides by the name's ending, as transformers does.

    Raises:
        CheckpointError: the file is missing or damaged, has a wrong size, or is a pickle that runs code or holds
            something else than a dictionary of tensors.
    """
    # `os.stat` raises a ValueError for a path with a zero byte.
    with reading(path, ValueError):
        check_regular(path)
        if kind == "safetensors" or kind is None and str(path).endswith(".safetensors"):
            return read_safetensors(path)
        content = read_torch(path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(
            f"{path}: holds a {type(content).__name__}, not a dictionary of tensors by name."
        )
    tensors = {name: value for name, value in content.items() if isinstance(value, TensorHeader)}
    if not tensors:
        raise CheckpointError(
            f"{path}: its dictionary holds no tensors, but {', '.join(content)[:99] or 'nothing'}. If the weights are "
            "in one of these, save that one alone, or convert the folder with `llamoe convert`."
        )
    return tensors


def find_weights(folder: str | os.PathLike) -> list[Path] | None:
    """Return the weight files that transformers reads in a folder: one or many, safetensors before .bin.

    None means that the folder has neither a single file nor an index of the names that transformers expects.

    Raises:
        CheckpointError: the index cannot be read, or names a file outside of the folder or of another format; or the
            folder has both a single file and an index with all of its files, and either may be the older model.
    """
    for suffix, stem in _STEMS.items():
        single, index = Path(folder, f"{stem}.{suffix}"), Path(folder, f"{stem}.{suffix}.index.json")
        if single.is_file():
            # When a single file is saved over shards, transformers removes the shards, but not their index.
            if index.is_file() and all(path.exists() for path in _read_index(index, suffix)):
                raise CheckpointError(
                    f"{folder}: has both {single.name} and {index.name} with its files. Remove the older of the two "
                    "models."
                )
            return [single]
        if index.is_file():
            return _read_index(index, suffix)
    return None


def check_files(files: Iterable[str | os.PathLike], folder: str | os.PathLike | None) -> None:
    """Raise a `CheckpointError` if a local folder names a weight file that lies outside of the folder.

    A file in the folder may be a link to another place, as in the Hub's cache.
    """
    if folder is None or not os.path.isdir(folder):
        return
    for file in map(Path, files):
        if not file.is_relative_to(folder) or ".." in file.relative_to(folder).parts:
            raise CheckpointError(f"{file}: is named in {folder}, but lies outside of that folder.")


def _read_index(index: Path, suffix: str) -> list[Path]:
    """Return the files that an index names."""
    weight_map = read_json(index, LARGE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map should be a dictionary of file names by tensor name.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if name.endswith(".safetensors") != (suffix == "safetensors"):
            raise CheckpointError(f"{index}: names {name[:200]!r}, which is no .{suffix} file.")
    files = [index.parent / name for name in names]
    check_files(files, index.parent)
    return files
