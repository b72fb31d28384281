"""Reads and writes folders in Mistral AI's format: Mistral, Mixtral, and the first releases of both.

Such a folder holds params.json and one file of weights, consolidated.safetensors or consolidated.00.pth. The first
releases have several: of Mixtral 8x7B each holds some of the tensors, of Mistral 7B each a slice of every large one.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...configuration import LlamoeDenseConfig, LlamoeMixtralConfig
from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from ..checkpoint import (
    Checkpoint,
    Report,
    carry_out,
    check_model,
    tie_heads,
)
from ..hf import fuse_experts, split_experts
from ..io import (
    LazyTensor,
    Plan,
    one_of,
    open_pickle,
    open_safetensors,
    read_bytes,
    read_json,
    read_through,
    sources_of,
    write_through,
)
from ..meta import KEPT, Params, add_kept, is_tuned, measure, weight_files
from ..options import DEFAULTS, WriteOptions
from ..tokenizers import hf_files_from_meta, mistral_tokenizer_file
from .name_tables import check_experts, mistral_table
from .params import read_config, read_params, whose_params, write_params

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
    """Open a folder of Mistral AI's: Mistral or Mixtral.

    Args:
        folder: it holds params.json and consolidated.safetensors, consolidated.00.pth, or the files of a first release.
        companions: whether to convert the tokenizer.
        instruct: whether the model was tuned for conversations; None goes by the folder's name ("chat", "instruct").
            For its effects see `hf_files_from_meta`.

    Returns:
        the checkpoint, under Hugging Face's keys.

    Raises:
        CheckpointError: a file is missing or damaged, the model is of another kind, the tokenizer is another model's,
            or params.json and the tensors contradict each other.
    """
    folder = Path(folder)
    paths = _weight_paths(folder)
    params, left_out = read_params(read_json(folder / "params.json"), str(folder / "params.json"))
    files, dropped = _open_files(paths, params)
    place = str(paths[0] if len(paths) == 1 else folder)
    # A model whose head is the embedding may be stored without one.
    lent = {"output.weight": "tok_embeddings.weight"} if params.flag("tied_embeddings") else {}
    measured = [
        {**{name: file[other] for name, other in lent.items() if other in file}, **file} for file in files
    ]
    params, seen, axis = measure(params, measured, 2)
    if len(files) == 1:
        check_experts(params, files[0], place)
    try:
        config = read_config(params, seen)
        if (folder / KEPT).is_file():
            config = add_kept(config, read_json(folder / KEPT), str(folder / KEPT))
            config.validate()
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{params.origin}: {error}") from error
    table = mistral_table(axis)
    tensors, computed = read_through(table, files, config)
    tensors = fuse_experts(tensors)
    if config.tie_word_embeddings and (heads := tie_heads(tensors)):
        dropped["output.weight"] = next(iter(heads.values()))
    tensors = check_model(config, tensors, place, lambda name: sources_of(table, name) or [name])
    notes = []
    if "rope_theta" not in params:
        theta = (config.rope_parameters or {})["rope_theta"]
        window = "sliding_window" if "sliding_window" in params else "no sliding_window"
        notes.append(f"{params.origin} has no rope_theta: {theta:g}, since it has {window}")
    translated, more_notes = _translate_tokenizer(folder, config, instruct) if companions else ({}, [])
    return Checkpoint(
        folder,
        "mistral",
        config,
        tensors,
        dropped | left_out | computed,
        translated,
        paths,
        notes + more_notes,
    )


def _weight_paths(folder: Path) -> list[Path]:
    found = {ending: sorted(folder.glob(f"consolidated*.{ending}")) for ending in _ENDINGS}
    endings = [ending for ending, paths in found.items() if paths]
    if len(endings) > 1:
        first, second = (found[ending][0].name for ending in endings[:2])
        raise CheckpointError(f"{folder}: holds {first} and {second}. Remove what is not the model.")
    if not endings and (folder / "params.json").is_file():
        raise CheckpointError(
            f"{folder}: holds params.json, but neither consolidated.safetensors nor consolidated.00.pth."
        )
    return weight_files(folder, *endings)


def _open_files(paths: Sequence[Path], params: Params) -> tuple[list[dict[str, LazyTensor]], dict[str, str]]:
    """The tensors, of one file or as slices of several; and the entries that are no tensors, with the reason."""
    files: list[dict[str, LazyTensor]] = []
    dropped: dict[str, str] = {}
    for path in paths:
        tensors, others = (open_safetensors(path), {}) if path.suffix == ".safetensors" else open_pickle(path)
        files.append(tensors)
        dropped |= {name: f"no tensor but a {kind}" for name, kind in others.items()}
    everyone = list(dict.fromkeys(name for file in files for name in file))
    in_all = [name for name in everyone if all(name in file for file in files)]
    # Sliced files have the same names. Where a few are missing, one is damaged, and `read_through` says so.
    if 2 * len(in_all) > len(everyone):
        if len(files) > 1 and "moe" in params:
            raise CheckpointError(
                f"{paths[0].parent}: each of the {len(files)} files holds {in_all[0]}, as if sliced, and "
                f"{params.origin} has moe; a mixture is read with each tensor whole in one file."
            )
        return files, dropped
    why = "a tensor that several files hold should be the same. They do not belong together."
    copies = {name: [file[name] for file in files if name in file] for name in everyone}
    return [{name: one_of(tensors, why) for name, tensors in copies.items()}], dropped


def _translate_tokenizer(
    folder: Path, config: LlamoeDenseConfig | LlamoeMixtralConfig, instruct: bool | None
) -> tuple[dict[str, bytes], list[str]]:
    """Hugging Face's files of the newest tokenizer in a folder, or a note that there is none."""
    found = {
        path.name: (path.suffix == ".json", int(match[1] or 0))
        for path in folder.iterdir()
        if (match := _TOKENIZER.fullmatch(path.name))
    }
    if not found:
        return {}, [f"there is no tokenizer.model or tekken.json in {folder}: the result has no tokenizer"]
    name = max(found, key=found.__getitem__)
    content = read_bytes(folder / name)
    # A name that does not show it may still belong to a tuned model.
    tuned = instruct if instruct is not None else is_tuned(folder) or None
    files = hf_files_from_meta(content, config, instruct=tuned, family="mistral", origin=str(folder / name))
    return {name: content, **files}, []


