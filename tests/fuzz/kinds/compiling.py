"""`torch.compile`, `torch.export` and `torch.jit.trace`: one program gives the right numbers for several inputs."""

import random
import warnings
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers import StaticCache

from ..batch import Batch, Fed, check, draw_batch, forward
from ..draw import chance, draw_layer_types
from ..judge import Refused
from ..subject import FAMILIES, Subject, draw_subject
from .training import check_gradients, draw_labels

WAYS = ["compile"] * 5 + ["train", "train", "steps", "steps", "export", "export", "export", "trace"]
BACKENDS = ["eager"] * 5 + ["aot_eager"] * 4 + ["inductor"]


def draw_small(rng: random.Random, seed: int) -> Subject:
    family = rng.choice(FAMILIES)
    overrides: dict[str, Any] = {"num_hidden_layers": 2}
    if family in ("ministral", "mixtral"):
        overrides["layer_types"] = draw_layer_types(rng, 2) if family == "ministral" else None
    if family == "llama4_text":
        overrides |= {"head_dim": 2 * rng.choice([1, 3, 5]), "moe_layers": None, "layer_types": None}
        overrides["no_rope_layers"] = rng.choice([[1, 0], [1, 0], [1, 1], [0, 1]])
    experts = [None, None, None, "eager", "batched_mm"]
    return draw_subject(rng, seed, family, dtypes=["float32"], experts=experts, **overrides)


def compare(subject: Subject, call: Any, batch: Batch, what: str, **options: Any) -> None:
    """Compare with the reference, which chooses its own experts: a program's choices are not recorded."""
    output = call(**batch.inputs(), **options)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    check(Fed(batch, logits, None, torch.full(batch.shape, batch.reach())), subject.judge, what)


def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch._dynamo.reset()
    subject = draw_small(rng, seed)
    way = rng.choice(WAYS)
    notes |= {**subject.notes, "way": way}
    kinds = ["plain", "left", "right", "packed", "ones"]

    def draw(kind: str | None = None, longest: int = 33) -> Batch:
        return draw_batch(
            rng,
            generator,
            subject.fields["vocab_size"],
            [kind] if kind else kinds,
            longest,
            subject.fields["pad_token_id"],
        )

    try:
        match way:
            case "train":
                train(rng, subject, draw(), notes)
            case "steps":
                steps(rng, subject, draw("plain"), notes)
            case "export":
                export(rng, subject, draw, notes)
            case "trace":
                trace(rng, subject, draw, notes)
            case _:
                compiled(rng, subject, draw, notes)
    finally:
        torch._dynamo.reset()


@torch.no_grad()
def compiled(rng: random.Random, subject: Subject, draw: Any, notes: dict[str, Any]) -> None:
    backend = rng.choice(BACKENDS)
    dynamic = rng.choice([None, None, True, False])
    model = torch.compile(subject.model, fullgraph=True, backend=backend, dynamic=dynamic)
    kind = rng.choice(["plain", "left", "right", "packed", "ones"])
    notes |= {"backend": backend, "batch": kind, "dynamic": dynamic}
    for _ in range(1 if backend == "inductor" else rng.choice([1, 2, 3])):
        compare(subject, model, draw(kind), f"compiled by {backend}", use_cache=False)


def train(rng: random.Random, subject: Subject, batch: Batch, notes: dict[str, Any]) -> None:
    backend = rng.choice(["eager", "aot_eager"])
    model = subject.model.train()
    labels = draw_labels(rng, batch)
    notes |= {"backend": backend, "batch": batch.kind}
    if not (labels[:, 1:] != -100).any():
        return
    # Its choices are those of the compiled pass, in float32.
    _, fed = forward(model, batch)
    subject.judge.check_no_tie_of(fed)
    output = torch.compile(model, fullgraph=True, backend=backend)(
        **batch.inputs(), labels=labels, use_cache=False
    )
    output.loss.backward()
    fed.logits = output.logits
    check_gradients(subject.judge, model, fed, labels, output.loss, {"aux": 0.0, "z": 0.0})


@torch.no_grad()
def steps(rng: random.Random, subject: Subject, batch: Batch, notes: dict[str, Any]) -> None:
    """Run a prompt, then single tokens with a static cache, on a compiled model."""
    backend = rng.choice(["eager", "aot_eager"])
    notes |= {"backend": backend}
    model = torch.compile(subject.model, fullgraph=True, backend=backend)
    length = batch.shape[1]
    cache = StaticCache(config=subject.config, max_cache_len=length + rng.choice([0, 7]))
    prompt, logits = rng.randint(1, length), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits.append(subject.model(batch.ids[:, :prompt], past_key_values=cache).logits)
        for column in range(prompt, length):
            position = torch.full((batch.shape[0], 1), column)
            ids = batch.ids[:, column : column + 1]
            logits.append(model(ids, position_ids=position, past_key_values=cache).logits)
    reach = torch.full(batch.shape, length)
    check(Fed(batch, torch.cat(logits, 1), None, reach), subject.judge, "compiled steps")


class Logits(nn.Module):
    """A model as a function of tensors."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).logits


@torch.no_grad()
def export(rng: random.Random, subject: Subject, draw: Any, notes: dict[str, Any]) -> None:
    kind = rng.choice(["plain", "left", "packed"])
    first = draw(kind)
    # Export would make sizes of one constant.
    while min(first.shape) < 2:
        first = draw(kind)
    first.position_ids = first.position_ids if kind == "packed" else None
    inputs = first.inputs()
    if kind == "left":
        inputs["attention_mask"] = inputs["attention_mask"].long()
    axes = (
        {0: Dim("batch", min=1, max=64), 1: Dim("tokens", min=1, max=4096)}
        if chance(rng, 0.5)
        else {0: Dim.AUTO, 1: Dim.AUTO}
    )
    notes |= {"batch": kind, "axes": str(axes[0])}
    shapes = {
        name: axes if name in inputs else None for name in ("input_ids", "attention_mask", "position_ids")
    }
    shapes = dict.fromkeys(inputs, axes)
    program = torch.export.export(
        Logits(subject.model), (), inputs, dynamic_shapes=shapes, strict=chance(rng, 0.3)
    ).module()
    for _ in range(3):
        batch = draw(kind)
        batch.position_ids = batch.position_ids if kind == "packed" else None
        if kind != "packed":
            starts = (batch.real.int().argmax(1))[:, None]
            batch.positions = (torch.arange(batch.shape[1]) - starts).clamp(min=0)
        if batch.attention_mask is not None:
            batch.attention_mask = batch.attention_mask.long()
        if min(batch.shape) < 2:
            continue
        compare(subject, program, batch, "exported")


@torch.no_grad()
def trace(rng: random.Random, subject: Subject, draw: Any, notes: dict[str, Any]) -> None:
    """Trace on one batch, run on others of the same shape."""
    first = draw("plain")
    first.position_ids = None
    notes |= {"batch": "plain"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.jit.trace(Logits(subject.model), (first.ids,), check_trace=False)
        except ValueError as error:
            if "trac" in str(error):
                raise Refused(str(error)) from error
            raise
    for _ in range(2):
        ids = torch.randint(0, subject.fields["vocab_size"], first.shape)
        other = Batch(ids, first.real, first.positions, first.segments, kind="plain")
        output = program(ids)
        check(Fed(other, output, None, torch.full(other.shape, other.reach())), subject.judge, "traced")
