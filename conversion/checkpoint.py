"""A checkpoint of any format: a configuration and lazy tensors under stock Hugging Face keys.

Every source is opened as a `Checkpoint` and every target is written from one, so a command that changes weights works
on all formats. This file also compares tensors with the model that a configuration describes.
"""

import copy
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..configuration import LlamoeConfig, QuantizationConfig
from ..configuration.base import LlamoeBaseConfig, unreadable_as_value_error
from ..configuration.checks import listed
from ..configuration.errors import CheckpointError
from ..configuration.json_files import stamp_of
from ..modeling.checkpoints import in_units
from ..modeling.registration import empty_model
from .io import LazyTensor, Plan, WriteOptions, one_of, write

_MISMATCH = "A file is missing or too many, or the configuration is another model's."


@dataclass
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: file or folder that it was opened from.
        kind: "meta-llama", "meta-llama4", "mistral", "hf", "gguf", "open_clip" or "clip"; if another program has packed
            the weights, its `quant_method`, such as "gptq".
        config: a configuration of llamoe.
        tensors: the weights by their keys in transformers' modules, with stacked experts; packed ones are dequantized.
        dropped: key in the source of each tensor that is not in `tensors`, to the reason.
        companions: tokenizer, chat template and licence files of a Hugging Face folder, name to content.
        sources: the weight files.
        notes: sentences for the user about how the source was read.
        quantization: llamoe's format in which the weights are stored, or which holds another program's codes exactly;
            None for plain weights and all other formats.
        stored: if weights are packed, key to tensor as the files have them.
        in_16_bit: if another program has packed weights, names of modules that it left in 16 bits, or their endings.
    """

    path: Path
    kind: str
    config: LlamoeBaseConfig
    tensors: dict[str, LazyTensor]
    dropped: dict[str, str] = field(default_factory=dict)
    companions: dict[str, bytes] = field(default_factory=dict)
    sources: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    quantization: QuantizationConfig | None = None
    stored: dict[str, LazyTensor] = field(default_factory=dict)
    in_16_bit: Sequence[str] = ()


@dataclass
class Report:
    """What a conversion has written, or with `dry_run` would write.

    Attributes:
        source, target: paths.
        kind: kind of the source, see `Checkpoint`.
        to: "hf", "meta" or "tower".
        files: weight files of the target.
        tensors: number of tensors in these files.
        bytes: bytes of all tensors.
        dropped: key in the source of each tensor that was left out, to the reason.
        notes: sentences for the user.
        seconds: duration of writing.
        dry_run: True if nothing was written.
        parts: if weights were packed, part of the model to its bytes before and after, largest first; else empty.
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
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return the report for printing: titles, each with rows of a label and a text. GB are 10^9 bytes."""
        size = self.bytes / 1e9
        rows = [
            ("source", f"{self.source} ({self.kind})"),
            ("would write" if self.dry_run else "wrote", f"{self.target} ({self.to})"),
            ("files", f"{len(self.files):,}: {_shorten(self.files)}"),
            ("tensors", f"{self.tensors:,}, {size:.3f} GB"),
            ("seconds", f"{self.seconds:.1f}, {size / max(self.seconds, 1e-9):.2f} GB/s"),
        ]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.dropped.items():
            reasons.setdefault(reason, []).append(name)
        rows += [("left out", f"{_shorten(names)}: {reason}") for reason, names in reasons.items()]
        rows += [("note", note) for note in self.notes]
        sections = [("", rows)]
        if self.parts:
            parts = {**self.parts, "in all": tuple(map(sum, zip(*self.parts.values(), strict=True)))}
            sizes = [(part, ", ".join(map(in_units, before_after))) for part, before_after in parts.items()]
            sections.append(("bytes before, after", sizes))
        return sections


def _shorten(names: list[str]) -> str:
    return ", ".join(names if len(names) < 4 else [*names[:2], "…", names[-1]])


def carry_out(plan: Plan, checkpoint: Checkpoint, target: Path, to: str, options: WriteOptions) -> Report:
    """Write a plan unless the options ask for a dry run, and return the report.

    Paths, sizes, times and inodes of the source's files become part of the plan's identity, so that a conversion is not
    resumed from a changed source.
    """
    begun = time.monotonic()
    # The device's number is left out, since it may change when the machine restarts.
    files = [[str(path.absolute()), *stamp_of(path.stat())[:3]] for path in checkpoint.sources]
    plan.identity = {"source": files, "to": to, **plan.identity}
    if not options.dry_run:
        write(plan, target, options.resume, options.progress)
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
        dry_run=options.dry_run,
    )


def main_dtype(tensors: Mapping[str, LazyTensor]) -> torch.dtype:
    """Return the dtype of most elements."""
    counts = Counter()
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.numel
    return max(counts, key=counts.__getitem__)


def take_part(whole: Checkpoint, part: str, reason: str) -> Checkpoint:
    """Take the decoder ("text_config") or the tower ("vision_config") out of a multimodal checkpoint.

    The other tensors are listed as dropped, with the reason.
    """
    prefix = {"text_config": "language_model.", "vision_config": "vision_model."}[part]
    kept = {key: tensor for key, tensor in whole.tensors.items() if key.startswith(prefix)}
    return replace(
        whole,
        config=copy.deepcopy(getattr(whole.config, part)),
        tensors={key.removeprefix(prefix): tensor for key, tensor in kept.items()},
        dropped=whole.dropped | dict.fromkeys((key for key in whole.tensors if key not in kept), reason),
    )


def expected_shapes(config: LlamoeBaseConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a configuration's model by key, in the model's order, without a tied head.

    Raises:
        ConfigurationError: no model can be made of the configuration.
    """
    with unreadable_as_value_error(type(config)):
        model = empty_model(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = tied_head(config)
    return {name: shape for name, shape in shapes.items() if name not in tied}


def check_model(
    config: LlamoeBaseConfig,
    tensors: Mapping[str, LazyTensor],
    source: str,
) -> dict[str, LazyTensor]:
    """Compare tensors with the model that a configuration describes, and return them in the model's order.

    `source` is the checkpoint's file or folder, for errors.

    Raises:
        CheckpointError: a tensor is missing, unknown, has another shape, or a dtype that is not float32, float16 or
            bfloat16.
    """
    expected = expected_shapes(config)
    for name, tensor in tensors.items():
        if name not in expected:
            raise CheckpointError(
                f"{tensor.origin or source}: the model that the configuration describes has no {name}. {_MISMATCH}"
            )
        if tensor.shape != expected[name]:
            raise CheckpointError(
                f"{tensor.origin}: makes {name} of shape {list(tensor.shape)}, but the configuration has "
                f"{list(expected[name])}. {_MISMATCH}"
            )
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise CheckpointError(
                f"{tensor.origin}: has dtype {tensor.dtype_name}; weights in float32, float16 or bfloat16 were "
                "expected. Give the model before it was quantized."
            )
    if missing := [name for name in expected if name not in tensors]:
        raise CheckpointError(f"{source}: {listed(missing)} missing; the checkpoint is incomplete.")
    return {name: tensors[name] for name in expected}


def tied_head(config: LlamoeBaseConfig) -> dict[str, str]:
    """Map the key of the output head to that of the embedding; empty if the configuration does not tie them."""
    # A tower's configuration has no such field.
    if not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return {}
    prefix = "language_model." if isinstance(config, LlamoeConfig) else ""
    return {f"{prefix}lm_head.weight": f"{prefix}model.embed_tokens.weight"}


def tie_heads(config: LlamoeBaseConfig, tensors: dict[str, LazyTensor]) -> dict[str, str]:
    """Remove an output head from `tensors` if the configuration ties it to the embedding; return its key and a reason.

    From then on, reading the embedding raises an error if the stored head differs from it: transformers would load that
    head, although the configuration ties it.

    Raises:
        CheckpointError: embedding and head differ in shape or dtype.
    """
    dropped = {}
    why = "the configuration has tie_word_embeddings. Set it to false if the model has a head of its own."
    for head, embedding in tied_head(config).items():
        if head in tensors:
            stored = tensors.pop(head)
            dropped[head] = "the embedding serves as the output head (tie_word_embeddings)"
            if embedding in tensors:
                tensors[embedding] = one_of([tensors[embedding], stored], why)
    return dropped
