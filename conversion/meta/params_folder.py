"""What Meta's and Mistral AI's folders have in common: params.json beside consolidated files, and llamoe.json."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from ..checkpoint import Checkpoint, Report, carry_out, check_model, tie_heads, tied_head
from ..hf import fuse_experts
from ..io import LazyTensor, Plan, Table, open_pickle, open_safetensors, read_json, read_through, sources_of
from ..options import WriteOptions
from .config_to_params import add_kept
from .params_to_config import Params

_KEPT = "llamoe.json"
_TUNED = re.compile(r"instruct|chat", re.IGNORECASE)
_Config = TypeVar("_Config", bound=LlamoeBaseConfig)


def open_files(paths: Sequence[Path]) -> tuple[list[dict[str, LazyTensor]], dict[str, str]]:
    """Each file's tensors by name, and the entries that are not tensors, with the reason why they are left out."""
    files: list[dict[str, LazyTensor]] = []
    dropped: dict[str, str] = {}
    for path in paths:
        tensors, others = (open_safetensors(path), {}) if path.suffix == ".safetensors" else open_pickle(path)
        files.append(tensors)
        for name, kind in others.items():
            state = name.endswith("._extra_state")
            dropped[name] = "no weight: state of a layer in training" if state else f"no tensor but a {kind}"
    return files, dropped


def read_whole_config(folder: Path, params: Params, read: Callable[[], _Config]) -> _Config:
    """The configuration that `read` makes of params.json, with the fields of llamoe.json, if there is one.

    Raises:
        CheckpointError: the two contradict each other, or make no configuration.
    """
    try:
        config = read()
        if (folder / _KEPT).is_file():
            add_kept(config, read_json(folder / _KEPT), str(folder / _KEPT))
            config.validate()
        return config
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{params.origin}: {error}") from error


def read_tensors(
    table: Table, files: Sequence[Mapping[str, LazyTensor]], config: LlamoeBaseConfig, place: str
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """A model's tensors from those of all files, and names that are left out, with the reason."""
    tensors, dropped = read_through(table, files, config)
    tensors = fuse_experts(tensors)
    for reason in tie_heads(config, tensors).values():
        dropped["output.weight"] = reason
    return check_model(config, tensors, place, lambda name: sources_of(table, name) or [name]), dropped


def is_tuned(folder: Path, instruct: bool | None) -> bool | None:
    """Whether a model was tuned for conversations: as it is said, else by the folder's name; None if unknown."""
    if instruct is not None:
        return instruct
    folder = folder.absolute()
    name = folder.parent.name if folder.name == "original" else folder.name
    # A name that does not show it may still belong to a tuned model.
    return True if _TUNED.search(name) else None


def tensors_with_head(checkpoint: Checkpoint, notes: list[str], whose: str) -> dict[str, LazyTensor]:
    """The checked tensors of a model to write; a tied head is a copy of the embedding, and `notes` says so."""
    tensors = check_model(checkpoint.config, checkpoint.tensors, str(checkpoint.path))
    for head, embedding in tied_head(checkpoint.config).items():
        tensors[head] = tensors[embedding]
        notes.append(
            f"the embedding serves as the output head (tie_word_embeddings), which {whose} does not know: "
            "output.weight is a copy"
        )
    return tensors


def write_tokenizer(find: Callable[[], dict[str, bytes]], what: str, notes: list[str]) -> dict[str, bytes]:
    """The tokenizer's file by name; if there is none, a note: the weights are useful without it."""
    try:
        found = find()
    except CheckpointError as error:
        notes.append(f"no {what} is written: {error}")
        return {}
    if not found:
        notes.append(f"the source has no tokenizer: no {what} is written")
    return found


def write_folder(
    checkpoint: Checkpoint,
    target: Path,
    to: str,
    options: WriteOptions,
    plan: Plan,
    contents: tuple[dict[str, Any], dict[str, Any]],
    notes: list[str],
) -> Report:
    """Write the weights of a plan, and last `contents`, those of params.json and of llamoe.json."""
    params, kept = contents
    plan.last = {**({_KEPT: to_json(kept)} if kept else {}), "params.json": to_json(params)}
    report = carry_out(plan, checkpoint, target, to, options)
    report.notes.extend(notes)
    return report
