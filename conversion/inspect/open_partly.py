"""Opens as much of a checkpoint as can be opened, for a description of damaged and partial ones."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import Any

from ...configuration import PRESETS, preset
from ...configuration.errors import CheckpointError
from ...configuration.json_files import reading
from ...configuration.presets import nearest_preset
from ...modeling.checkpoints import UNFINISHED, find_weights
from ..checkpoint import Checkpoint, refuse_adapter
from ..hf import read_config, take_quantization, unpack_tensors
from ..io import LazyTensor, open_weights, read_json
from ..open import open_checkpoint
from .describe import OF_CLIP

_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")
_EXPECTED = (
    "expected a folder of Meta or Hugging Face, a file of weights (safetensors, or of torch.save), a config.json or "
    "the name of a preset"
)


def open_partly(given: str | os.PathLike | Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Open as much as can be opened: a checkpoint, a configuration, a preset, or files of weights.

    Returns:
        what was found, its `config` None where there is none; and sentences on what is wrong with it.

    Raises:
        CheckpointError: nothing can.
    """
    if isinstance(given, Checkpoint):
        return given, []
    path = Path(given)
    # The name may be too long, or the folder without permission.
    with reading(given):
        is_there, is_file, is_folder = path.exists(), path.is_file(), path.is_dir()
    if not is_there and str(given) in PRESETS:
        return Checkpoint(path, "preset", preset(str(given)), {}), []
    if not is_there or not str(given):
        near = nearest_preset(given)
        # The sizes of a published model, where no path was meant.
        names = "" if {"/", os.sep} & set(str(given)) else f" Presets: {', '.join(PRESETS)}."
        hint = f" Did you mean the preset {near!r}?" if near else names
        raise CheckpointError(f"{str(given)!r}: no such folder or file, and no preset of that name.{hint}")
    if not is_file and not is_folder:
        raise CheckpointError(f"{given}: is neither a file nor a folder; {_EXPECTED}.")
    refuse_adapter(path)
    if is_file and path.suffix == ".json":
        if "model_type" not in read_json(path):
            raise CheckpointError(
                f"{path}: says no model_type, as the config.json of a model does; {_EXPECTED}."
            )
        config = read_config(path)
        quantization = take_quantization(config, path)
        return Checkpoint(path, "configuration", config, {}, quantization=quantization), []
    if is_file:
        _check_begin(path)
    with reading(given):
        try:
            return open_checkpoint(path, companions=False), []
        except (OSError, ValueError) as error:
            found, problems = _survey(path, error)
            if found.config is not None or found.tensors:
                return found, problems
            raise


def _check_begin(path: Path) -> None:
    """Refuse a file that clearly holds no weights, with a better message than a reader of weights has."""
    with reading(path), open(path, "rb") as file:
        begin = file.read(4096)
    if path.suffix == ".safetensors" or begin.startswith((b"PK\x03\x04", b"\x80")) or begin[8:9] == b"{":
        # The reader names any damage.
        return
    try:
        # Incremental, since the last character may be incomplete.
        codecs.getincrementaldecoder("utf-8")().decode(begin)
        is_text = b"\0" not in begin
    except UnicodeDecodeError:
        is_text = False
    if is_text or path.suffix not in _SUFFIXES:
        what = "is empty" if not begin else "is a text" if is_text else "is another kind of file"
        raise CheckpointError(f"{path}: {what} and holds no weights; {_EXPECTED}.")


def _survey(path: Path, error: Exception) -> tuple[Checkpoint, list[str]]:
    """Look at each file alone where the whole cannot be opened."""
    missing = _missing_shards(path)
    told = any(str(error).startswith(f"{shard}:") for shard in missing)
    problems = [] if told else [str(error)]
    problems += [f"{shard}: missing, with {held}" for shard, held in missing.items()]
    files = [path]
    config: Any = None
    if path.is_dir():
        files = sorted(file for suffix in _SUFFIXES for file in path.glob(f"*{suffix}"))
        try:
            config = read_config(path / "config.json")
        except CheckpointError as problem:
            problems.append(str(problem))
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        try:
            tensors.update(open_weights(file))
        except (OSError, ValueError) as problem:
            problems.append(str(problem))
    stored, quantization = {}, None
    if config is not None:
        try:
            quantization = take_quantization(config, path / "config.json")
            if quantization is not None and tensors:
                stored, tensors = tensors, unpack_tensors(tensors, config, quantization, path, problems)
        except CheckpointError as problem:
            problems.append(str(problem))
            quantization = None
    kind = "partial"
    is_unfinished = path.is_dir() and (path / UNFINISHED).exists()
    if config is not None and not files and not missing and not is_unfinished:
        kind, problems = "configuration", []
    elif path.is_file() and tensors:
        kind = "weights"
        if not any(map(OF_CLIP.search, tensors)):
            # Drop the complaint that a file of another model is not a tower.
            problems = []
    found = Checkpoint(path, kind, config, tensors, sources=files, quantization=quantization, stored=stored)
    return found, list(dict.fromkeys(problems))


def _missing_shards(folder: Path) -> dict[str, str]:
    """Missing files that the index names, with the tensors that they should hold."""
    try:
        found = find_weights(folder)
    # Opening the folder has already reported a damaged index.
    except (OSError, ValueError):
        return {}
    missing = {}
    for shard in found.files if found is not None else ():
        if not shard.is_file():
            names = [name for name, its in found.weight_map.items() if its == shard.name]
            missing[str(shard)] = (
                f"{len(names):,} tensors ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})"
            )
    return missing
