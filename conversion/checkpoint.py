"""A checkpoint, whatever it came from: a configuration and lazy tensors under stock Hugging Face keys.

Every source becomes one of these and every target is written from one, so that a command that changes weights works on
all formats. Here are those for Hugging Face folders: safetensors or .bin, in one file or many.
"""

import copy
import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..configuration import (
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
    from_stock,
    to_stock,
)
from ..configuration._base import LlamoeBaseConfig
from ..configuration._files import LARGE
from ..configuration._hub import written_by
from ..modeling.weights import CheckpointError, WeightFiles, check_shards, find_weights
from .experts import fuse_experts, split_experts
from .files import open_pickle, open_safetensors, read_bytes, read_json
from .lazy import LazyTensor, compute
from .processors import processor_of_layout
from .source_files import Look, look_at, note, remember_looks
from .targets import check_target
from .tokenizers import check_companions
from .writing import Plan, Progress, parse_size, split_shards, write

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# Files beside config.json and the weights that belong to a checkpoint.
_COMPANIONS = re.compile(
    r"tokenizer\.(json|model)|(tokenizer|generation|processor|preprocessor|video_preprocessor)_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|chat_template\.(jinja|json)"
    r"|(LICENSE|NOTICE|USE_POLICY)(\.\w+)?"
)
_DROPPED = (
    (r".*rotary_emb\.inv_freq", "computed from the configuration"),
    (r".*rotary_embedding\.freqs_ci", "computed from the configuration"),
)


@dataclass
class Checkpoint:
    """A checkpoint that was opened.

    Attributes:
        path: file or folder that it was opened from.
        kind: "meta-llama", "meta-llama4", "hf", "open_clip" or "clip".
        config: of ours.
        tensors: stock key to tensor, with stacked experts.
        dropped: key of the source to the reason why it has no place in `tensors`.
        companions: name to content of the files that come along, in Hugging Face's form.
        sources: the weight files.
        looks: every file that was read, as it looked before.
        notes: what a user should know of how the source was read.
    """

    path: Path
    kind: str
    config: LlamoeBaseConfig
    tensors: dict[str, LazyTensor]
    dropped: dict[str, str] = field(default_factory=dict)
    companions: dict[str, bytes] = field(default_factory=dict)
    sources: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    looks: dict[Path, Look] = field(default_factory=dict)


@dataclass
class Report:
    """What a conversion did, or with `dry_run` would do.

    Attributes:
        source, target: paths.
        kind: of the source, see `Checkpoint`.
        to: "hf", "meta", "open_clip" or "clip".
        files: weight files of the target.
        tensors: how many tensors they hold.
        bytes: of those tensors.
        dropped: key of the source to the reason why it was left out.
        notes: what else a user should know.
        seconds: that it took.
        dry_run: nothing was written.
    """

    source: str
    target: str
    kind: str
    to: str
    files: list[str]
    tensors: int
    bytes: int
    dropped: dict[str, str]
    notes: list[str]
    seconds: float
    dry_run: bool


@remember_looks
def open_hf(folder: str | os.PathLike, *, companions: bool = True) -> Checkpoint:
    """Open a Hugging Face folder of LLaMA, Llama 4 or llamoe.

    Args:
        folder: it holds config.json and the weights.
        companions: whether the tokenizer and what belongs to it will be used, and so are checked.

    Raises:
        CheckpointError: a file is missing or damaged, the architecture is unknown, weights are quantized, tensors are
            missing, unknown, or of other shapes than config.json says, or the tokenizer is another model's.
    """
    folder = Path(folder)
    config = _read_config(folder)
    weights = weight_files(folder)
    sources = weights.files
    tensors: dict[str, LazyTensor] = {}
    held: dict[str, Path] = {}
    dropped: dict[str, str] = {}
    for path in sources:
        opened, others = (open_safetensors(path), {}) if path.suffix == ".safetensors" else open_pickle(path)
        dropped |= {name: f"no tensor but a {kind}" for name, kind in others.items()}
        for name, tensor in opened.items():
            if name in held:
                raise CheckpointError(f"{path}: {name!r} is in {held[name]} too.")
            tensors[name], held[name] = tensor, path
    check_shards(weights, held)
    dropped |= {
        name: reason for name in tensors for pattern, reason in _DROPPED if re.fullmatch(pattern, name)
    }
    if getattr(config.get_text_config(), "tie_word_embeddings", False):  # a tower has no such field
        dropped |= tie_heads(tensors)
    kept = fuse_experts({name: tensor for name, tensor in tensors.items() if name not in dropped})
    kept = check_model(config, kept, str(folder))
    found = read_companions(folder, check=companions)
    notes = check_companions(found, config, str(folder)) if companions else []
    return Checkpoint(folder, "hf", config, kept, dropped, found, sources, notes)


def weight_files(folder: Path) -> WeightFiles:
    """Find the weight files of a Hugging Face folder, in the order of their names.

    Raises:
        CheckpointError: there are none, one that the index names is missing or outside, or there are two sets of them.
    """
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        note(folder / name)
    found = find_weights(folder)
    if found is None:
        raise CheckpointError(
            f"{folder}: no weights in this folder; looked for model.safetensors and pytorch_model.bin, and for "
            "the index of either in several files."
        )
    for path in found.files:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file, though {found.index} names it.")
    return found


