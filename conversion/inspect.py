"""What a checkpoint is and how much memory it needs, from headers alone: no weight is read."""

from __future__ import annotations

import codecs
import difflib
import math
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configuration import (
    PRESETS,
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
    cache_bytes,
    count_parameters,
    from_stock,
    preset,
)
from ..configuration.base import LlamoeBaseConfig
from ..configuration.errors import CheckpointError
from ..modeling.checkpoints import UNFINISHED, expert_of, in_units
from .checkpoint import Checkpoint, expected_shapes
from .footprint import NOTE, Header, Need, dtypes_of, layers_of, needs_of, parts_of, split_shapes
from .io import open_weights, read_json
from .open import open_checkpoint
from .verify import compare_configs, tied_head

_DEFAULT_CONTEXT = 8192
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")
_EXPECTED = (
    "expected a folder of Meta or Hugging Face, a file of weights (safetensors, or of torch.save), a config.json or "
    "the name of a preset"
)
_SHOWN = 6
# Of what may be the name of a preset.
_LONGEST_NAME = 99
_OF_CLIP = re.compile(r"(^|\.)visual\.|vision_model\.encoder\.")
# Patterns of keys that name the family where there is no configuration.
_FAMILIES = (
    ("CLIP", _OF_CLIP),
    ("Llama 4 multimodal, or its tower", re.compile(r"^vision_(model|embeddings)\.")),
    ("Llama 4 text", re.compile(r"\.feed_forward\.(experts|router)")),
    ("LLaMA (dense decoder)", re.compile(r"\.mlp\.gate_proj\.|\.attention\.w[qkv]\.")),
)


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint is. `dataclasses.asdict` makes JSON of it.

    Attributes:
        path: the path that was given.
        kind: form of the source: a kind of `open_checkpoint`; "preset" or "configuration" without weights, "weights"
            without a configuration, "partial" where only some of it can be opened.
        family: sort of model.
        presets: published models of exactly these sizes that are closest in all other fields; several if tied.
        sizes: fields of the configuration, or of the shapes where there is none.
        parameters: `count_parameters` of the configuration: total, and active for one token.
        stored: elements in the weight files, a tied head counted once; None without weights.
        mismatches: disagreements of files and configuration, tensor by tensor.
        dtypes: dtype to number of tensors and bytes.
        files: weight files and their bytes.
        bytes: size of all weight files.
        parts: part of the model to stored parameters and bytes.
        layers: stored bytes of each decoder layer; of a tower alone, of each of its layers.
        context: number of tokens that the cache is computed for; None for a tower.
        batch: number of rows that the cache is computed for.
        needs: "bfloat16", "int8" and "int4" to the memory that the model takes in it.
        dropped: tensors of the source that no model uses, and why.
        problems: what is missing or wrong, in sentences.
        seconds: duration.
    """

    path: str
    kind: str
    family: str
    presets: list[str]
    sizes: dict[str, Any]
    parameters: dict[str, int] | None
    stored: int | None
    mismatches: list[str]
    dtypes: dict[str, tuple[int, int]]
    files: dict[str, int]
    bytes: int
    parts: dict[str, tuple[int, int]]
    layers: list[int]
    context: int | None
    batch: int
    needs: dict[str, Need]
    dropped: dict[str, str]
    problems: list[str]
    seconds: float

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Titles with rows of a label and a text, for printing. GB are 10^9 bytes."""
        what = [("path", self.path), ("source", self.kind), ("family", self.family)]
        what += [("sizes of", ", ".join(self.presets))] if self.presets else []
        sections = [("model", what)]
        if self.sizes:
            sections.append(("sizes", [(name, _text(value)) for name, value in self.sizes.items()]))
        counts = []
        if self.parameters is not None:
            counts = [
                ("total", f"{self.parameters['total']:,}"),
                ("active", f"{self.parameters['active']:,}"),
            ]
        if self.stored is not None:
            counts.append(("in the files", f"{self.stored:,}"))
        sections.append(("parameters", counts))
        if self.files:
            rows = [("files", f"{len(self.files):,}, {in_units(self.bytes)}")]
            rows += [
                (name, f"{count:,} tensors, {in_units(size)}") for name, (count, size) in self.dtypes.items()
            ]
            rows += [
                (name, f"{numbers:,} numbers, {in_units(size)}")
                for name, (numbers, size) in self.parts.items()
            ]
            rows += [("a layer", _runs(self.layers))] if self.layers else []
            rows += [("left out", f"{len(self.dropped):,} tensors")] if self.dropped else []
            sections.append(("weights", rows))
        if self.needs:
            cached = next(iter(self.needs.values())).cache
            rows = []
            for name, need in self.needs.items():
                rows.append((name, _need(need.weights, cached)))
            if self.context is not None:
                rows.append(("cache", f"{self.context:,} tokens x {self.batch:,} rows in bfloat16"))
            rows.append(("note", NOTE))
            sections.append(("memory", rows))
        wrong = [*self.problems, *self.mismatches[:_SHOWN]]
        if len(self.mismatches) > _SHOWN:
            wrong.append(f"and {len(self.mismatches) - _SHOWN:,} more tensors")
        if wrong:
            sections.append(("problems", [("", text) for text in wrong]))
        return sections


