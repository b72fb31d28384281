"""Hugging Face folders: safetensors or .bin, in one file or many."""

import copy
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch

from ...configuration import LlamoeConfig, LlamoeMixtralConfig, from_stock, to_stock
from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...configuration.hub import written_by
from ...configuration.json_files import LARGE
from ...modeling.checkpoints import check_shards, find_weights
from ..checkpoint import (
    Checkpoint,
    Report,
    WriteOptions,
    carry_out,
    check_model,
    main_dtype,
    model_class,
    parse_dtype,
    takes_options,
    tie_heads,
)
from ..io import (
    LazyTensor,
    Plan,
    check_target,
    note,
    open_pickle,
    open_safetensors,
    parse_size,
    read_bytes,
    read_json,
    remember_looks,
    split_shards,
)
from ..tokenizers import check_companions, processor_of_layout
from .expert_layout import fuse_experts, split_experts

# Files besides config.json and the weights that belong to a checkpoint.
_COMPANIONS = re.compile(
    r"tokenizer\.(json|model(\.v\d+)?)|tekken\.json|(tokenizer|generation|processor|preprocessor|video_preprocessor)_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|chat_template\.(jinja|json)"
    r"|(LICENSE|NOTICE|USE_POLICY)(\.\w+)?"
)
# Buffers that some releases of transformers saved.
_COMPUTED = re.compile(r".*(rotary_emb\.inv_freq|rotary_embedding\.freqs_ci)")


@remember_looks
def open_hf(folder: str | os.PathLike, *, companions: bool = True) -> Checkpoint:
    """Open a Hugging Face folder of LLaMA, Mistral, Mixtral, Llama 4 or llamoe.

    Args:
        folder: it holds config.json and the weights.
        companions: whether to read and check the tokenizer and related files.

    Raises:
        CheckpointError: a file is missing or damaged, the architecture is unknown, weights are quantized, tensors are
            missing, unknown, or contradict config.json's shapes, or the tokenizer is another model's.
    """
    folder = Path(folder)
    config = read_config(folder / "config.json", refuse_quantized=True)
    tensors, others, sources = open_shards(folder)
    dropped = {name: f"no tensor but a {kind}" for name, kind in others.items()}
    dropped |= dict.fromkeys(filter(_COMPUTED.fullmatch, tensors), "computed from the configuration")
    # A tower has no such field.
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        dropped |= tie_heads(tensors)
    kept = fuse_experts({name: tensor for name, tensor in tensors.items() if name not in dropped})
    kept = check_model(config, kept, str(folder))
    found = read_companions(folder, check=companions)
    notes = check_companions(found, config, str(folder)) if companions else []
    return Checkpoint(folder, "hf", config, kept, dropped, found, sources, notes)


def open_shards(folder: Path) -> tuple[dict[str, LazyTensor], dict[str, str], list[Path]]:
    """Open the weight files of a Hugging Face folder.

    Returns:
        name to tensor, name to type of the entries that are not tensors, and the files.

    Raises:
        CheckpointError: there are no weights, or two sets; a file that the index names is missing or outside the
            folder; or a tensor is in two files, or not where the index says.
    """
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        note(folder / name)
    weights = find_weights(folder)
    if weights is None:
        raise CheckpointError(
            f"{folder}: no weights in this folder; looked for model.safetensors and pytorch_model.bin, and for "
            "the index of either in several files."
        )
    for path in weights.files:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file, though {weights.index} names it.")
    tensors: dict[str, LazyTensor] = {}
    held: dict[str, Path] = {}
    others: dict[str, str] = {}
    for path in weights.files:
        opened, more = (open_safetensors(path), {}) if path.suffix == ".safetensors" else open_pickle(path)
        others |= more
        for name, tensor in opened.items():
            if name in held:
                raise CheckpointError(f"{path}: {name!r} is in {held[name]} too.")
            tensors[name], held[name] = tensor, path
    check_shards(weights, held)
    return tensors, others, weights.files


