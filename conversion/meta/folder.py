"""Reads and writes folders in Meta's format: LLaMA 1, 2 and 3, and Llama 4 with its vision tower.

Such a folder holds params.json and one weight file for each model-parallel rank: consolidated.00.pth and so on. All
have the same names, and each holds its slice of every large tensor. tokenizer.model lies in the folder or one level
up. `name_tables` has the names, `sizes` the sizes, `params_to_config` and `config_to_params` the parameters.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...configuration import LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeVisionConfig, count_parameters
from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...configuration.json_files import to_json
from ..checkpoint import (
    Checkpoint,
    Report,
    carry_out,
    check_model,
    tie_heads,
)
from ..io import (
    LazyTensor,
    Plan,
    Slot,
    are_equal,
    open_pickle,
    read_bytes,
    read_json,
    read_through,
    same_place,
    sources_of,
    write_through,
)
from ..options import DEFAULTS, WriteOptions, check_at_least
from ..tokenizers import check_tokenizer, hf_files_from_meta, looks_like_table, meta_tokenizer_model
from .config_to_params import add_kept, needs_own_scaling, write_params
from .name_tables import STYLES, check_division, llama4_table, llama_table
from .params_to_config import (
    LARGEST_SENTENCEPIECE,
    LLAMA3_THETA,
    Params,
    check_entries,
    is_llama_32,
    note_defaults,
    read_config,
)
from .sizes import find_generation, measure, weight_files

KEPT = "llamoe.json"
_TUNED = re.compile(r"instruct|chat", re.IGNORECASE)
# Most bytes of weights in a file of Meta's releases, Llama 4's excepted, and most files.
_LARGEST_FILE, _MOST_FILES = 17.5e9, 8
# Projections that are fused in one tensor of a file; each needs a slot of its own to be remembered in.
_SLOTS = {"k_proj": 1, "up_proj": 1, "v_proj": 2}


def open_meta(
    folder: str | os.PathLike, *, companions: bool = True, instruct: bool | None = None
) -> Checkpoint:
    """Open a folder of Meta's: LLaMA 1, 2 or 3, or Llama 4.

    Args:
        folder: it holds params.json and consolidated.00.pth to consolidated.NN.pth, or one consolidated.pth.
        companions: whether to convert the tokenizer, which takes seconds for Llama 4's.
        instruct: whether the model was tuned for conversations; None goes by the folder's name ("chat", "instruct").
            For its effects see `hf_files_from_meta`.

    Returns:
        the checkpoint, under Hugging Face's keys.

    Raises:
        CheckpointError: a file is missing or damaged, the weights are quantized, the tokenizer is another model's, or
            params.json and the tensors, or the weight files, contradict each other.
    """
    folder = Path(folder)
    paths = weight_files(folder)
    params = Params.of(read_json(folder / "params.json"), str(folder / "params.json"))
    dropped: dict[str, str] = {}
    files = []
    for file in paths:
        tensors, others = open_pickle(file)
        files.append(tensors)
        for name, kind in others.items():
            state = name.endswith("._extra_state")
            dropped[name] = "no weight: state of a layer in training" if state else f"no tensor but a {kind}"
    path, tokenizer = _find_tokenizer(folder)
    generation = find_generation(params, files, tokenizer)
    dropped |= check_entries(params, generation == 4)
    is_tied = _head_is_embedding(params, files)
    lent = {"output.weight": "tok_embeddings.weight"} if is_tied else {}
    measured = [{**{name: file[other] for name, other in lent.items()}, **file} for file in files]
    params, seen, axis = measure(params, measured, generation)
    # A name that does not show it may still belong to a tuned model.
    tuned = instruct if instruct is not None else is_tuned(folder) or None
    seen = replace(seen, instruct=bool(tuned))
    try:
        config = read_config(params, seen)
        config.tie_word_embeddings = is_tied
        if (folder / KEPT).is_file():
            config = add_kept(config, read_json(folder / KEPT), str(folder / KEPT))
            config.validate()
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{params.origin}: {error}") from error
    table = llama4_table(config) if seen.generation == 4 else llama_table(axis)
    tensors, left_out = read_through(table, files, config)
    if config.get_text_config().tie_word_embeddings and (heads := tie_heads(tensors)):
        dropped["output.weight"] = next(iter(heads.values()))
    tensors = check_model(config, tensors, str(paths[0]), lambda name: sources_of(table, name))
    translated, notes = {}, note_defaults(params, config)
    if path is None or tokenizer is None:
        notes.append(f"there is no tokenizer.model in {folder} or above it: the result has no tokenizer")
    elif companions:
        family = f"llama-{seen.generation}" if looks_like_table(tokenizer) else None
        translated = hf_files_from_meta(tokenizer, config, instruct=tuned, family=family, origin=str(path))
    kind = "meta-llama4" if seen.generation == 4 else "meta-llama"
    return Checkpoint(folder, kind, config, tensors, dropped | left_out, translated, paths, notes)


def _head_is_embedding(params: Params, files: Sequence[Mapping[str, LazyTensor]]) -> bool:
    """Whether a dense model's head is its embedding: the same bytes of a file; of Llama 3.2, a copy, too, or none."""
    pairs = [(file.get("tok_embeddings.weight"), file.get("output.weight")) for file in files]
    if all(
        embedding is not None and head is not None and same_place(embedding, head)
        for embedding, head in pairs
    ):
        return True
    return is_llama_32(params) and all(
        embedding is not None and (head is None or are_equal(embedding, head)) for embedding, head in pairs
    )


