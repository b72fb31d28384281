"""Reads and writes folders in Meta's format: LLaMA 1, 2 and 3, and Llama 4 with its vision tower.

Such a folder holds params.json and one weight file for each model-parallel rank: consolidated.00.pth and so on. All
have the same names, and each holds its slice of every large tensor. tokenizer.model lies in the folder or one level
up. `name_tables` has the names, `sizes` the sizes, `params_to_config` and `config_to_params` the parameters.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...configuration import LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeVisionConfig, count_parameters
from ...configuration.base import LlamoeBaseConfig
from ..checkpoint import Checkpoint, Report
from ..io import LazyTensor, Plan, Slot, are_equal, read_bytes, read_json, same_place, write_through
from ..options import DEFAULTS, WriteOptions, check_at_least
from ..tokenizers import check_tokenizer, hf_files_from_meta, looks_like_table, meta_tokenizer_model
from .config_to_params import needs_own_scaling, write_params
from .name_tables import STYLES, check_division, llama4_table, llama_table
from .params_folder import (
    is_tuned,
    open_files,
    read_tensors,
    read_whole_config,
    tensors_with_head,
    write_folder,
    write_tokenizer,
)
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
    files, dropped = open_files(paths)
    path, tokenizer = _find_tokenizer(folder)
    generation = find_generation(params, files, tokenizer)
    dropped |= check_entries(params, generation == 4)
    is_tied = _head_is_embedding(params, files)
    params, seen, axis = measure(params, files, generation, is_tied)
    tuned = is_tuned(folder, instruct)
    seen = replace(seen, instruct=bool(tuned))
    config = read_whole_config(folder, params, lambda: read_config(params, seen, is_tied))
    table = llama4_table(config) if seen.generation == 4 else llama_table(axis)
    tensors, left_out = read_tensors(table, files, config, str(paths[0]))
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
    target, config = Path(target), checkpoint.config
    if style not in STYLES:
        raise ValueError(f"style = {style!r}: valid are {', '.join(map(repr, STYLES))}.")
    if isinstance(config, LlamoeVisionConfig):
        raise ValueError(f"{checkpoint.path}: is a vision tower alone, for which Meta has no format.")
    if isinstance(config, LlamoeMixtralConfig):
        raise ValueError(
            f"{checkpoint.path}: is a Mixtral, which Meta's code does not compute; give to = 'mistral'."
        )
    notes: list[str] = []
    tokenizer = write_tokenizer(lambda: _tokenizer(checkpoint), "tokenizer.model", notes)
    generation = _generation_to_write(config, tokenizer.get("tokenizer.model"))
    params, kept = write_params(config, generation)
    embedding_axis = 0 if generation > 2 else 1
    tensors = tensors_with_head(checkpoint, notes, "Meta's format")
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
    groups = [{f"consolidated.{number:02d}.pth": part for number, part in enumerate(parts)}]
    plan = Plan(groups, before=tokenizer, identity={"style": style})
    return write_folder(checkpoint, target, "meta", options, plan, (params, kept), notes)


def _tokenizer(checkpoint: Checkpoint) -> dict[str, bytes]:
    vocab_size = checkpoint.config.get_text_config().vocab_size
    content = meta_tokenizer_model(checkpoint.companions, vocab_size=vocab_size)
    if content is None:
        return {}
    check_tokenizer(content, checkpoint.config)
    return {"tokenizer.model": content}


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
