"""Meta's own folders, in and out: LLaMA 1, 2 and 3, and Llama 4 with its vision tower.

Such a folder holds params.json and one file of weights for each model-parallel process, consolidated.00.pth and so on,
all with the same names and each with its part of every large tensor; tokenizer.model lies in it or one level up. The
names are in `meta_tables`, the parameters in `meta_params`. Sizes are read off the tensors; params.json says what no
tensor shows, and where both speak and differ, that is an error.
"""

import importlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..configuration import LlamoeDenseConfig, LlamoeVisionConfig, count_parameters
from ..configuration._base import LlamoeBaseConfig
from ..modeling.weights import CheckpointError
from .checkpoint import Checkpoint, Report, check_model, identify, make_report, parse_dtype
from .files import open_pickle, read_json
from .lazy import LazyTensor, Slot
from .meta_params import (
    Params,
    Seen,
    add_kept,
    check_entries,
    needs_own_scaling,
    read_config,
    says_llama4,
    write_params,
)
from .meta_tables import check_division, llama4_table, llama_table
from .tables import read_through, write_through
from .writing import Plan, Progress, check_target, to_json, write

KEPT = "llamoe.json"
_FILE = re.compile(r"consolidated(?:\.(\d+))?\.pth")
_SCALES = re.compile(r"(fp8|int4)_scales.*")
_TUNED = re.compile(r"instruct|chat", re.IGNORECASE)
# Bytes of weights that Meta's own releases hold at most in a file, in all but Llama 4's: eight files are the most.
_LARGEST_FILE, _MOST_FILES = 17.5e9, 8
# Larger vocabularies are tiktoken's (Llama 3: 128256); those of SentencePiece have 32000 to 32016 pieces.
_LARGEST_SENTENCEPIECE = 65536
# Tensors that one file has as parts of the same one: each is remembered in a slot of its own.
_SLOTS = {"k_proj": 1, "up_proj": 1, "v_proj": 2}


def open_meta(folder: str | os.PathLike) -> Checkpoint:
    """Open a folder of Meta's: LLaMA 1, 2 or 3, or Llama 4.

    Args:
        folder: it holds params.json and consolidated.00.pth to consolidated.NN.pth, or one consolidated.pth.

    Returns:
        the checkpoint, under Hugging Face's names.

    Raises:
        CheckpointError: a file is missing or damaged, the weights are quantized, the tokenizer is another model's, or
            params.json and the tensors, or the files among themselves, contradict each other.
    """
    folder = Path(folder)
    paths = _weight_files(folder)
    params = Params.of(read_json(folder / "params.json"), str(folder / "params.json"))
    dropped: dict[str, str] = {}
    files = []
    for path in paths:
        tensors, others = open_pickle(path)
        files.append(tensors)
        for name, kind in others.items():
            state = name.endswith("._extra_state")
            dropped[name] = "no weight: state of a layer in training" if state else f"no tensor but a {kind}"
    generation = _generation(params, files[0])
    dropped |= check_entries(params, generation == 4)
    params, seen, axis = _measure(params, files, generation)
    seen = replace(seen, instruct=_is_tuned(folder))
    try:
        config = read_config(params, seen)
        if (folder / KEPT).is_file():
            config = add_kept(config, read_json(folder / KEPT), str(folder / KEPT))
            config.validate()
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{params.origin}: {error}") from error
    table = llama4_table(config) if seen.generation == 4 else llama_table(axis)
    tensors, left_out = read_through(table, files, config)
    tensors = check_model(config, tensors, str(folder))
    companions, notes = _read_tokenizer(folder, config, seen.instruct)
    kind = "meta-llama4" if seen.generation == 4 else "meta-llama"
    return Checkpoint(folder, kind, config, tensors, dropped | left_out, companions, paths, notes)