def is_tuned(folder: Path) -> bool:
    """Whether a folder's name says that its model was tuned for conversations."""
    folder = folder.absolute()
    name = folder.parent.name if folder.name == "original" else folder.name
    return _TUNED.search(name) is not None


def _find_tokenizer(folder: Path) -> tuple[Path | None, bytes | None]:
    """tokenizer.model of the folder or, as in the releases of LLaMA 1 and 2, of the folder above."""
    for path in (folder / "tokenizer.model", folder.absolute().parent / "tokenizer.model"):
        if path.is_file():
            return path, read_bytes(path)
    return None, None


def save_meta(
    checkpoint: Checkpoint,
    target: str | os.PathLike,
    options: WriteOptions = DEFAULTS,
    *,
    shards: int | None = None,
    style: str = "release",
) -> Report:
    """Write a checkpoint in Meta's format, for Meta's code and other readers of that format.

    Dense models are written as Llama 3 if their tokenizer, vocabulary or rotary embedding is Llama 3's, else as LLaMA
    2; mixtures as Llama 4. params.json holds the keys that Meta's code has. Other fields that do not change the output
    (context length, token ids, training options) go into llamoe.json, and `open_meta` reads them back.

    Args:
        checkpoint: what to write.
        target: a folder that does not exist or is empty.
        options: how it is written.
        shards: number of model-parallel files, written together; it divides the key/value heads and the sizes. None
            takes as many as Meta's releases of that size have: 17.5 GB a file, at most eight files.
        style: for Llama 4, "release" for the releases' fused names, "unfused" for the names of Meta's modules.

    Raises:
        ValueError: an option is unknown, a size is not divisible by the number of files, Meta's code cannot compute a
            field of the configuration, the target is in use, or a tensor is missing, unknown, of another shape, or
            not finite.
        OSError: the disk is full or fails.
    """
    begun = time.monotonic()
    target, config = Path(target), checkpoint.config
    if style not in STYLES:
        raise ValueError(f"style = {style!r}: valid are {', '.join(map(repr, STYLES))}.")
    if isinstance(config, LlamoeVisionConfig):
        raise ValueError(f"{checkpoint.path}: is a vision tower alone, for which Meta has no format.")
    if isinstance(config, LlamoeMixtralConfig):
        raise ValueError(
            f"{checkpoint.path}: is a Mixtral, which Meta's code does not compute; give to = 'mistral'."
        )
    tokenizer, notes = _write_tokenizer(checkpoint.companions, config)
    generation = _generation_to_write(config, tokenizer)
    params, kept = write_params(config, generation)
    embedding_axis = 0 if generation > 2 else 1
    tensors = check_model(config, checkpoint.tensors, str(checkpoint.path))
    if config.get_text_config().tie_word_embeddings:
        embedding = next(name for name in tensors if name.endswith("model.embed_tokens.weight"))
        tensors[embedding.replace("model.embed_tokens", "lm_head")] = tensors[embedding]
        notes.append(
            "the embedding serves as the output head (tie_word_embeddings); Meta's format has no such thing: "
            "output.weight is a copy"
        )
    if needs_own_scaling(params):
        notes.append(
            "Llama 3's own code scales rotary embeddings by 8 and 4 whatever params.json says; rope_scaling_factor and "
            "rope_high_freq_factor are written for other readers"
        )
    if shards is None:
        shards = _usual_files(config, tensors, options.cast_to, embedding_axis)
    check_at_least(1, shards=shards)
    check_division(config, shards, embedding_axis)
    table = llama_table(embedding_axis) if generation < 4 else llama4_table(config, style)
    slots = [Slot() for _ in range(1 + max(_SLOTS.values()))]
    for name, tensor in tensors.items():
        tensor = tensor if options.cast_to is None else tensor.cast(options.cast_to)
        # A block is read once, and every file takes its slice of it.
        tensors[name] = tensor.remember(slots[_SLOTS.get(name.split(".")[-2], 0)])
    parts = write_through(table, tensors, shards, config)
    plan = Plan(
        [{f"consolidated.{number:02d}.pth": part for number, part in enumerate(parts)}],
        before={} if tokenizer is None else {"tokenizer.model": tokenizer},
        last={**({KEPT: to_json(kept)} if kept else {}), "params.json": to_json(params)},
        identity={"style": style},
    )
    report = carry_out(plan, checkpoint, target, "meta", begun, options)
    report.notes.extend(notes)
    return report


