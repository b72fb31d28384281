"""Read folders with params.json and a weight file for each model-parallel rank: consolidated.00.pth and so on.

All files hold tensors of the same names. A large tensor is cut into slices, one for each file; each file has a copy of
a small one.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...configuration.base import LlamoeBaseConfig
from ...configuration.checks import listed
from ...configuration.errors import CheckpointError
from ..checkpoint import check_model, tie_heads
from ..hf import fuse_experts
from ..io import LazyTensor, Table, open_weights, read_through
from .params import Params

# For each file, name to tensor.
Files = Sequence[Mapping[str, LazyTensor]]

_TUNED = re.compile(r"instruct|chat", re.IGNORECASE)


def weight_files(folder: Path, *endings: str) -> list[Path]:
    """List the weight files, sorted by number: consolidated.00.pth and so on, or one consolidated.pth.

    Raises:
        CheckpointError: there is none; or a number is missing or occurs twice, which shapes would not always show.
    """
    pattern = re.compile(rf"consolidated(?:\.(\d+))?\.(?:{'|'.join(endings)})")
    matches = {path: match for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    if not matches:
        raise CheckpointError(f"{folder}: holds params.json, but no consolidated weights.")
    numbers = {path: int(match[1] or 0) for path, match in matches.items()}
    paths = sorted(numbers, key=numbers.__getitem__)
    if [numbers[path] for path in paths] != list(range(len(paths))):
        names = listed(sorted(path.name for path in paths))
        raise CheckpointError(f"{folder}: holds {names}; expected one file of each number from 00 on.")
    return paths


def open_files(paths: Sequence[Path]) -> tuple[list[dict[str, LazyTensor]], dict[str, str]]:
    """Open the files: return each file's tensors by name, and a reason for each entry that is left out."""
    files: list[dict[str, LazyTensor]] = []
    dropped: dict[str, str] = {}
    for path in paths:
        tensors, others = open_weights(path)
        files.append(tensors)
        for name, kind in others.items():
            state = name.endswith("._extra_state")
            dropped[name] = "no weight: state of a layer in training" if state else f"no tensor but a {kind}"
    return files, dropped


def measure(params: Params, files: Files, origin: str) -> tuple[Params, int]:
    """Add the tensors' vocabulary size and dtype to `params`; return it and the embedding's axis that is sliced.

    Raises:
        CheckpointError: params.json contradicts the tensors or the number of files.
    """
    dim, count, first = params.integer("dim"), len(files), files[0]
    for name in ("tok_embeddings.weight", "norm.weight"):
        if name not in first:
            raise CheckpointError(f"{origin}: {name} missing.")
    embedding = first["tok_embeddings.weight"]
    if embedding.ndim != 2:
        raise CheckpointError(f"{embedding.origin} has shape {list(embedding.shape)}; expected: a matrix.")
    rows, columns = embedding.shape
    # Llama 3 and 4 slice rows; earlier models slice columns.
    axis = 0 if columns == dim else 1
    kv_heads = params.integer("n_kv_heads", params.integer("n_heads"))
    for name in ("n_heads", "n_kv_heads"):
        if (heads := params.integer(name, kv_heads)) % count:
            raise CheckpointError(
                f"{params.origin}: {name} = {heads} cannot be divided by the {count} files; each holds whole heads."
            )
    for name, tensor in first.items():
        # Only `rope.freqs` shows the size of a head.
        if name.endswith("rope.freqs") and tensor.ndim == 1 and 2 * tensor.shape[0] != params.head_dim:
            raise CheckpointError(
                f"{tensor.origin} has {tensor.shape[0]} frequencies, for heads of {2 * tensor.shape[0]} channels, but "
                f"{params.origin} says n_heads = {params.integer('n_heads')}, heads of {params.head_dim} channels."
            )
    vocab_size = rows if axis else rows * count
    return params.completed(vocab_size=vocab_size, dtype=first["norm.weight"].dtype_name), axis


def read_tensors(
    table: Table, files: Files, config: LlamoeBaseConfig, origin: str
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Join the tensors of all files under Hugging Face's keys.

    `origin` is the first file or the folder, for errors.

    Returns:
        key to tensor; and for names that are left out, the reason.
    """
    tensors, dropped = read_through(table, files, config)
    tensors = fuse_experts(tensors)
    for reason in tie_heads(config, tensors).values():
        dropped["output.weight"] = reason
    return check_model(config, tensors, origin), dropped


def is_tuned(folder: Path, instruct: bool | None) -> bool | None:
    """Return `instruct` unless it is None; then True if the folder's name shows a model tuned for chats, else None."""
    if instruct is not None:
        return instruct
    folder = folder.absolute()
    name = folder.parent.name if folder.name == "original" else folder.name
    # None and not False, since a tuned model's folder may have another name.
    return True if _TUNED.search(name) else None
