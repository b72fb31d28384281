"""Reads folders in Mistral AI's format: Mistral, Mixtral, and the first releases of both.

Such a folder holds params.json and one file of weights, consolidated.safetensors or consolidated.00.pth. The first
releases have several: of Mixtral 8x7B each holds some of the tensors, of Mistral 7B each a slice of every large one.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ...configuration import LlamoeDenseConfig, LlamoeMixtralConfig
from ...configuration.errors import CheckpointError
from ..checkpoint import Checkpoint
from ..consolidated import (
    Params,
    is_tuned,
    measure,
    naming,
    open_files,
    read_kept,
    read_tensors,
    weight_files,
)
from ..io import LazyTensor, one_of, read_bytes, read_json
from ..tokenizers import hf_files_from_meta
from .name_tables import mistral_table
from .params import read_config, read_params, whose_params

# Endings of weight files; Meta has .pth only.
_ENDINGS = ("safetensors", "pth", "pt")
_TOKENIZER = re.compile(r"tekken\.json|tokenizer\.model(?:\.v(\d+))?")


def is_mistral(folder: Path) -> bool:
    """Whether a folder is in Mistral AI's format and not in Meta's, by params.json, else by the files of weights."""
    endings = {ending for ending in _ENDINGS if any(folder.glob(f"consolidated*.{ending}"))}
    whose = None
    if (folder / "params.json").is_file():
        try:
            whose = whose_params(read_json(folder / "params.json"))
        except CheckpointError:
            # Opening the folder names the damage.
            pass
    return whose == "mistral" or (whose is None and bool(endings) and "pth" not in endings)


def open_mistral(
    folder: str | os.PathLike, *, companions: bool = True, instruct: bool | None = None
) -> Checkpoint:
    """Open a folder of Mistral AI's under Hugging Face's keys; for the arguments see `open_checkpoint`."""
    folder = Path(folder)
    paths = weight_files(folder, *_ENDINGS)
    params, left_out = read_params(read_json(folder / "params.json"), str(folder / "params.json"))
    files, dropped = open_files(paths)
    files = _join_files(paths, files, params)
    place = str(paths[0] if len(paths) == 1 else folder)
    params, axis = measure(params, files, place)
    with naming(params):
        config = read_config(params)
        read_kept(config, folder)
    table = mistral_table(axis, any(".block_sparse_moe." in name for name in files[0]))
    tensors, computed = read_tensors(table, files, config, place)
    notes = []
    if "rope_theta" not in params:
        theta = (config.rope_parameters or {})["rope_theta"]
        window = "sliding_window" if "sliding_window" in params else "no sliding_window"
        notes.append(f"{params.origin} has no rope_theta: {theta:g}, since it has {window}")
    translated = _translate_tokenizer(folder, config, instruct, notes) if companions else {}
    return Checkpoint(
        folder, "mistral", config, tensors, dropped | left_out | computed, translated, paths, notes
    )


def _join_files(
    paths: Sequence[Path], files: list[dict[str, LazyTensor]], params: Params
) -> list[dict[str, LazyTensor]]:
    """The files as they are, if they hold slices; else all their tensors as those of one file."""
    everyone = list(dict.fromkeys(name for file in files for name in file))
    in_all = [name for name in everyone if all(name in file for file in files)]
    # Sliced files have the same names. Where a few are missing, one is damaged, and `read_through` says so.
    if 2 * len(in_all) > len(everyone):
        if len(files) > 1 and "moe" in params:
            raise CheckpointError(
                f"{paths[0].parent}: each of the {len(files)} files holds {in_all[0]}, as if sliced, and "
                f"{params.origin} has moe; a mixture is read with each tensor whole in one file."
            )
        return files
    why = "a tensor that several files hold should be the same. They do not belong together."
    copies = {name: [file[name] for file in files if name in file] for name in everyone}
    return [{name: one_of(tensors, why) for name, tensors in copies.items()}]


def _translate_tokenizer(
    folder: Path, config: LlamoeDenseConfig | LlamoeMixtralConfig, instruct: bool | None, notes: list[str]
) -> dict[str, bytes]:
    """Hugging Face's files of the newest tokenizer in a folder; `notes` says if there is none."""
    found = {
        path.name: (path.suffix == ".json", int(match[1] or 0))
        for path in folder.iterdir()
        if (match := _TOKENIZER.fullmatch(path.name))
    }
    if not found:
        notes.append(
            f"there is no tokenizer.model or tekken.json in {folder}: the result has no tokenizer. Add it there, and "
            "convert again"
        )
        return {}
    name = max(found, key=found.__getitem__)
    content, tuned = read_bytes(folder / name), is_tuned(folder, instruct)
    return hf_files_from_meta(content, config, instruct=tuned, family="mistral", origin=str(folder / name))
