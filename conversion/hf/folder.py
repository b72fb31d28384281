"""Read and write Hugging Face folders: config.json, and weights in safetensors; .bin files are only read."""

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ...configuration import LlamoeMixtralConfig, QuantizationConfig, from_stock, to_stock
from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError
from ...configuration.hub import as_json, our_files
from ...configuration.quantization import METHOD
from ...configuration.sizes import bytes_of
from ...modeling.checkpoints import find_weights, sum_by_part
from ...modeling.formats.packed import Layout
from ...modeling.quantization import layout_of, names_in_16_bit, own_config
from ...modeling.registration import model_class
from ..checkpoint import Checkpoint, Report, carry_out, check_model, main_dtype, tie_heads
from ..io import DEFAULTS, LazyTensor, Plan, WriteOptions, open_weights, read_json, split_shards
from ..tokenizers import processor_of_layout
from .bitsandbytes import Bitsandbytes
from .expert_layout import fuse_experts, split_experts
from .packed_weights import in_words, pack_tensors, packed_weights, unpack_tensors
from .published import unpack_published

# Files besides config.json and the weights that belong to a checkpoint.
_COMPANIONS = re.compile(
    r"tokenizer\.(json|model(\.v\d+)?)|tekken\.json|(tokenizer|generation|processor|preprocessor|video_preprocessor)_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|chat_template\.(jinja|json)"
    r"|(LICENSE|NOTICE|USE_POLICY)(\.\w+)?"
)
# torch.compile puts "_orig_mod." before names, data parallelism "module.".
_WRAPPERS = re.compile(r"((_orig_mod|module)\.)*")
# Buffers that some versions of transformers have saved.
_COMPUTED = re.compile(r".*(rotary_emb\.inv_freq|rotary_embedding\.freqs_ci)")


def open_hf(folder: str | os.PathLike, *, companions: bool = True) -> Checkpoint:
    """Open a Hugging Face folder of LLaMA, Mistral, Mixtral, Llama 4 or llamoe; see `open_checkpoint`.

    Packed weights are opened as lazy tensors that dequantize them: to bfloat16 if llamoe has packed them, else to the
    dtype in config.json.

    Raises:
        CheckpointError: a file is missing or damaged; the architecture or the quantization is unknown; or a tensor is
            missing, unknown, or of another shape than the configuration says.
    """
    folder = Path(folder)
    config, quantization, layout = read_config(folder / "config.json")
    tensors, others, sources = open_shards(folder)
    wrappers: Any = _WRAPPERS.match(os.path.commonprefix(list(tensors)))
    prefix = wrappers[0]
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    dropped = {name: f"no tensor but a {kind}" for name, kind in others.items()}
    dropped |= dict.fromkeys(filter(_COMPUTED.fullmatch, tensors), "computed from the configuration")
    dropped |= tie_heads(config, tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    notes, stored = [f"all names of weights begin with {prefix!r}, which is left out"] if prefix else [], {}
    in_16_bit: Sequence[str] = ()
    packed: set[str] = set()
    if isinstance(layout, Bitsandbytes):
        stored = kept
        dtype = config.dtype if config.dtype in (torch.float16, torch.float32) else torch.bfloat16
        kept, packed = layout.unpack(kept, dtype)
        notes.append("the weights are packed by bitsandbytes, and dequantized")
    elif layout is not None:
        stored = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in kept.items()}
        kept, unused, followed = unpack_published(kept, config, layout, sources)
        dropped |= dict.fromkeys(unused, "is 0, or of activations, which are not quantized")
        quantization = followed if layout.is_int4 else None
        in_16_bit = followed.modules_to_not_convert or ()
        notes.append(f"the weights are packed by {layout.method}, and dequantized")
    elif quantization is not None:
        stored = kept
        kept = unpack_tensors(stored, config, quantization, folder)
        notes.append(f"the weights are stored as {in_words(quantization)}, and dequantized to bfloat16")
    kept = check_model(config, fuse_experts(kept), str(folder))
    if packed:
        # bitsandbytes names a layer for each expert, as in the file; modules have one name for all experts of a layer.
        stacks = (re.sub(r"(\.experts)\..*", r"\1", name) for name in packed)
        names = {name.replace(".block_sparse_moe.", ".mlp.") for name in stacks}
        linears = dict.fromkeys(name.rpartition(".")[0] for name in kept if "_proj" in name)
        in_16_bit = names_in_16_bit(linears, names.intersection(linears))
    return Checkpoint(
        folder,
        layout.method if layout else "hf",
        config,
        kept,
        dropped,
        read_companions(folder) if companions else {},
        sources,
        notes,
        quantization=quantization,
        stored=stored,
        in_16_bit=in_16_bit,
    )


def open_shards(folder: Path) -> tuple[dict[str, LazyTensor], dict[str, str], list[Path]]:
    """Open the weights of a folder.

    Returns:
        name to tensor; for entries that are no tensors, name to type; and the weight files.

    Raises:
        CheckpointError: there are no weights, or two sets; a file that the index names is missing or outside the
            folder; or a tensor is in two files.
    """
    weights = find_weights(folder)
    if weights is None:
        raise CheckpointError(
            f"{folder}: no weights in this folder; looked for model.safetensors, pytorch_model.bin and their indexes."
        )
    tensors: dict[str, LazyTensor] = {}
    others: dict[str, str] = {}
    for path in weights:
        opened, more = open_weights(path)
        others |= more
        for name, tensor in opened.items():
            if name in tensors:
                raise CheckpointError(
                    f"{tensor.origin}: is also in another file, {tensors[name].origin}. Remove one."
                )
            tensors[name] = tensor
    return tensors, others, weights