def inspect(
    path: str | os.PathLike | Checkpoint, *, context: int | None = None, batch: int = 1
) -> Inspection:
    """Inspect a checkpoint by its headers: what it is and how much memory it needs.

    Args:
        path: a folder or file that `open_checkpoint` reads, or its result; without weights, a config.json or the name
            of a preset; or one weight file without a configuration.
        context: tokens of prompt and answer that the cache is computed for, the prompt read in one pass; by default
            8192, or the model's limit if that is lower.
        batch: rows that the cache is computed for.

    Returns:
        The findings. A checkpoint with missing or damaged files is described as far as possible; `problems` names
        what is wrong with it.

    Raises:
        CheckpointError: the path does not exist, or nothing at it can be read.
        ValueError: a context beyond the model's limit, or a batch below 1.
    """
    begin = time.perf_counter()
    for name, value in (("context", context), ("batch", batch)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} = {value!r}: should be a whole number, 1 or more")
    found = _find(path)
    config, tensors, problems = found.config, found.tensors, list(found.problems)
    tied = {} if config is None else tied_head(config)
    kept = {key: tensor for key, tensor in tensors.items() if tied.get(key) not in tensors}
    stored = sum(math.prod(tensor.shape) for tensor in kept.values()) if tensors else None
    parameters, mismatches, needs = None, [], {}
    if config is None:
        family, sizes = _guess(tensors)
        context = None
    else:
        family, sizes = _family(config), _sizes(config)
        context, cached = _cache(config, context, batch)
        counted = count_parameters(config)
        parameters = {"total": counted.total, "active": counted.active}
        shapes = {key: tensor.shape for key, tensor in kept.items()}
        if stored != counted.total:
            shapes = expected_shapes(config)
            mismatches = _mismatches(shapes, kept) if tensors else []
        needs = needs_of(shapes, cached)
    if mismatches:
        problems.append(
            f"the configuration asks for {counted.total:,} numbers, and the files have {stored:,}: "
            f"{len(mismatches):,} tensors do not fit"
        )
    files = {file.name: file.stat().st_size for file in found.files}
    return Inspection(
        path=str(found.path),
        kind=found.kind,
        family=family,
        presets=[] if config is None else _presets(config),
        sizes=sizes,
        parameters=parameters,
        stored=stored,
        mismatches=mismatches,
        dtypes=dtypes_of(tensors.values()),
        files=files,
        bytes=sum(files.values()),
        parts=parts_of(config, tensors),
        layers=layers_of(config, tensors),
        context=context,
        batch=batch,
        needs=needs,
        dropped=dict(found.dropped),
        problems=problems,
        seconds=time.perf_counter() - begin,
    )


def _cache(config: LlamoeBaseConfig, context: int | None, batch: int) -> tuple[int | None, int]:
    """Number of tokens that the cache is computed for, and its bytes; a tower has none."""
    if isinstance(config, LlamoeVisionConfig):
        return None, 0
    if context is None:
        context = min(_DEFAULT_CONTEXT, config.get_text_config().max_position_embeddings)
    return context, sum(cache_bytes(config, context, batch, piece=context))


@dataclass
class _Found:
    path: str | os.PathLike
    kind: str
    config: LlamoeBaseConfig | None
    tensors: Mapping[str, Header]
    files: list[Path]
    dropped: Mapping[str, str]
    problems: list[str]


def _find(given: str | os.PathLike | Checkpoint) -> _Found:
    """Open as much as can be opened."""
    if isinstance(given, Checkpoint):
        return _of_checkpoint(given)
    path = Path(given)
    try:
        is_there, is_file, is_folder = path.exists(), path.is_file(), path.is_dir()
    # A name that is too long, or a folder without permission.
    except OSError as error:
        raise CheckpointError(f"{given}: cannot be read ({error.strerror}).") from error
    if not is_there and str(given) in PRESETS:
        return _Found(given, "preset", preset(str(given)), {}, [], {}, [])
    if not is_there or not str(given):
        near = difflib.get_close_matches(str(given).lower()[:_LONGEST_NAME], PRESETS, n=1, cutoff=0.7)
        hint = f" Did you mean the preset {near[0]!r}?" if near else ""
        raise CheckpointError(f"{str(given)!r}: no such folder or file, and no preset of that name.{hint}")
    if not is_file and not is_folder:
        raise CheckpointError(f"{given}: is neither a file nor a folder; {_EXPECTED}.")
    if is_file and path.suffix == ".json":
        if "model_type" not in read_json(path):
            raise CheckpointError(
                f"{path}: says no model_type, as the config.json of a model does; {_EXPECTED}."
            )
        return _Found(given, "configuration", _read_config(path), {}, [], {}, [])
    if is_file:
        _check_begin(path)
    try:
        return _of_checkpoint(open_checkpoint(path, companions=False))
    except (OSError, ValueError) as error:
        found = _survey(path, error)
        if found.config is not None or found.tensors:
            return found
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"{given}: cannot be read ({error.strerror}).") from error
        raise


