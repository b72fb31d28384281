"""Describe a checkpoint and the memory that it needs, from headers of files: `llamoe inspect`. No weight is read."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configuration import (
    PRESETS,
    LlamoeConfig,
    LlamoeVisionConfig,
    QuantizationConfig,
    cache_bytes,
    count_parameters,
    preset,
)
from ..configuration.base import LlamoeBaseConfig
from ..configuration.errors import CheckpointError
from ..configuration.memory import default_context
from ..configuration.sizes import count_of
from ..modeling.checkpoints import check_whole, in_units, sum_by_part
from ..planning import (
    DEFAULT_TOKENS,
    PlacementPlan,
    Source,
    packed_bytes,
    plan_placement,
    read_source,
    rows_of,
    weight_bytes,
)
from .checkpoint import Checkpoint
from .hf import in_words, read_config
from .io import LazyTensor
from .open import family_of, open_checkpoint

# Configuration fields that are shown if the model has them.
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "intermediate_size_mlp", "num_local_experts", "num_experts_per_tok", "interleave_moe_layer_step", "vocab_size",
    "max_position_embeddings", "tie_word_embeddings", "sliding_window", "attention_chunk_size",
    "no_rope_layer_interval", "hidden_act", "image_size", "patch_size", "tokens_per_tile", "projection_dim",
    "projector_output_dim",
)  # fmt: skip
_OF_EXPERTS = ("num_local_experts", "num_experts_per_tok", "interleave_moe_layer_step")
# Endings of weight files, and of the index of several files.
_WEIGHTS = re.compile(r"\.(safetensors|bin|pth|pt)(\.index\.json)?$")


@dataclass(frozen=True)
class Inspection:
    """A description of a checkpoint. `dataclasses.asdict` makes it ready for JSON.

    Attributes:
        path: the path that was inspected.
        kind: `Checkpoint.kind`, or without weights "preset" or "configuration".
        family: kind of model, in words.
        sizes: fields of the configuration that determine the model's size.
        parameters: `count_parameters` of the configuration: "total", and "active" for one token.
        stored: number of parameters in the weight files, a tied head counted once; None without weights.
        dtypes: dtype to number of tensors and their bytes.
        quantization: `QuantizationConfig` of packed weights as a dictionary; None for plain weights.
        files: name of each weight file to its bytes.
        bytes: bytes of all weight files.
        parts: part of the model to number of parameters and bytes in the files.
        context, batch: tokens and rows of the KV cache whose bytes are computed; a tower has no context.
        cache: bytes of the KV cache in bfloat16.
        needs: format to bytes of the weights: "bfloat16", and "int8" and "int4" as `llamoe quantize` writes them, if
            they can store the model. For packed weights, only the stored format.
        dropped: key of each tensor that the model does not use, to the reason.
        placement: the planned device of each part of the model; None without `plan`.
        seconds: duration of the inspection.
    """

    path: str
    kind: str
    family: str
    sizes: dict[str, Any]
    parameters: dict[str, int]
    stored: int | None
    dtypes: dict[str, tuple[int, int]]
    quantization: dict[str, Any] | None
    files: dict[str, int]
    bytes: int
    parts: dict[str, tuple[int, int]]
    context: int | None
    batch: int
    cache: int
    needs: dict[str, int]
    dropped: dict[str, str]
    placement: PlacementPlan | None
    seconds: float

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """List titles with rows of a label and a text, for printing. GB are 10^9 bytes."""
        what = [("path", self.path), ("source", self.kind), ("family", self.family)]
        sections = [("model", what), ("sizes", [(name, _text(value)) for name, value in self.sizes.items()])]
        counts = [(name, f"{count:,}") for name, count in self.parameters.items()]
        if self.stored is not None:
            counts.append(("in the files", f"{self.stored:,}"))
        sections.append(("parameters", counts))
        if self.files:
            rows = []
            if self.quantization:
                by_others = "" if self.kind == "hf" else f"{self.kind}, read as "
                rows.append(("format", by_others + in_words(QuantizationConfig(**self.quantization))))
            rows += [("files", f"{len(self.files):,}, {in_units(self.bytes)}")]
            rows += [
                (name, f"{count:,} tensors, {in_units(size)}") for name, (count, size) in self.dtypes.items()
            ]
            rows += [
                (name, f"{numbers:,} numbers, {in_units(size)}")
                for name, (numbers, size) in self.parts.items()
            ]
            rows += [("left out", f"{len(self.dropped):,} tensors")] if self.dropped else []
            sections.append(("weights", rows))
        rows = []
        for name, weights in self.needs.items():
            total = (
                f" + {in_units(self.cache)} of cache = {in_units(weights + self.cache)}" if self.cache else ""
            )
            rows.append((name, f"{in_units(weights)}{total}"))
        if self.context is not None:
            rows.append(("cache", f"{self.context:,} tokens x {self.batch:,} rows in bfloat16"))
        sections.append(("memory", rows))
        if self.placement is not None:
            arguments = ("from_pretrained", _arguments(self.placement))
            sections.append(("plan", [*rows_of(self.placement), arguments]))
        return sections


def inspect(
    path: str | os.PathLike | Checkpoint,
    *,
    context: int | None = None,
    batch: int = 1,
    plan: bool = False,
    train: bool = False,
    rank: int | None = None,
    adapt_experts: bool | None = None,
    **machine: Any,
) -> Inspection:
    """Inspect a checkpoint by the headers of its files: what it is and how much memory it needs.

    Args:
        path: a folder or file that `open_checkpoint` reads, or its result; without weights, a config.json or the name
            of a preset.
        context: tokens of prompt and answer in the KV cache; None takes 8192, or the model's limit if that is lower.
        batch: rows of the KV cache.
        plan: also plan the device of each part of the model, by `plan_placement`.
        train: with `plan`: keep memory for a step of training LoRA adapters. `context` is then the number of tokens in
            a row; None takes 1024.
        rank: with `train`: rank of the adapters; None takes 8.
        adapt_experts: with `train`: whether routed experts have adapters; None takes True.
        **machine: with `plan`: gpus, gpu_memory, ram, bits, quantization, prefill and headroom of `plan_placement`,
            with its defaults.

    Raises:
        CheckpointError: the path does not exist, or a file is missing or damaged.
        ValueError: `context` is beyond the model's limit; `batch` is below 1; `machine` without `plan`; or the model
            does not fit such a machine.
    """
    begin = time.perf_counter()
    count_of("batch", batch)
    if context is not None:
        count_of("context", context)
    machine = {name: value for name, value in machine.items() if value is not None}
    if machine and not plan:
        raise ValueError(f"{', '.join(machine)}: have an effect only with plan (--plan).")
    if train:
        context = DEFAULT_TOKENS if context is None else context
        machine |= {"adapters": 8 if rank is None else rank, "adapt_experts": adapt_experts is not False}
    checkpoint = _open(path)
    config, tensors = checkpoint.config, checkpoint.tensors
    in_files = checkpoint.stored or tensors
    context, cached = _cache(config, context, batch)
    counted = count_parameters(config)
    source = _source(checkpoint, machine.get("quantization") is not None)
    placement: Any = None
    if plan:
        placement = plan_placement(source, context=context, batch=batch, **machine)
    files = {file.name: file.stat().st_size for file in checkpoint.sources}
    # Quantized weights count with the elements of the dequantized tensors, and with the bytes of the stored ones.
    numbers = ((key, tensor.numel, 0) for key, tensor in tensors.items())
    sizes_in_files = ((key, 0, tensor.nbytes) for key, tensor in in_files.items())
    return Inspection(
        path=str(checkpoint.path),
        kind=checkpoint.kind,
        family=family_of(config),
        sizes=_sizes_of(config),
        parameters={"total": counted.total, "active": counted.active},
        stored=sum(tensor.numel for tensor in tensors.values()) if tensors else None,
        dtypes=_dtypes_of(in_files.values()),
        quantization=checkpoint.quantization and checkpoint.quantization.to_dict(),
        files=files,
        bytes=sum(files.values()),
        parts=sum_by_part([*numbers, *sizes_in_files], isinstance(config, LlamoeVisionConfig)),
        context=context,
        batch=batch,
        cache=cached,
        needs=_needs(checkpoint, source),
        dropped=dict(checkpoint.dropped),
        placement=placement,
        seconds=time.perf_counter() - begin,
    )


def _open(source: str | os.PathLike | Checkpoint) -> Checkpoint:
    """Open a checkpoint, or a configuration or preset without weights."""
    if isinstance(source, Checkpoint):
        return source
    path = Path(source)
    if not str(source) or not path.exists():
        if str(source) in PRESETS:
            return Checkpoint(path, "preset", preset(str(source)), {})
        raise CheckpointError(f"{str(source)!r}: no such folder or file, and no preset of that name.")
    file = path / "config.json" if path.is_dir() else path
    is_bare = path.is_dir() and not any(_WEIGHTS.search(inner.name) for inner in path.iterdir())
    if file.suffix == ".json" and file.is_file() and (is_bare or path.is_file()):
        check_whole(file.parent)
        config, quantization, _ = read_config(file)
        return Checkpoint(path, "configuration", config, {}, quantization=quantization)
    return open_checkpoint(path, companions=False)


def _cache(config: LlamoeBaseConfig, context: int | None, batch: int) -> tuple[int | None, int]:
    """Return the number of tokens in the KV cache, and its bytes; None and 0 for a tower."""
    if isinstance(config, LlamoeVisionConfig):
        return None, 0
    if context is None:
        context = default_context(config)
    return context, sum(cache_bytes(config, context, batch, piece=context))


def _source(checkpoint: Checkpoint, is_quantized_next: bool) -> Source:
    """Return the plan's source: the stored tensors if `from_pretrained` reads this format, else the configuration."""
    quantization = None if checkpoint.quantization is None else checkpoint.quantization.to_dict()
    is_packed_by_others = checkpoint.stored and checkpoint.kind not in ("hf", "gguf")
    if (is_packed_by_others or checkpoint.kind == "configuration") and not is_quantized_next:
        # config.json says how another program has packed the weights; the bytes of the loaded model are planned.
        return read_source(checkpoint.path)
    if checkpoint.kind != "hf":
        return Source(checkpoint.config, quantization)
    stored = {
        key: (tensor.dtype_name, tensor.nbytes)
        for key, tensor in (checkpoint.stored or checkpoint.tensors).items()
    }
    are_safetensors = all(file.suffix == ".safetensors" for file in checkpoint.sources)
    return Source(checkpoint.config, quantization, stored, are_safetensors)


