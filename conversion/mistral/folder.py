"""Read folders in Mistral AI's format: Mistral and Mixtral.

Such a folder holds params.json and weights: consolidated.safetensors, or consolidated.00.pth and so on. If a dense
model has several files, each holds a slice of every large tensor. If a mixture has several, each holds some of the
tensors whole. Outside of experts, tensors have the names of Meta's LLaMA, are sliced along the same axes, and have the
rows of q and k in the same order.

Sources: `Transformer` and `MoeLayer` of mistralai/mistral-inference; for the first release of Mixtral transformers'
former script convert_mixtral_weights_to_hf.py.
"""

import os
import re
from collections.abc import Iterable, Mapping
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
from ..io import LazyTensor, Operation, Row, by_expert, join, one_of, read_json
from ..meta import llama_table
from ..tokenizers import hf_files_from_meta
from .params import OWN_KEYS, read_config, read_params

# Endings of weight files.
_ENDINGS = ("safetensors", "pth", "pt")


class _ExpertsInOneMatrix(Operation):
    """Makes a layer's two stacks from three matrices, each with the rows of all experts: w1, w3, and w2 transposed."""

    def convert(self, tensors, sizes):
        gate, up, down = (by_expert(tensor, sizes.num_local_experts) for tensor in tensors)
        return [join([gate, up], 1), down.transpose()]


_MLP = "model.layers.{i}.mlp."
_MIXTURE = (
    Row("layers.{i}.feed_forward.gate.weight", _MLP + "gate.weight"),
    Row("layers.{i}.feed_forward.experts.{e}.w{part}.weight", _MLP + "experts.{e}.w{part}.weight"),
    # Names of the first release of Mixtral 8x7B.
    Row("layers.{i}.block_sparse_moe.gate.weight", _MLP + "gate.weight"),
    Row(
        tuple(f"layers.{{i}}.block_sparse_moe.{name}" for name in ("w1", "w3", "w2")),
        (_MLP + "experts.gate_up_proj", _MLP + "experts.down_proj"),
        _ExpertsInOneMatrix(),
    ),
)
_TOKENIZER = re.compile(r"tekken\.json|tokenizer\.model(?:\.v(\d+))?")


def is_mistral(folder: Path) -> bool:
    """Return True if a folder has Mistral AI's format, not Meta's, by the keys of params.json or the weight files."""
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
    if "moe" in params:
        files = [_join_files(files)]
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


def _join_files(files: Iterable[Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
    """Collect the whole tensors that the files hold; if several hold the same tensor, the copies must be equal."""
    copies: dict[str, list[LazyTensor]] = {}
    for file in files:
        for name, tensor in file.items():
            copies.setdefault(name, []).append(tensor)
    why = "files of a mixture should hold whole tensors, and equal copies."
    return {name: one_of(tensors, why) for name, tensors in copies.items()}


def _translate_tokenizer(
    folder: Path, config: LlamoeDenseConfig | LlamoeMixtralConfig, instruct: bool | None, notes: list[str]
) -> dict[str, bytes]:
    """Make Hugging Face's files of the newest tokenizer in a folder; if there is none, add a sentence to `notes`."""
    versions = {
        path.name: (path.suffix == ".json", int(match[1] or 0))
        for path in folder.iterdir()
        if (match := _TOKENIZER.fullmatch(path.name))
    }
    if not versions:
        notes.append(
            f"there is no tokenizer.model or tekken.json in {folder}: the result has no tokenizer. Add the file, and "
            "convert again"
        )
        return {}
    name = max(versions, key=versions.__getitem__)
    content, tuned = (folder / name).read_bytes(), is_tuned(folder, instruct)
    return hf_files_from_meta(content, config, instruct=tuned, family="mistral", origin=str(folder / name))