def save_mistral(
    checkpoint: Checkpoint, target: str | os.PathLike, options: WriteOptions = DEFAULTS
) -> Report:
    """Write a checkpoint in Mistral AI's format, for mistral-inference and other readers: one consolidated.safetensors.

    params.json has the keys of mistral-inference. Other fields that do not change the output go into llamoe.json, and
    `open_mistral` reads them back.

    Args:
        checkpoint: a dense decoder or a Mixtral.
        target: a folder that does not exist or is empty.
        options: how it is written.

    Raises:
        ValueError: mistral-inference cannot compute the model, the target is in use, or a tensor is missing, unknown,
            of another shape, or not finite.
        OSError: the disk is full or fails.
    """
    begun = time.monotonic()
    target, config = Path(target), checkpoint.config
    if not isinstance(config, (LlamoeDenseConfig, LlamoeMixtralConfig)):
        raise ValueError(
            f"{checkpoint.path}: is a {config.model_type}, and mistral-inference computes dense decoders and Mixtral."
        )
    params, kept = write_params(config)
    tokenizer, notes = _write_tokenizer(checkpoint.companions, config)
    tensors = check_model(config, checkpoint.tensors, str(checkpoint.path))
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        notes.append(
            "the embedding serves as the output head (tie_word_embeddings), which mistral-inference does not know: "
            "output.weight is a copy"
        )
    tensors = split_experts(tensors)
    if options.cast_to is not None:
        tensors = {name: tensor.cast(options.cast_to) for name, tensor in tensors.items()}
    weights = write_through(mistral_table(), tensors, 1, config)[0]
    plan = Plan(
        [{"consolidated.safetensors": weights}],
        before=tokenizer,
        last={**({KEPT: to_json(kept)} if kept else {}), "params.json": to_json(params)},
    )
    report = carry_out(plan, checkpoint, target, "mistral", begun, options)
    report.notes.extend(notes)
    return report


def _write_tokenizer(
    companions: Mapping[str, bytes], config: LlamoeDenseConfig | LlamoeMixtralConfig
) -> tuple[dict[str, bytes], list[str]]:
    """The tokenizer's file by name, or notes on why there is none; the weights are useful without it."""
    try:
        found = mistral_tokenizer_file(companions, config)
    except CheckpointError as error:
        return {}, [f"no tokenizer is written: {error}"]
    return found, [] if found else ["the source has no tokenizer: none is written"]