def _needs(checkpoint: Checkpoint, source: Source) -> dict[str, int]:
    """Count the bytes of the weights in bfloat16, int8 and int4; of packed weights only in their format."""
    if checkpoint.quantization is not None:
        stored = packed_bytes(checkpoint.config, checkpoint.quantization, are_stored=True)
        return {checkpoint.quantization.weights: sum(stored.values())}
    sizes = {"bfloat16": sum(weight_bytes(source.model, 16).values())}
    for name in ("int8", "int4"):
        # int4 cannot store a matrix whose number of outputs is no multiple of 16.
        with contextlib.suppress(ValueError):
            sizes[name] = sum(packed_bytes(checkpoint.config, QuantizationConfig(name)).values())
    return sizes


def _arguments(plan: PlacementPlan) -> str:
    """Format the arguments of `from_pretrained` for a plan, or say how to save them if they are too long."""
    if len(plan.device_map) <= 2:
        return ", ".join(f"{name}={value!r}" for name, value in plan.arguments().items())
    memory = "" if plan.experts_memory is None else f", experts_memory={plan.experts_memory}"
    return (
        f"{len(plan.device_map)} names in device_map{memory}: --save plan.json writes them all, and "
        "**json.load(open('plan.json')) gives them"
    )


def _text(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _sizes_of(config: LlamoeBaseConfig) -> dict[str, Any]:
    """Return the fields that determine the model's size and which tokens attend to each other."""
    if isinstance(config, LlamoeConfig):
        tower = {f"vision {name}": value for name, value in _sizes_of(config.vision_config).items()}
        return {**_sizes_of(config.text_config), **tower}
    sizes = {name: value for name in _SIZES if (value := getattr(config, name, None)) is not None}
    if isinstance(config, LlamoeVisionConfig):
        if not config.use_adapter:
            del sizes["projector_output_dim"]
        return sizes
    plans = [config.layer_plan(layer_idx) for layer_idx in range(config.num_hidden_layers)]
    if not any(plan.is_moe for plan in plans):
        sizes = {name: value for name, value in sizes.items() if name not in _OF_EXPERTS}
    counts = {
        "layers with experts": sum(plan.is_moe for plan in plans),
        "layers without rotation": sum(not plan.use_rope for plan in plans),
        "layers with a window": sum(plan.attention_type == "sliding_attention" for plan in plans),
    }
    return {
        **sizes,
        **{name: count for name, count in counts.items() if count},
        "rope": _rope(config.rope_parameters),
    }


def _rope(parameters: dict | None) -> str:
    parameters = {key: value for key, value in (parameters or {}).items() if value is not None}
    kind = parameters.pop("rope_type", "default")
    return ", ".join(
        [kind, *(f"{name} {value:g}" for name, value in parameters.items() if isinstance(value, float))]
    )


def _dtypes_of(tensors: Iterable[LazyTensor]) -> dict[str, tuple[int, int]]:
    """Map each dtype to the number and bytes of its tensors."""
    sizes: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for tensor in tensors:
        count, size = sizes[tensor.dtype_name]
        sizes[tensor.dtype_name] = (count + 1, size + tensor.nbytes)
    return dict(sizes)