def _read_config(path: Path) -> LlamoeBaseConfig:
    data = read_json(path)
    try:
        return from_stock(data)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_begin(path: Path) -> None:
    """Refuse a file that clearly holds no weights, with a better message than a reader of weights has.

    Raises:
        CheckpointError: the file is empty, text, of another kind by its first bytes, or unreadable.
    """
    try:
        with open(path, "rb") as file:
            begin = file.read(4096)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error
    if path.suffix == ".safetensors" or begin.startswith((b"PK\x03\x04", b"\x80")) or begin[8:9] == b"{":
        # The reader names any damage.
        return
    try:
        # Incremental, since the last character may be incomplete.
        codecs.getincrementaldecoder("utf-8")().decode(begin)
        is_text = b"\0" not in begin
    except UnicodeDecodeError:
        is_text = False
    if is_text or path.suffix not in _SUFFIXES:
        what = "is empty" if not begin else "is a text" if is_text else "is another kind of file"
        raise CheckpointError(f"{path}: {what} and holds no weights; {_EXPECTED}.")


def _of_checkpoint(checkpoint: Checkpoint) -> _Found:
    files = list(checkpoint.sources)
    return _Found(
        checkpoint.path, checkpoint.kind, checkpoint.config, checkpoint.tensors, files, checkpoint.dropped, []
    )


def _survey(path: Path, error: Exception) -> _Found:
    """Look at each file alone where the whole cannot be opened."""
    missing = _missing_shards(path)
    told = any(str(error).startswith(f"{shard}:") for shard in missing)
    problems = [] if told else [str(error)]
    problems += [f"{shard}: missing, with {held}" for shard, held in missing.items()]
    files = [path]
    config = None
    if path.is_dir():
        files = sorted(file for suffix in _SUFFIXES for file in path.glob(f"*{suffix}"))
        try:
            config = _read_config(path / "config.json")
        except CheckpointError as problem:
            problems.append(str(problem))
    tensors: dict[str, Header] = {}
    for file in files:
        try:
            tensors.update(open_weights(file))
        except (OSError, ValueError) as problem:
            problems.append(str(problem))
    kind = "partial"
    is_unfinished = path.is_dir() and (path / UNFINISHED).exists()
    if config is not None and not files and not missing and not is_unfinished:
        kind, problems = "configuration", []
    elif path.is_file() and tensors:
        kind = "weights"
        if not any(map(_OF_CLIP.search, tensors)):
            # Drop the complaint that a file of another model is no tower.
            problems = []
    return _Found(path, kind, config, tensors, files, {}, list(dict.fromkeys(problems)))


def _missing_shards(folder: Path) -> dict[str, str]:
    """Missing files that an index names, with the tensors that they should hold."""
    missing = {}
    for index in sorted(folder.glob("*.index.json")):
        try:
            weight_map = read_json(index)["weight_map"]
            shards = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # Opening the folder has already reported a damaged index.
            continue
        for shard in shards:
            names = [name for name, its in weight_map.items() if its == shard]
            shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
            missing[str(folder / shard)] = f"{len(names):,} tensors ({shown})"
    return missing


def _family(config: LlamoeBaseConfig) -> str:
    if isinstance(config, LlamoeDenseConfig):
        return "LLaMA 1, 2, 3 (dense decoder)"
    if isinstance(config, LlamoeTextConfig):
        return "Llama 4 text (mixture of experts)" if config.moe_layers else "Llama 4 text (no experts)"
    if isinstance(config, LlamoeConfig):
        return "Llama 4 multimodal (tower, projector, decoder)"
    return "vision tower of Llama 4" if config.use_rope or config.use_adapter else "vision tower of CLIP"


