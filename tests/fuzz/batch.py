"""Draw batches as users make them (padded, packed, in pieces), and compare each token's output with the reference."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from support.routing import recorded_choices

from .draw import chance
from .judge import Judge, Wrong
from .reference import Decoder, Result

MASK_DTYPES = [torch.int64, torch.int64, torch.bool, torch.int32, torch.float32]


@dataclass
class Batch:
    """Rows of tokens, with the facts that the reference needs. B rows, T tokens; tensors are `[B, T]`.

    Attributes:
        ids: token ids.
        real: True for tokens that are not padding.
        positions: positions of the real tokens.
        segments: number of the sequence that a token of a packed row belongs to.
        attention_mask, position_ids: inputs of the model; None leaves them out.
        visible: `[B, T, T]`, True where a token (row) attends to another (column); None without a 4-D mask.
        kind: entry of `KINDS`, with the way in which positions were drawn.
    """

    ids: torch.Tensor
    real: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    kind: str = "plain"

    @property
    def shape(self) -> tuple[int, int]:
        return self.ids.shape[0], self.ids.shape[1]

    def pick(self, of: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Return the batch with `of` applied to its tensors."""
        names = ("ids", "real", "positions", "segments", "attention_mask", "position_ids")
        given = {name: getattr(self, name) for name in names}
        return replace(self, **{name: of(value) for name, value in given.items() if value is not None})

    def columns(self, begin: int, end: int) -> "Batch":
        """Return some columns; the attention mask keeps all columns up to `end`, as models with a cache expect."""
        mask = None if self.attention_mask is None else self.attention_mask[:, :end]
        return replace(self.pick(lambda x: x[:, begin:end]), attention_mask=mask)

    def inputs(self) -> dict[str, Any]:
        """Return the model's keyword arguments."""
        given = {"attention_mask": self.attention_mask, "position_ids": self.position_ids}
        return {"input_ids": self.ids} | {name: value for name, value in given.items() if value is not None}

    def sequences(self) -> list[tuple[int, torch.Tensor]]:
        """Return the row and the columns of each sequence."""
        result = []
        for row in range(self.shape[0]):
            columns = self.real[row].nonzero()[:, 0]
            for segment in self.segments[row, columns].unique().tolist():
                result.append((row, columns[self.segments[row, columns] == segment]))
        return result

    def reach(self) -> int:
        """Return the length of a forward on which some rotary embeddings depend; padding does not count."""
        return int(self.positions[self.real].max()) + 1 if self.real.any() else 1


KINDS = ["plain", "ones", "left", "right", "sides", "holes", "packed", "offset", "mask4d", "all-masked"]


def draw_batch(rng: random.Random, fields: dict[str, Any], kinds: list[str], longest: int) -> Batch:
    """Draw rows of at most `longest` tokens for a model of these fields; `kinds` are some of `KINDS`."""
    kind = rng.choice(kinds)
    rows, length = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 7, 16, 17, 23, longest])
    if kind in ("left", "right", "sides", "holes", "all-masked"):
        rows, length = max(rows, 2), max(length, 3)
    ids = torch.randint(0, fields["vocab_size"], (rows, length))
    index = torch.arange(length).expand(rows, -1)
    batch = Batch(
        ids, torch.ones_like(ids, dtype=torch.bool), index.clone(), torch.zeros_like(ids), kind=kind
    )
    match kind:
        case "ones":
            batch.attention_mask = _mask(rng, batch.real)
        case "left" | "right" | "sides" | "holes" | "all-masked":
            _pad(rng, batch, kind, fields["pad_token_id"])
        case "packed":
            _pack(rng, batch)
        case "offset":
            begin = torch.tensor([rng.randint(0, 40) for _ in range(rows)])
            batch.positions = index + begin[:, None]
            batch.position_ids = batch.positions.clone()
        case "mask4d":
            # Each token attends to itself and to some of the tokens before it.
            share = torch.rand(rows, length, length) < rng.choice([0.3, 0.7])
            batch.visible = (share | torch.eye(length, dtype=torch.bool)).tril()
    if kind in ("plain", "ones") and chance(rng, 0.3):
        batch.position_ids = index[: rng.choice([1, rows])].clone()
    return batch


def _mask(rng: random.Random, real: torch.Tensor) -> torch.Tensor:
    return real.to(rng.choice(MASK_DTYPES))