def _weight_files(folder: Path) -> list[Path]:
    """The weight files in the order of their numbers."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if "params.json" not in names:
        raise CheckpointError(f"{folder}: holds no params.json, which a folder of Meta's weights has.")
    for name in names:
        if match := _SCALES.fullmatch(name):
            raise CheckpointError(
                f"{folder / name}: belongs to a release quantized to {match[1]}, which is not converted. Get the bfloat16 "
                "weights."
            )
    numbered = {int(match[1]): name for name in names if (match := _FILE.fullmatch(name)) and match[1]}
    if "consolidated.pth" in names:
        if numbered:
            raise CheckpointError(
                f"{folder}: holds consolidated.pth and {numbered[min(numbered)]}. Remove what is not the model."
            )
        return [folder / "consolidated.pth"]
    if not numbered:
        raise CheckpointError(f"{folder}: holds params.json, but no consolidated.00.pth.")
    width = len(next(iter(numbered.values()))) - len("consolidated..pth")
    missing = [f"consolidated.{n:0{width}d}.pth" for n in range(max(numbered)) if n not in numbered]
    if missing:
        raise CheckpointError(f"{folder}: {', '.join(missing)} missing; there is {numbered[max(numbered)]}.")
    if len(numbered) != len([name for name in names if (match := _FILE.fullmatch(name)) and match[1]]):
        raise CheckpointError(
            f"{folder}: a file of weights is there twice: {', '.join(filter(_FILE.fullmatch, names))}."
        )
    return [folder / numbered[number] for number in sorted(numbered)]


def _generation(params: Params, tensors: Mapping[str, LazyTensor]) -> int:
    """Which LLaMA it is, 1 to 4.

    Llama 4 shows in its parameters and names. Of the others, Llama 3 has a large vocabulary or scaled rotary embeddings;
    LLaMA 1 keeps the rotary frequencies in each layer and Llama 2 once; where they were removed, the norms' 1e-6 is that
    of LLaMA 1's smaller sizes.
    """
    if says_llama4(params) or any(
        name.endswith(("attention.wqkv.weight", "feed_forward.router_DE"))
        or name.startswith("vision_embeddings.")
        for name in tensors
    ):
        return 4
    embedding = tensors.get("tok_embeddings.weight")
    if params.flag("use_scaled_rope") or (
        embedding is not None and embedding.shape[0] > _LARGEST_SENTENCEPIECE
    ):
        return 3
    if any(name.endswith("inner_attention.rope.freqs") for name in tensors):
        return 1
    if "rope.freqs" in tensors or "rope_theta" in params or "n_kv_heads" in params:
        return 2
    return 1 if params.number("norm_eps", 1e-5) == 1e-6 else 2


class _Measures:
    """Shapes of a folder's tensors, in whole and in each of its files."""

    def __init__(self, params: Params, files: Sequence[Mapping[str, LazyTensor]]):
        self.params, self.first, self.count = params, files[0], len(files)

    def get(self, name: str, ndim: int) -> LazyTensor:
        """The first file's tensor of that name."""
        tensor = self.first.get(name)
        if tensor is None:
            origin = next((tensor.origin for tensor in self.first.values()), self.params.origin)
            raise CheckpointError(f"{origin.rpartition(': ')[0] or origin}: {name} missing.")
        if tensor.ndim != ndim:
            raise CheckpointError(f"{tensor.origin} has shape {list(tensor.shape)}; expected: {ndim} axes.")
        return tensor

    def whole(self, suffix: str, axis: int, ndim: int = 2) -> int | None:
        """The size, over all files, of an axis of the first tensor whose name ends so; None if there is none."""
        found = [name for name in self.first if name.endswith(suffix)]
        return self.get(found[0], ndim).shape[axis] * self.count if found else None

    def check_rows(self, name: str, heads: str) -> None:
        """Compare the rows of a projection of the first layer with the heads that params.json gives it."""
        if name not in self.first:
            return
        head_dim = _head_dim(self.params)
        count = sum(self.params.integer(part, self.params.integer("n_heads")) for part in heads.split())
        tensor = self.get(name, 2)
        if tensor.shape[0] * self.count != count * head_dim:
            raise CheckpointError(
                f"{tensor.origin} has {tensor.shape[0]} rows in {self.count} file(s), {tensor.shape[0] * self.count} in all, "
                f"but {' + '.join(heads.split())} = {count} heads of {head_dim} ({self.params.origin}) need "
                f"{count * head_dim}. A file is missing, or params.json is another model's."
            )