def _sizes(config: LlamoeBaseConfig) -> dict[str, Any]:
    """Fields that determine the model's size, and which tokens a layer attends to."""
    if isinstance(config, LlamoeConfig):
        tower = {f"vision {name}": value for name, value in _sizes(config.vision_config).items()}
        return {**_sizes(config.text_config), **tower}
    if isinstance(config, LlamoeVisionConfig):
        names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size"]
        names += ["image_size", "patch_size", "tokens_per_tile", "hidden_act", "projection_dim"]
        names += ["projector_output_dim"] if config.use_adapter else []
        return {name: value for name in names if (value := getattr(config, name)) is not None}
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["intermediate_size"]
    sizes: dict[str, Any] = {}
    if isinstance(config, LlamoeTextConfig):
        names += ["intermediate_size_mlp"]
        if config.moe_layers:
            names += ["num_local_experts", "num_experts_per_tok"]
            sizes["layers with experts"] = len(config.moe_layers)
            sizes["interleave_moe_layer_step"] = config.interleave_moe_layer_step
        sizes["layers without rotation"] = config.no_rope_layers.count(0)
        sizes["no_rope_layer_interval"] = config.no_rope_layer_interval
        sizes["attention_chunk_size"] = config.attention_chunk_size
    names += ["vocab_size"]
    head = {name: getattr(config, name) for name in names}
    tail = {name: getattr(config, name) for name in ("max_position_embeddings", "tie_word_embeddings")}
    return {**head, **sizes, **tail, "rope": _rope(config.rope_parameters)}


def _rope(parameters: dict | None) -> str:
    parameters = {key: value for key, value in (parameters or {}).items() if value is not None}
    kind = parameters.pop("rope_type", "default")
    return ", ".join(
        [kind, *(f"{name} {value:g}" for name, value in parameters.items() if isinstance(value, float))]
    )


def _presets(config: LlamoeBaseConfig) -> list[str]:
    """Published models of the same sizes that differ least in all other fields."""
    ranks = defaultdict(list)
    hidden = config.get_text_config().hidden_size
    for name, fields in PRESETS.items():
        if fields.get("text_config", fields)["hidden_size"] != hidden:
            continue
        known = preset(name)
        if isinstance(config, LlamoeTextConfig) and isinstance(known, LlamoeConfig):
            known = known.text_config
        if type(known) is not type(config):
            continue
        structure, function = compare_configs(config, known)
        if not structure:
            mine, its = config.get_text_config(), known.get_text_config()
            longest = [getattr(text, "max_position_embeddings", None) for text in (mine, its)]
            ranks[2 * len(function) + (longest[0] != longest[1])].append(name)
    return ranks[min(ranks)] if ranks else []


def _mismatches(expected: dict[str, tuple[int, ...]], tensors: Mapping[str, Header]) -> list[str]:
    tensors = {str(expert_of(key) or key): tensor for key, tensor in tensors.items()}
    if any(map(expert_of, tensors)):
        expected = split_shapes(expected)
    lines = [f"{key} {list(shape)} is missing" for key, shape in expected.items() if key not in tensors]
    for key, tensor in tensors.items():
        if key not in expected:
            lines.append(f"{key} {list(tensor.shape)} is not of this model")
        elif tuple(tensor.shape) != expected[key]:
            lines.append(f"{key} is {list(tensor.shape)} and should be {list(expected[key])}")
    return lines


def _guess(tensors: Mapping[str, Header]) -> tuple[str, dict[str, Any]]:
    """Family and sizes as keys and shapes show them without a configuration; they do not show the number of heads."""
    sizes: dict[str, Any] = {}
    for key, tensor in tensors.items():
        if re.search(r"(embed_tokens|tok_embeddings)\.weight$", key) and len(tensor.shape) == 2:
            sizes["vocab_size"], sizes["hidden_size"] = tensor.shape
        elif key.endswith("experts.gate_up_proj") and len(tensor.shape) == 3:
            sizes["num_local_experts"] = tensor.shape[0]
            sizes["intermediate_size"] = tensor.shape[2] // 2
        elif re.search(r"layers\.\d+\.mlp\.gate_proj\.weight$", key):
            sizes["intermediate_size"] = tensor.shape[0]
        elif re.search(r"visual\.(conv1|patch_embed\.proj)\.weight$", key):
            sizes["hidden_size"], sizes["patch_size"] = tensor.shape[0], tensor.shape[-1]
    if layers := layers_of(None, tensors):
        sizes["num_hidden_layers"] = len(layers)
    for family, pattern in _FAMILIES:
        if any(map(pattern.search, tensors)):
            return f"looks like {family}", sizes
    return "unknown", sizes


def _need(weights: int, cached: int) -> str:
    return (
        in_units(weights)
        if not cached
        else f"{in_units(weights)} + {in_units(cached)} of cache = {in_units(weights + cached)}"
    )


def _text(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _runs(sizes: list[int]) -> str:
    counts = Counter(sizes)
    return ", ".join(f"{in_units(size)} ({count} layers)" for size, count in counts.most_common(4)) + (
        ", ..." if len(counts) > 4 else ""
    )
