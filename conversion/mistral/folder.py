"""Reads folders in Mistral AI's format: Mistral and Mixtral.

Such a folder holds params.json and one file of weights, consolidated.safetensors or consolidated.00.pth, or several
with a slice of every large tensor each. Dense tensors have the names of LLaMA, and files are sliced along the same
axes. Q and k are rotated in neighbouring pairs, as Meta's.
"""

import os
import re
from pathlib import Path

from ...configuration import LlamoeDenseConfig, LlamoeMixtralConfig
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
from ..io import Row, read_bytes, read_json
from ..meta import llama_table
from ..tokenizers import hf_files_from_meta
from .params import OWN_KEYS, read_config, read_params

# Endings of weight files; Meta has .pth only.
_ENDINGS = ("safetensors", "pth", "pt")
# Names of mistral-inference's `MoeLayer`. Files that slice experts are unknown.
_MLP = "model.layers.{i}.mlp."
_MIXTURE = (
    Row("layers.{i}.feed_forward.gate.weight", _MLP + "gate.weight"),
    Row("layers.{i}.feed_forward.experts.{e}.w{part}.weight", _MLP + "experts.{e}.w{part}.weight"),
)
_TOKENIZER = re.compile(r"tekken\.json|tokenizer\.model(?:\.v(\d+))?")


def is_mistral(folder: Path) -> bool:
    """Whether a folder is in Mistral AI's format and not in Meta's, by params.json, else by the files of weights."""
    if not (folder / "params.json").is_file():
        return any(folder.glob("consolidated*.safetensors"))
    keys = Params.of(read_json(folder / "params.json"), "").entries.keys()
    return bool(keys & OWN_KEYS) or not any(folder.glob("consolidated*.pth"))


def open_mistral(
    folder: str | os.PathLike, *, companions: bool = True, instruct: bool | None = None
) -> Checkpoint:
    """Open a folder of Mistral AI's under Hugging Face's keys; for the arguments see `open_checkpoint`."""
    folder = Path(folder)
    paths = weight_files(folder, *_ENDINGS)
    params, left_out = read_params(read_json(folder / "params.json"), str(folder / "params.json"))
    files, dropped = open_files(paths)
    params, axis = measure(params, files, str(paths[0]))
    with naming(params):
        config = read_config(params)
        read_kept(config, folder)
    tensors, computed = read_tensors((*llama_table(axis), *_MIXTURE), files, config, str(paths[0]))
    notes = []
    if "rope_theta" not in params:
        theta = (config.rope_parameters or {})["rope_theta"]
        window = "sliding_window" if "sliding_window" in params else "no sliding_window"
        notes.append(f"{params.origin} has no rope_theta: {theta:g}, since it has {window}")
    translated = _translate_tokenizer(folder, config, instruct, notes) if companions else {}
    return Checkpoint(
        folder, "mistral", config, tensors, dropped | left_out | computed, translated, paths, notes
    )


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