def read_companions(folder: Path, check: bool = True) -> dict[str, bytes]:
    """The small files of a Hugging Face folder that belong to the model: tokenizer, templates, processor.

    Raises:
        CheckpointError: a .json file is not JSON, if `check` asks for it.
    """
    found = {
        path.name: read_bytes(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and _COMPANIONS.fullmatch(path.name)
    }
    for name in found:
        if check and name.endswith(".json"):
            read_json(folder / name, LARGE)
    templates = folder / "additional_chat_templates"
    if templates.is_dir():
        found |= {
            f"{templates.name}/{path.name}": read_bytes(path) for path in sorted(templates.glob("*.jinja"))
        }
    return found


@takes_options
def save_hf(
    checkpoint: Checkpoint,
    target: str | os.PathLike,
    *,
    experts: str = "fused",
    identity: Mapping[str, Any] | None = None,
    **options: Unpack[WriteOptions],
) -> Report:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        checkpoint: what to write.
        target: a folder that does not exist or is empty.
        experts: "fused" stacks the experts of Llama 4 as stock does; "split" writes a linear layer for each expert, as
            is always done for Mixtral, whose stock files have nothing else.
        identity: what else shaped the checkpoint; a resumed run must have the same.
        **options: see `WriteOptions`.

    Raises:
        ValueError: an option is unknown, the target is in use, stock cannot express the model, or a tensor is missing,
            unknown, of another shape, or not finite.
        OSError: the disk is full or fails.
    """
    begun = time.monotonic()
    target = Path(target)
    if experts not in ("fused", "split"):
        raise ValueError(f"experts = {experts!r}: valid are 'fused' and 'split'.")
    wanted = parse_dtype(options["dtype"])
    check_target(target, options["resume"])
    tensors = check_model(checkpoint.config, checkpoint.tensors, str(checkpoint.path))
    if experts == "split" or isinstance(checkpoint.config, LlamoeMixtralConfig):
        tensors = split_experts(tensors)
    if wanted is not None:
        tensors = {name: tensor.cast(wanted) for name, tensor in tensors.items()}
    described, layout = _config_files(checkpoint.config, tensors, options["layout"])
    groups, index = split_shards(tensors, parse_size(options["shard_size"]))
    companions = processor_of_layout(checkpoint.companions, layout)
    plan = Plan(
        groups, {**companions, **described}, last=index, identity={"layout": layout, **(identity or {})}
    )
    report = carry_out(plan, checkpoint, target, "hf", begun, options)
    is_multimodal = isinstance(checkpoint.config, LlamoeConfig)
    if is_multimodal and layout == "stock" and main_dtype(tensors) != torch.bfloat16:
        report.notes.append(
            "transformers' processor gives bfloat16 pixels, which its own model class does not cast: give it "
            "inputs.to(model.dtype), or call llamoe.adopt('llama4') before loading: llamoe's processor gives float32, "
            "and its model casts"
        )
    return report


def read_config(path: Path, refuse_quantized: bool = False) -> LlamoeBaseConfig:
    """The configuration in a config.json of stock or llamoe.

    Raises:
        CheckpointError: it cannot be read, describes no model of ours, or one with quantized weights.
    """
    data = read_json(path)
    if refuse_quantized and (quantization := data.get("quantization_config")):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            f"{path}: the weights are quantized ({method}), and quantized weights are not converted. Use the original "
            "ones."
        )
    try:
        return from_stock(data)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _config_files(
    config: LlamoeBaseConfig, tensors: Mapping[str, LazyTensor], layout: str | None
) -> tuple[dict[str, bytes], str]:
    """config.json with the files that belong to it, and the layout that was chosen."""
    if layout not in ("stock", "llamoe", None):
        raise ValueError(
            f"layout = {layout!r}: valid are 'stock' and 'llamoe', or none for the first that fits."
        )
    config = copy.deepcopy(config)
    config.architectures = [model_class(config).__name__]
    config.dtype = main_dtype(tensors)
    for part in (getattr(config, name) for name in config.sub_configs):
        part.dtype = None if part.dtype is None else config.dtype
    if layout is None:
        try:
            to_stock(config)
            layout = "stock"
        except ValueError:
            layout = "llamoe"
    with tempfile.TemporaryDirectory() as folder, written_by(to_stock if layout == "stock" else None):
        config.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}, layout