def read_companions(folder: Path, check: bool = True) -> dict[str, bytes]:
    """Read the small files of a Hugging Face folder that belong to the model: tokenizer, templates, processor.

    Args:
        folder: it holds config.json.
        check: whether to look into the files.

    Raises:
        CheckpointError: one is called .json and is none.
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


def save_hf(
    checkpoint: Checkpoint,
    target: str | os.PathLike,
    *,
    layout: str | None = None,
    experts: str = "fused",
    dtype: str | torch.dtype | None = None,
    shard_size: int | str = "5GB",
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        checkpoint: what to write.
        target: a folder that does not exist or is empty.
        layout: "stock" writes the config.json of transformers' own model type, which llamoe, transformers, vLLM and
            others read; "llamoe" writes ours, with llamoe_hub.py; None takes the first that can express the model.
        experts: "fused" stacks the experts as stock does; "split" writes one linear layer an expert.
        dtype: of all floating tensors; None keeps each one's.
        shard_size: bytes that a file should not exceed, as a number or a text such as "5GB".
        resume: go on with a folder that an earlier run left unfinished.
        dry_run: check and plan everything, write nothing.
        progress: is told of every block.
        options: what else shaped the checkpoint, which a resumed run must share.

    Raises:
        ValueError: an option is unknown, the target is in use, stock cannot express the model, or a tensor is missing,
            unknown, of another shape, or not finite.
        OSError: the disk is full or fails.
    """
    begun = time.monotonic()
    target = Path(target)
    if experts not in ("fused", "split"):
        raise ValueError(f"experts = {experts!r}: valid are 'fused' and 'split'.")
    wanted = parse_dtype(dtype)
    check_target(target, resume)
    tensors = check_model(checkpoint.config, checkpoint.tensors, str(checkpoint.path))
    if wanted is not None:
        tensors = {name: tensor.cast(wanted) for name, tensor in tensors.items()}
    described, layout = _config_files(checkpoint.config, tensors, layout)
    if experts == "split":
        tensors = split_experts(tensors)
    groups, index = split_shards(tensors, parse_size(shard_size))
    plan = Plan(
        groups,
        before={**processor_of_layout(checkpoint.companions, layout), **described},
        last=index,
        identity={"source": identify(checkpoint), "to": "hf", "layout": layout, **(options or {})},
        sources=checkpoint.looks,
    )
    if not dry_run:
        write(plan, target, resume, progress)
    report = make_report(checkpoint, target, "hf", plan, begun, dry_run)
    if (
        isinstance(checkpoint.config, LlamoeConfig)
        and layout == "stock"
        and _main_dtype(tensors) != torch.bfloat16
    ):
        report.notes.append(
            "transformers' processor gives bfloat16 pixels, which its own model class does not cast: give it "
            "inputs.to(model.dtype), or call llamoe.adopt('llama4') before loading: llamoe's processor gives float32, "
            "and its model casts"
        )
    return report


def make_report(
    checkpoint: Checkpoint, target: Path, to: str, plan: Plan, begun: float, dry_run: bool
) -> Report:
    """Say what a plan came to; `begun` is `time.monotonic()` of the beginning."""
    return Report(
        source=str(checkpoint.path),
        target=str(target),
        kind=checkpoint.kind,
        to=to,
        files=list(plan.files),
        tensors=sum(len(tensors) for tensors in plan.files.values()),
        bytes=plan.nbytes,
        dropped=dict(checkpoint.dropped),
        notes=list(checkpoint.notes),
        seconds=time.monotonic() - begun,
        dry_run=dry_run,
    )


def identify(checkpoint: Checkpoint) -> list[list[Any]]:
    """Name and look of the source's weight files: another content does not resume a conversion."""
    looks = [(path, checkpoint.looks.get(path) or look_at(path)) for path in checkpoint.sources]
    return [[str(path.absolute()), *look] for path, look in looks]


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Read a dtype by its name.

    Raises:
        ValueError: it is none of float32, float16 and bfloat16.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in DTYPES:
        raise ValueError(
            f"dtype = {name!r}: valid are float32, float16 and bfloat16, or none to keep the source's."
        )
    return None if dtype is None else DTYPES[name]


def model_class(config: LlamoeBaseConfig) -> type:
    """The class of ours whose checkpoint a configuration describes: with its language model head, or a tower."""
    import llamoe

    name = {
        LlamoeDenseConfig: "LlamoeDenseForCausalLM",
        LlamoeTextConfig: "LlamoeForCausalLM",
        LlamoeConfig: "LlamoeForConditionalGeneration",
        LlamoeVisionConfig: "LlamoeVisionModel",
    }[type(config)]
    return getattr(llamoe, name)


