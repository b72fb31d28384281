"""Test prompts in pieces and single steps with every cache, also while rows of the cache are cropped or reordered."""

import random
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from ..batch import Batch, Fed, check, draw_batch, forward
from ..draw import chance
from ..subject import Subject, draw_subject

PADDED = ["plain", "ones", "left", "right", "sides", "holes", "offset", "all-masked"]


def join(fed: Fed | None, new: Fed) -> Fed:
    """Append the columns of a forward to those of the earlier ones."""
    if fed is None:
        return new
    names = ("ids", "real", "positions", "segments")
    joined = {name: torch.cat([getattr(fed.batch, name), getattr(new.batch, name)], 1) for name in names}
    batch = replace(new.batch, **joined)
    choices = [torch.cat(pair, 1) for pair in zip(fed.choices, new.choices, strict=True)]
    return Fed(batch, torch.cat([fed.logits, new.logits], 1), choices, torch.cat([fed.reach, new.reach], 1))


def rows_of(fed: Fed, index: torch.Tensor, length: int | None = None) -> Fed:
    """Return the rows of `index`, cut to `length` columns."""
    pick = lambda x: x[index][:, :length]  # noqa: E731
    return Fed(fed.batch.pick(pick), pick(fed.logits), list(map(pick, fed.choices)), pick(fed.reach))


def draw_cache(rng: random.Random, subject: Subject, length: int) -> tuple[str, Any]:
    kind = rng.choice(["made", "dynamic", "dynamic", "with config", "with config", "static", "static"])
    if kind == "made":
        return kind, None
    if kind == "static":
        length += rng.choice([0, 0, 1, 13])
        return kind, StaticCache(config=subject.model.config, max_cache_len=length)
    return kind, DynamicCache(config=subject.model.config if kind == "with config" else None)


def borders(rng: random.Random, length: int) -> list[int]:
    """Draw the ends of the pieces: up to five pieces of a prompt, then up to five single tokens."""
    steps = min(rng.choice([0, 2, 5]), length - 1)
    prompt = length - steps
    count = rng.randint(0, min(4, prompt - 1))
    return sorted(rng.sample(range(1, prompt), count)) + list(range(prompt, length + 1))


@torch.no_grad()
def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    subject = draw_subject(rng, seed)
    whole = draw_batch(rng, subject.fields, PADDED, rng.choice([30, 50]))
    if whole.position_ids is not None and whole.position_ids.shape[0] == 1:
        whole.position_ids = whole.position_ids.expand(whole.shape[0], -1)
    whole, fed = extend(rng, whole, subject.fields["vocab_size"]), None
    kind, cache = draw_cache(rng, subject, whole.shape[1])
    notes |= {**subject.notes, "batch": whole.kind, "cache": kind}
    begin = 0
    for end in borders(rng, whole.shape[1]):
        piece = whole.columns(begin, end)
        options = {"past_key_values": cache} if cache is not None else {"use_cache": True}
        output, read = forward(subject.model, piece, **options)
        cache = output.past_key_values if cache is None else cache
        fed, begin = join(fed, read), end
        if chance(rng, 0.25) and end < whole.shape[1]:
            whole, fed = change(rng, whole, fed, cache, kind, subject)
            notes["changed"] = True
            begin = fed.batch.shape[1]
    check(fed, subject.judge, f"logits through {kind} cache")


def extend(rng: random.Random, batch: Batch, vocabulary: int) -> Batch:
    """Append tokens to all rows, as decoding does, even after right padding."""
    count = rng.choice([0, 1, 3])
    if not count:
        return batch
    rows, length = batch.shape
    ones = torch.ones(rows, count, dtype=torch.long)
    if batch.position_ids is None:
        # Positions count from the first real token, and count later padding. A row of padding alone begins with its
        # first new token.
        first = torch.cat([batch.real, ones[:, :1].bool()], 1).int().argmax(1, keepdim=True)
        more = torch.arange(length, length + count) - first
    else:
        last = batch.positions.masked_fill(~batch.real, -1).max(1, keepdim=True).values
        more = last + torch.arange(1, count + 1)
    added = {"ids": torch.randint(0, vocabulary, (rows, count)), "real": ones, "segments": 0 * ones}
    added |= {"positions": more, "position_ids": more, "attention_mask": ones}
    present = {name: getattr(batch, name) for name in added if getattr(batch, name) is not None}
    return replace(batch, **{name: torch.cat([x, added[name].to(x.dtype)], 1) for name, x in present.items()})


def change(rng, whole: Batch, fed: Fed, cache: Any, kind: str, subject: Subject) -> tuple[Batch, Fed]:
    """Crop a cache, or reorder its rows; do the same with the batch and with the columns computed so far."""
    rows, length = fed.batch.shape
    ways = ["reorder"] if kind == "static" else ["reorder", "repeat", "select"]
    if kind == "dynamic" or (kind != "static" and not subject.forgets):
        ways.append("crop")
    way = rng.choice(ways)
    index = torch.arange(rows)
    match way:
        case "crop":
            kept = rng.randint(1, length)
            cache.crop(kept - length) if kept < length else None
            return whole, rows_of(fed, index, kept)
        case "reorder":
            index = torch.tensor([rng.randrange(rows) for _ in range(rows)])
            cache.reorder_cache(index)
        case "repeat":
            index = index.repeat_interleave(2)
            cache.batch_repeat_interleave(2)
        case "select":
            index = torch.tensor([rng.randrange(rows) for _ in range(rng.randint(1, rows))])
            cache.batch_select_indices(index)
    return whole.pick(lambda x: x[index]), rows_of(fed, index)