def read_companions(folder: Path) -> dict[str, bytes]:
    """Read a folder's small files besides config.json: tokenizer, chat templates, processor, licence."""
    files = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and _COMPANIONS.fullmatch(path.name)
    }
    templates = folder / "additional_chat_templates"
    if templates.is_dir():
        files |= {
            f"{templates.name}/{path.name}": path.read_bytes() for path in sorted(templates.glob("*.jinja"))
        }
    return files


def save_hf(
    checkpoint: Checkpoint,
    target: str | os.PathLike,
    options: WriteOptions = DEFAULTS,
    *,
    experts: str = "fused",
    identity: Mapping[str, Any] | None = None,
    quantization: QuantizationConfig | None = None,
) -> Report:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        checkpoint: the model to write.
        target: the folder, which does not exist or is empty.
        options: how it is written.
        experts: how experts of Llama 4 are written: "fused", stacked as transformers has them, or "split", a linear
            layer for each expert. Mixtral's are always split, as in all its stock folders.
        identity: options of the command that made the checkpoint; a resumed run must have the same.
        quantization: format in which the weights are packed; needs the layout "llamoe", and experts stay fused.

    Raises:
        ValueError: an option is unknown; stock cannot express the model; or a tensor is missing, unknown or of another
            shape.
    """
    target = Path(target)
    if experts not in ("fused", "split"):
        raise ValueError(f"experts = {experts!r}: valid are 'fused' and 'split'.")
    config = copy.deepcopy(checkpoint.config)
    plain = tensors = check_model(config, checkpoint.tensors, str(checkpoint.path))
    if quantization is not None:
        packed = packed_weights(config, quantization, are_stored=False)
        tensors = pack_tensors(plain, packed)
        config.quantization_config = quantization
    elif experts == "split" or isinstance(config, LlamoeMixtralConfig):
        tensors = split_experts(tensors)
    tensors = options.cast(tensors)
    config.dtype = torch.bfloat16 if quantization is not None else main_dtype(tensors)
    described, layout = _config_files(config, options.layout)
    shard_size = bytes_of("shard_size", options.shard_size, 1)
    files, index = split_shards(tensors, shard_size)
    companions = processor_of_layout(checkpoint.companions, layout)
    plan = Plan(
        files, {**companions, **described}, last=index, identity={"layout": layout, **(identity or {})}
    )
    report = carry_out(plan, checkpoint, target, "hf", options)
    if quantization is not None:
        before = ((name, tensor.nbytes, 0) for name, tensor in plain.items())
        after = ((name, 0, tensor.nbytes) for name, tensor in tensors.items())
        sizes = sum_by_part(chain(before, after))
        report.parts = dict(sorted(sizes.items(), key=lambda entry: -entry[1][0]))
        words = in_words(quantization)
        report.notes.append(f"{words}: {len(packed):,} weights; everything else is in bfloat16")
    return report


def read_config(
    path: Path,
) -> tuple[LlamoeBaseConfig, QuantizationConfig | None, Layout | Bitsandbytes | None]:
    """Read a config.json of transformers or llamoe.

    Returns:
        the configuration; llamoe's format in which packed weights load, or None; and the layout of weights that another
        program has packed, or None.

    Raises:
        CheckpointError: the file cannot be read, or names a quantization that llamoe does not read.
    """
    data = read_json(path)
    packed = data.pop("quantization_config", None)
    if isinstance(text := data.get("text_config"), dict):
        packed = text.pop("quantization_config", None) or packed
    try:
        if not packed:
            return from_stock(data), None, None
        if isinstance(packed, dict) and packed.get("quant_method") == METHOD:
            return from_stock(data), QuantizationConfig(**packed), None
        if isinstance(packed, dict) and packed.get("quant_method") == Bitsandbytes.method:
            return from_stock(data), None, Bitsandbytes.from_config(packed)
        if not isinstance(packed, dict) or (layout := layout_of(packed)) is None:
            raise CheckpointError(
                f"quantization_config is {str(packed)[:99]}, which is not read. Give the model before it was "
                "quantized, in 16 or 32 bits."
            )
        return from_stock(data), own_config(layout) if layout.is_int4 else None, layout
    except ValueError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix('config.json: ')}") from error


def _config_files(config: LlamoeBaseConfig, layout: str | None) -> tuple[dict[str, bytes], str]:
    """Make config.json and, in llamoe's layout, llamoe_hub.py beside it; return the files by name, and the layout."""
    config = copy.deepcopy(config)
    config.architectures = [model_class(config).__name__]
    for part in (getattr(config, name) for name in config.sub_configs):
        part.dtype = None if part.dtype is None else config.dtype
    try:
        stock = None if layout == "llamoe" else to_stock(config)
    except ValueError:
        if layout == "stock":
            raise
        stock = None
    if stock is not None:
        files = {"config.json": as_json(stock)}
    else:
        files = our_files(config, json.loads(config.to_json_string()))
    return {name: text.encode() for name, text in files.items()}, "llamoe" if stock is None else "stock"