def _write_tokenizer(
    companions: Mapping[str, bytes], config: LlamoeBaseConfig
) -> tuple[bytes | None, list[str]]:
    """tokenizer.model, or notes on why there is none; the weights are useful without it."""
    try:
        content = meta_tokenizer_model(companions, vocab_size=config.get_text_config().vocab_size)
        if content is not None:
            check_tokenizer(content, config)
    except CheckpointError as error:
        return None, [f"no tokenizer.model is written: {error}"]
    return content, [] if content is not None else [
        "the source has no tokenizer: no tokenizer.model is written"
    ]


def _generation_to_write(config: LlamoeBaseConfig, tokenizer: bytes | None) -> int:
    """The generation: 2, 3 or 4. For dense models the tokenizer decides, else vocabulary and rotary base."""
    if not isinstance(config, LlamoeDenseConfig):
        return 4
    if (config.rope_parameters or {}).get("rope_type") == "llama3":
        # LLaMA 2's code has no rotary scaling.
        return 3
    if tokenizer is not None:
        return 3 if looks_like_table(tokenizer) else 2
    theta = (config.rope_parameters or {}).get("rope_theta")
    return 3 if config.vocab_size > LARGEST_SENTENCEPIECE or theta == LLAMA3_THETA else 2


def _usual_files(
    config: LlamoeBaseConfig,
    tensors: Mapping[str, LazyTensor],
    dtype: torch.dtype | None,
    embedding_axis: int,
) -> int:
    """As many files as Meta's releases of that size have, or fewer where sizes are not divisible."""
    width = (dtype or next(iter(tensors.values())).dtype).itemsize
    nbytes, files = count_parameters(config).total * width, 1
    while files < _MOST_FILES and nbytes / files > _LARGEST_FILE:
        try:
            check_division(config, 2 * files, embedding_axis)
        except ValueError:
            break
        files *= 2
    return files