def _head_dim(params: Params) -> int:
    return params.integer("head_dim", params.integer("dim") // params.integer("n_heads") or 1)


def _measure(
    params: Params, files: Sequence[Mapping[str, LazyTensor]], generation: int
) -> tuple[Params, Seen, int]:
    """Read sizes off the tensors and compare them with params.json.

    Returns:
        the parameters with what they left to the tensors, the sizes, and the axis along which the embedding is split.
    """
    see = _Measures(params, files)
    dim, count = params.integer("dim"), len(files)
    norm = see.get("norm.weight", 1)
    if norm.shape[0] != dim:
        raise CheckpointError(
            f"{norm.origin} has {norm.shape[0]} elements, but {params.origin} says dim = {dim}."
        )
    layers = {int(match[1]) for name in see.first if (match := re.match(r"layers\.(\d+)\.", name))}
    if len(layers) != params.integer("n_layers") or layers != set(range(len(layers))):
        shown = f"{len(layers)} layers, up to {max(layers)}" if layers else "none"
        raise CheckpointError(
            f"{norm.origin.rpartition(': ')[0]}: holds {shown}, but {params.origin} says n_layers = "
            f"{params.integer('n_layers')}."
        )
    vocab_size, axis = _measure_embedding(see, dim, generation)
    kv_heads = params.integer("n_kv_heads", params.integer("n_heads"))
    for name in ("n_heads", "n_kv_heads"):
        if (heads := params.integer(name, kv_heads)) % count:
            raise CheckpointError(
                f"{params.origin}: {name} = {heads} cannot be divided by the {count} files; each holds whole heads. A file "
                "is missing or too many, or params.json is another model's."
            )
    see.check_rows("layers.0.attention.wq.weight", "n_heads")
    see.check_rows("layers.0.attention.wk.weight", "n_kv_heads")
    see.check_rows("layers.0.attention.wqkv.weight", "n_heads n_kv_heads n_kv_heads")
    for name, tensor in see.first.items():
        if name.endswith("rope.freqs") and tensor.ndim == 1 and 2 * tensor.shape[0] != _head_dim(params):
            raise CheckpointError(
                f"{tensor.origin} has {tensor.shape[0]} frequencies, half of a head's channels, but {params.origin} says n_heads "
                f"= {params.integer('n_heads')}, heads of {_head_dim(params)}."
            )
    inner = see.whole("feed_forward.w1.weight", 0)
    if fused := see.whole("feed_forward.mlp.fc1_weight", 0):
        inner = fused // 2
    seen = Seen(
        generation,
        vocab_size,
        inner=inner,
        expert_inner=see.whole("experts.moe_w_in_eD_F", 1) or see.whole("experts.w1", 2, ndim=3),
        vision_inner=see.whole("resblocks.0.mlp.c_fc.weight", 0),
        dtype=str(norm.dtype).removeprefix("torch."),
    )
    return (_check_parts_of_llama4(see) if generation == 4 else params), seen, axis


def _measure_embedding(see: _Measures, dim: int, generation: int) -> tuple[int, int]:
    """Rows of the embedding, and the axis along which it is split: rows in Llama 3 and 4, columns before."""
    embedding, output = see.get("tok_embeddings.weight", 2), see.get("output.weight", 2)
    rows, columns = embedding.shape
    if columns == dim:
        vocab_size, axis = rows * see.count, 0 if see.count > 1 or generation > 2 else 1
    elif columns * see.count == dim and generation < 4:
        vocab_size, axis = rows, 1
    else:
        raise CheckpointError(
            f"{embedding.origin} has {columns} columns in {see.count} file(s), {columns * see.count} in all, but "
            f"{see.params.origin} says dim = {dim}. A file is missing or too many, or params.json is another model's."
        )
    if output.shape[0] * see.count != vocab_size:
        raise CheckpointError(
            f"{output.origin} has {output.shape[0]} rows in {see.count} file(s), {output.shape[0] * see.count} in all, but "
            f"{embedding.origin} gives {vocab_size} tokens."
        )
    return vocab_size, axis


def _check_parts_of_llama4(see: _Measures) -> Params:
    """Compare which layers are mixtures, the experts and the tower with params.json; fill in a number of experts of -1."""
    params, origin = see.params, next(iter(see.first.values())).origin.rpartition(": ")[0]
    routers = {
        int(match[1]): name
        for name in see.first
        if (match := re.fullmatch(r"layers\.(\d+)\.feed_forward\.router_DE", name))
    }
    experts = params.part("moe_args")
    if experts is None:
        if routers:
            raise CheckpointError(
                f"{origin}: {next(iter(routers.values()))} is there, but {params.origin} has no moe_args."
            )
    else:
        step, count = experts.integer("interleave_moe_layer_step", 1), params.integer("n_layers")
        expected = list(range(step - 1, count, step))
        if sorted(routers) != expected:
            raise CheckpointError(
                f"{origin}: layers {sorted(routers)} have a router, but {params.origin} says moe_args."
                f"interleave_moe_layer_step = {step}, which means layers {expected}."
            )
        for name in routers.values():
            router = see.get(name, 2)
            if experts.entries.get("num_experts", -1) == -1:
                experts = replace(experts, entries={**experts.entries, "num_experts": router.shape[1]})
            if router.shape[1] != experts.integer("num_experts"):
                raise CheckpointError(
                    f"{router.origin} has {router.shape[1]} columns, but {params.origin} says moe_args.num_experts = "
                    f"{experts.integer('num_experts')}."
                )
        params = replace(params, entries={**params.entries, "moe_args": experts.entries})
    tower = [name for name in see.first if name.startswith(("vision_embeddings.", "vision_projection."))]
    if bool(tower) != (params.part("vision_args") is not None):
        has, lacks = (tower[0], "vision_args") if tower else ("vision_args", "vision_embeddings")
        raise CheckpointError(
            f"{origin} and {params.origin}: {has} is there, but no {lacks}. The tower needs both tensors and parameters."
        )
    return params


def _is_tuned(folder: Path) -> bool:
    folder = folder.absolute()
    name = folder.parent.name if folder.name == "original" else folder.name
    return _TUNED.search(name) is not None


def _read_tokenizer(
    folder: Path, config: LlamoeBaseConfig, instruct: bool
) -> tuple[dict[str, bytes], list[str]]:
    """Tokenizer and what belongs to it, for a Hugging Face folder."""
    for path in (folder / "tokenizer.model", folder.absolute().parent / "tokenizer.model"):
        if path.is_file():
            tokenizers = _tokenizers()
            if tokenizers is None:
                return {}, []
            return tokenizers.hf_files_from_meta(path, config, instruct=instruct or None), []
    return {}, [f"no tokenizer.model in {folder} or above it: the result has no tokenizer"]


def _tokenizers() -> Any:
    try:
        return importlib.import_module(".tokenizers", __package__)
    except ModuleNotFoundError:
        return None


def save_meta(
    checkpoint: Checkpoint,
    target: str | os.PathLike,
    *,
    shards: int | None = None,
    style: str = "release",
    dtype: str | torch.dtype | None = None,
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Write a checkpoint as a folder of Meta's, which Meta's code and other readers of its format load.

    Dense models are written as LLaMA 2, or as Llama 3 where tokenizer, vocabulary or rotary scaling are its; mixtures as
    Llama 4. params.json holds what Meta's code knows. What it has no key for and no number depends on (context length,
    token ids, training) goes into llamoe.json, so that `open_meta` gives back the same configuration.

    Args:
        checkpoint: what to write.
        target: a folder that does not exist or is empty.
        shards: model-parallel files, written together; they divide the key/value heads and the sizes. None takes as many
            as Meta's releases of that size have: 17.5 GB a file, at most eight files.
        style: for Llama 4, "release" for the fused names of the releases, "unfused" for those of Meta's modules.
        dtype: of all tensors: "float32", "float16" or "bfloat16"; None keeps each one's.
        resume: go on with a folder that an earlier run left unfinished.
        dry_run: check and plan everything, write nothing.
        progress: is told of every block.
        options: what else shaped the checkpoint, which a resumed run must share.

    Raises:
        ValueError: an option is unknown, a size cannot be divided by the files, a field of the configuration means
            something that Meta's code cannot compute, the target is in use, or a tensor is missing, unknown, of another
            shape, or not finite.
        OSError: the disk is full or fails.
    """
    begun = time.monotonic()
    target, config = Path(target), checkpoint.config
    if isinstance(config, LlamoeVisionConfig):
        raise ValueError(f"{checkpoint.path}: is a vision tower alone, for which Meta has no format.")
    wanted = parse_dtype(dtype)
    check_target(target, resume)
    tokenizer = _write_tokenizer(checkpoint.companions)
    generation = _generation_to_write(config, tokenizer)
    params, kept = write_params(config, generation)
    embedding_axis = 0 if generation > 2 else 1
    tensors = check_model(config, checkpoint.tensors, str(checkpoint.path))
    tensors, notes = _untied(config, tensors)
    if needs_own_scaling(params):
        notes.append(
            "Llama 3's own code scales rotary embeddings by 8 and 4 whatever params.json says; rope_scaling_factor and "
            "rope_high_freq_factor are written for other readers"
        )
    if tokenizer is None and checkpoint.companions:
        notes.append(
            "the source's tokenizer has no form that Meta's code reads: no tokenizer.model is written"
        )
    if shards is None:
        shards = _usual_files(config, tensors, wanted, embedding_axis)
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise ValueError(f"shards = {shards!r}: should be a whole number of at least 1.")
    check_division(config, shards, embedding_axis)
    table = llama_table(embedding_axis) if generation < 4 else llama4_table(config, style)
    slots = [Slot() for _ in range(1 + max(_SLOTS.values()))]
    for name, tensor in tensors.items():
        tensor = tensor if wanted is None else tensor.cast(wanted)
        # Every file takes its part of a block, which is read once for all.
        tensors[name] = tensor.remember(slots[_SLOTS.get(name.split(".")[-2], 0)])
    parts = write_through(table, tensors, shards, config)
    plan = Plan(
        [{f"consolidated.{number:02d}.pth": part for number, part in enumerate(parts)}],
        before={} if tokenizer is None else {"tokenizer.model": tokenizer},
        last={**({KEPT: to_json(kept)} if kept else {}), "params.json": to_json(params)},
        identity={"source": identify(checkpoint), "to": "meta", "style": style, **(options or {})},
    )
    if not dry_run:
        write(plan, target, resume, progress)
    report = make_report(checkpoint, target, "meta", plan, begun, dry_run)
    report.notes.extend(notes)
    return report


def _write_tokenizer(companions: Mapping[str, bytes]) -> bytes | None:
    tokenizers = _tokenizers()
    return None if tokenizers is None else tokenizers.meta_tokenizer_model(companions)


def _generation_to_write(config: LlamoeBaseConfig, tokenizer: bytes | None) -> int:
    """2, 3 or 4; a dense model's tokenizer decides, and where there is none, its vocabulary and rotary scaling."""
    if not isinstance(config, LlamoeDenseConfig):
        return 4
    if (config.rope_parameters or {}).get("rope_type") == "llama3":
        return 3  # LLaMA 2's code knows no scaling
    if tokenizer is not None:  # tiktoken's are lines of text, SentencePiece's a protobuf
        return 3 if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", tokenizer) else 2
    return 3 if config.vocab_size > _LARGEST_SENTENCEPIECE else 2


def _untied(
    config: LlamoeBaseConfig, tensors: dict[str, LazyTensor]
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Give a model whose embedding is its output head a head of its own, as Meta's code has one always."""
    if not config.get_text_config().tie_word_embeddings:
        return tensors, []
    heads = {
        name.replace("model.embed_tokens", "lm_head"): tensor
        for name, tensor in tensors.items()
        if name.endswith("model.embed_tokens.weight")
    }
    note = "the embedding serves as the output head (tie_word_embeddings); Meta's format has no such thing: output.weight is a copy"
    return {**tensors, **heads}, [note]


def _usual_files(
    config: LlamoeBaseConfig,
    tensors: Mapping[str, LazyTensor],
    dtype: torch.dtype | None,
    embedding_axis: int,
) -> int:
    """As many files as Meta's releases of that size have, or fewer where sizes do not divide."""
    width = (dtype or next(iter(tensors.values())).dtype).itemsize
    nbytes, files = count_parameters(config).total * width, 1
    while files < _MOST_FILES and nbytes / files > _LARGEST_FILE:
        try:
            check_division(config, 2 * files, embedding_axis)
        except ValueError:
            break
        files *= 2
    return files