def expected_shapes(config: LlamoeBaseConfig) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the model that a configuration describes, in its order.

    Raises:
        CheckpointError: torch or transformers cannot make that model, of a configuration that passed our checks.
    """
    try:
        with torch.device("meta"):
            model = model_class(config)(copy.deepcopy(config))
    except (
        RuntimeError,
        ArithmeticError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        AssertionError,
    ) as error:
        raise CheckpointError(f"no model can be made of the configuration ({error}).") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if getattr(config.get_text_config(), "tie_word_embeddings", False):  # a tower has no such field
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith("lm_head.weight")}
    return shapes


def expected_shapes_of(config: LlamoeBaseConfig, count: int, place: str) -> dict[str, tuple[int, ...]]:
    """`expected_shapes` for a configuration that may be damaged: too many layers end at once, with a message."""
    parts = [getattr(config, name) for name in config.sub_configs] or [config]
    layers = sum(part.num_hidden_layers for part in parts)
    if layers > count:  # every layer has several tensors
        raise CheckpointError(
            f"{place}: holds {count} tensors, too few for the {layers} layers that the configuration describes."
        )
    try:
        return expected_shapes(config)
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error


def check_model(
    config: LlamoeBaseConfig, tensors: Mapping[str, LazyTensor], place: str
) -> dict[str, LazyTensor]:
    """Compare tensors with the model that a configuration describes; give them in the model's order.

    Raises:
        CheckpointError: one is missing, unknown, of another shape, or of a dtype that no weight has.
    """
    expected = expected_shapes_of(config, len(tensors), place)
    for name, tensor in tensors.items():
        if name not in expected:
            origin = tensor.origin or place
            raise CheckpointError(f"{origin}: the model that the configuration describes has no {name}.")
        if tensor.shape != expected[name]:
            raise CheckpointError(
                f"{tensor.origin}: gives {name} of shape {list(tensor.shape)}, but the configuration asks for "
                f"{list(expected[name])}. Weights and configuration do not belong together."
            )
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise CheckpointError(
                f"{tensor.origin}: has dtype {str(tensor.dtype).removeprefix('torch.')}; plain float32, float16 or "
                "bfloat16 weights were expected. Quantized weights are not converted."
            )
    missing = [name for name in expected if name not in tensors]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(
            f"{place}: {', '.join(missing[:5])}{more} missing; the checkpoint is not whole."
        )
    return {name: tensors[name] for name in expected}


def tie_heads(tensors: dict[str, LazyTensor]) -> dict[str, str]:
    """Let the embedding stand for the output head, whose model has one weight for both.

    Args:
        tensors: stock key to tensor. An embedding beside a head is from then on compared with it when it is read, since
            transformers ties only what is equal.

    Returns:
        key of each head to the reason why it has no place.

    Raises:
        CheckpointError: shape or dtype of the two differ.
    """
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    for head in heads:
        name = head.replace("lm_head", "model.embed_tokens")
        if name in tensors:
            tensors[name] = _tied(tensors[name], tensors[head])
    return dict.fromkeys(heads, "the embedding serves as the output head (tie_word_embeddings)")


def _tied(embedding: LazyTensor, head: LazyTensor) -> LazyTensor:
    differs = (
        f"{head.origin}: differs from {embedding.origin}, though the configuration has tie_word_embeddings. Set it to "
        "false if the model has a head of its own."
    )
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        raise CheckpointError(differs)

    def compare(matrix: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if not torch.equal(matrix, other):
            raise CheckpointError(differs)
        return matrix

    return compute(compare, [embedding, head], embedding.shape, embedding.dtype, embedding.origin)


def _read_config(folder: Path) -> LlamoeBaseConfig:
    data = read_json(folder / "config.json")
    if data.get("quantization_config"):
        method = (
            data["quantization_config"].get("quant_method")
            if isinstance(data["quantization_config"], dict)
            else None
        )
        raise CheckpointError(
            f"{folder / 'config.json'}: the weights are quantized ({method}), and quantized weights are not converted. "
            "Use the original ones."
        )
    try:
        return from_stock(data)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def _main_dtype(tensors: Mapping[str, LazyTensor]) -> torch.dtype:
    """The dtype of most numbers."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel
    return max(counts, key=lambda dtype: counts[dtype])


def _config_files(
    config: LlamoeBaseConfig, tensors: Mapping[str, LazyTensor], layout: str | None
) -> tuple[dict[str, bytes], str]:
    """config.json and what belongs to it, and the layout that was taken."""
    if layout not in ("stock", "llamoe", None):
        raise ValueError(
            f"layout = {layout!r}: valid are 'stock' and 'llamoe', or none for the first that fits."
        )
    config = copy.deepcopy(config)
    config.architectures = [model_class(config).__name__]
    config.dtype = _main_dtype(tensors)
    for part in (getattr(config, name) for name in config.sub_configs):
        part.dtype = None if part.dtype is None else config.dtype
    if layout is None:
        try:
            to_stock(config)
            layout = "stock"
        except ValueError:
            layout = "llamoe"
    if isinstance(config, LlamoeVisionConfig) and layout == "stock":
        to_stock(config)
    with tempfile.TemporaryDirectory() as folder, written_by(to_stock if layout == "stock" else None):
        config.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}, layout