def _pad(rng: random.Random, batch: Batch, kind: str, pad_token_id: int | None) -> None:
    rows, length = batch.shape
    left = torch.zeros(rows, dtype=torch.long)
    for row in range(rows):
        if kind in ("left", "sides", "all-masked"):
            left[row] = rng.randint(0, length - 1)
            batch.real[row, : left[row]] = False
        if kind in ("right", "sides"):
            last = rng.randint(int(left[row]) + 1, length)
            batch.real[row, last:] = False
        if kind == "holes":
            first = rng.randint(1, length - 1)
            batch.real[row, first : rng.randint(first, length - 1)] = False
    if kind == "all-masked":
        batch.real[rng.randrange(rows)] = False
    if pad_token_id is not None:
        batch.ids[~batch.real] = pad_token_id
    batch.attention_mask = _mask(rng, batch.real)
    index = torch.arange(length)
    batch.positions = (index - left[:, None]).clamp(min=0)
    way = rng.choice(["derived", "derived", "generate", "below zero", "counted", "index", "garbage"])
    match way:
        # Count the real tokens as `generate` does; positions of padding, on which nothing depends, are arbitrary.
        case "generate" | "garbage":
            padding = rng.choice([0, 1] if way == "generate" else [-7, 77, 3])
            positions = (batch.real.long().cumsum(-1) - 1).masked_fill(~batch.real, padding)
        case "below zero":
            positions = index - left[:, None]
        case "counted":
            positions = batch.real.long().cumsum(-1)
        case "index":
            positions = index.expand(rows, -1).clone()
        case _:
            return
    batch.kind += f", positions {way}"
    batch.position_ids, batch.positions = positions, positions.clone()


def _pack(rng: random.Random, batch: Batch) -> None:
    rows, length = batch.shape
    for row in range(rows):
        begin, segment = 0, 0
        while begin < length:
            end = min(length, begin + rng.randint(1, 20))
            first = 0 if chance(rng, 0.8) else rng.randint(1, 9)
            # A sequence whose positions continue those of the last one would be a part of it.
            if begin and first == int(batch.positions[row, begin - 1]) + 1:
                first = 0
            batch.positions[row, begin:end] = torch.arange(first, first + end - begin)
            batch.segments[row, begin:end] = segment
            begin, segment = end, segment + 1
    batch.position_ids = batch.positions.clone()


@dataclass
class Fed:
    """The columns that a model has computed so far, with its outputs. V vocabulary size, k experts a token.

    Attributes:
        batch: the columns.
        logits: `[B, T, V]`.
        choices: the chosen experts of each mixture layer, `[B, T, k]`.
        reach: `[B, T]`, `Batch.reach` of the forward that computed each token.
    """

    batch: Batch
    logits: torch.Tensor
    choices: list[torch.Tensor]
    reach: torch.Tensor

    def references(
        self, decoder: Decoder
    ) -> Iterator[tuple[int, torch.Tensor, list[torch.Tensor], Callable[..., Result]]]:
        """Yield row, columns, chosen experts and reference of each sequence; the reference takes experts and a blur."""
        batch = self.batch
        for row, columns in batch.sequences():
            visible = None if batch.visible is None else batch.visible[row][columns][:, columns]
            x, positions = decoder.embed(batch.ids[row, columns]), batch.positions[row, columns]
            run = partial(decoder, x, positions, int(self.reach[row, columns[0]]), visible, places=columns)
            yield row, columns, [chosen[row, columns] for chosen in self.choices], run


def check(
    fed: Fed, judge: Judge, what: str, error: type[Exception] = Wrong
) -> list[tuple[int, torch.Tensor, Result]]:
    """Compare the logits of every real token with the reference; logits of padding must be finite.

    Returns:
        row, columns and the reference's result of every sequence.
    """
    batch = fed.batch
    if not fed.logits.isfinite().all():
        bad = (~fed.logits.isfinite()).any(-1)
        raise error(f"{what}, {batch.kind}: not finite, padding {bad[~batch.real]}, tokens {bad[batch.real]}")
    results = []
    for row, columns, choices, run in fed.references(judge.decoder):
        where = f"{what}, {batch.kind}, row {row}"
        results.append((row, columns, judge.check(fed.logits[row, columns], run, choices, where, error)))
    return results


def forward(model: Any, batch: Batch, **options: Any) -> tuple[Any, Fed]:
    """Run a model on all rows at once; return its output, and the input of `check`."""
    with recorded_choices(model) as calls:
        output = model(**{**batch.inputs(), **options})
    choices = [call.view(*batch.shape, -1) for call in calls]
    return output, Fed(batch, output.logits, choices, torch.full(batch.shape, batch.reach()))
