"""Test single forwards of batches of every kind, with every option of `forward`."""

import random
from itertools import product
from typing import Any

import torch

from ..batch import KINDS, Batch, check, draw_batch, forward
from ..draw import chance
from ..judge import JudgeIsWrong, Wrong
from ..subject import Subject, draw_subject


def four_axes(rng: random.Random, batch: Batch, subject: Subject) -> torch.Tensor:
    """Return a batch's visibility as a 4-D mask: bool, which only sdpa takes, or numbers that are added to scores."""
    if subject.notes["attention"] == "sdpa" and chance(rng, 0.4):
        return batch.visible[:, None]
    lowest = torch.finfo(subject.judge.dtype).min
    mask = torch.zeros(batch.visible.shape, dtype=subject.judge.dtype)
    return mask.masked_fill(~batch.visible, lowest)[:, None]


@torch.no_grad()
def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    subject = draw_subject(rng, seed, by_length=True)
    judge = subject.judge
    batch = draw_batch(rng, subject.fields, KINDS, rng.choice([33, 44, 70]))
    notes |= {**subject.notes, "batch": batch.kind}
    options: dict[str, Any] = {}
    if batch.visible is not None:
        options["attention_mask"] = four_axes(rng, batch, subject)
    if chance(rng, 0.25):
        options["use_cache"] = rng.choice([True, False])
    if chance(rng, 0.2):
        options["input_ids"], options["inputs_embeds"] = None, subject.model.get_input_embeddings()(batch.ids)
    wants_states, wants_routers = chance(rng, 0.15), subject.has_mixture and chance(rng, 0.15)
    options |= {"output_hidden_states": True} if wants_states else {}
    options |= {"output_router_logits": True} if wants_routers else {}
    kept = draw_kept(rng, batch.shape[1]) if chance(rng, 0.15) else None
    output, fed = forward(subject.model, batch, **options)
    results = check(fed, judge, "logits")
    if kept is not None:
        check_kept(subject, batch, options, kept, fed.logits)
    check_recorded(output, batch, results, judge, wants_states, wants_routers)
    # For other kinds of batches stock's results are not always right.
    if subject.stock_can and batch.kind in ("plain", "ones") and chance(rng, 0.5):
        options.pop("output_router_logits", None)
        fed.logits = subject.stock()(**{**batch.inputs(), **options}).logits
        if not subject.has_mixture or subject.judge.dtype in (torch.float32, torch.float64):
            check(fed, judge, "stock's logits", JudgeIsWrong)


def draw_kept(rng: random.Random, length: int) -> int | torch.Tensor:
    if chance(rng, 0.5):
        return rng.randint(1, length)
    return torch.tensor(sorted(rng.sample(range(length), rng.randint(1, length))))


def check_kept(subject: Subject, batch: Batch, options: dict, kept: Any, logits: torch.Tensor) -> None:
    """Check that `logits_to_keep` returns the logits of these tokens alone."""
    given = subject.model(**{**batch.inputs(), **options}, logits_to_keep=kept).logits
    expected = logits[:, -kept:] if isinstance(kept, int) else logits[:, kept]
    subject.judge.check_values(given, expected.double(), lambda blur: blur(expected.double()), "kept logits")


def check_recorded(output, batch, results, judge, wants_states, wants_routers) -> None:
    """Compare hidden states and router logits, if they were asked for, with the reference's."""
    if not wants_states and output.hidden_states is not None:
        raise Wrong("hidden states that nobody asked for")
    wanted = ["hidden_states"] * wants_states + ["router_logits"] * wants_routers
    for (row, columns, result), name in product(results, wanted):
        pairs = zip(getattr(output, name), getattr(result, name), strict=True)
        for depth, (given, exact) in enumerate(pairs):
            given = given.view(*batch.shape, -1)[row, columns]
            judge.check_values(
                given, exact, lambda blur, x=exact: blur(x, 64 * blur.epsilon), f"{name} {depth}"
            )
