"""Test `generate` in all its modes: each token has the reference's largest logit, and scores equal the reference's."""

import random
from typing import Any

import torch
from torch.nn import functional as F

from ..batch import draw_batch
from ..draw import chance
from ..judge import MARGIN, PASSES, Wrong, largest
from ..reference import Result
from ..subject import Subject, draw_subject


def exact_result(subject: Subject, ids: torch.Tensor, blur: Any = None) -> Result:
    """Return the reference's result for a row of ids without padding."""
    decoder = subject.judge.decoder
    return decoder(decoder.embed(ids), torch.arange(len(ids)), len(ids), blur=blur)


def check_greedy(subject: Subject, sequence: torch.Tensor, prompt: int, what: str) -> None:
    """Check that each token after the prompt has the largest logit, or one that rounding may exchange with it."""
    result = exact_result(subject, sequence)
    subject.judge.check_no_tie(result)
    logits = result.logits[prompt - 1 : -1]
    new = sequence[prompt:]
    gap = (logits.max(-1).values - logits.gather(1, new[:, None])[:, 0]).max().item()
    if gap <= 2 * PASSES[subject.judge.dtype] * max(1.0, largest(logits)):
        return
    blurred = exact_result(subject, sequence, subject.judge.blur()).logits[prompt - 1 : -1]
    if gap > 2 * MARGIN * largest(blurred - logits):
        raise Wrong(f"{what}: a token whose logit is {gap:.2e} below the best")


def check_scores(
    subject: Subject, sequence: torch.Tensor, prompt: int, score: torch.Tensor, what: str
) -> None:
    """Check that a beam's score is the mean log-probability of its new tokens."""
    result = exact_result(subject, sequence)
    subject.judge.check_no_tie(result)

    def mean(logits):
        return F.log_softmax(logits[prompt - 1 : -1], -1).gather(1, sequence[prompt:, None]).mean()

    blurred = lambda blur: mean(exact_result(subject, sequence, blur).logits)  # noqa: E731
    subject.judge.check_values(score, mean(result.logits), blurred, f"{what}: a beam's score", size=10)


WAYS = {
    "greedy": 2, "static": 1, "no cache": 1, "beams": 2, "pieces": 1, "dynamic": 1, "lookup": 1, "assisted": 1,
    "early": 1,
}  # fmt: skip


def draw_options(rng: random.Random, subject: Subject, rows: int) -> tuple[str, dict[str, Any]]:
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    if rows > 1 and way in ("lookup", "assisted", "early"):
        way = "greedy"
    if way == "early" and (subject.fields["num_hidden_layers"] < 2 or subject.is_dense):
        way = "lookup"
    beams, vocabulary = rng.choice([2, 3]), subject.fields["vocab_size"]
    options = {
        "static": {"cache_implementation": "static"},
        "no cache": {"use_cache": False},
        "beams": {"num_beams": beams, "num_return_sequences": rng.randint(1, beams)},
        "pieces": {"prefill_chunk_size": rng.choice([1, 3, 8])},
        "dynamic": {"cache_implementation": "dynamic"},
        "lookup": {"prompt_lookup_num_tokens": 2},
        "early": {"assistant_early_exit": rng.randint(1, max(1, subject.fields["num_hidden_layers"] - 1))},
    }
    if way == "assisted":
        other = draw_subject(rng, rng.randrange(10**6), dtypes=["float32"], vocab_size=vocabulary)
        options[way] = {"assistant_model": other.model if chance(rng, 0.5) else subject.model}
    return way, options.get(way, {})


@torch.no_grad()
def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    dtypes, experts = ["float32"] * 4 + ["float64"], [None, None, "eager", "batched_mm"]
    subject = draw_subject(rng, seed, dtypes=dtypes, experts=experts)
    batch = draw_batch(rng, subject.fields, ["plain", "ones", "left"], 23)
    batch.position_ids = None
    if batch.kind.startswith("left"):
        starts = (~batch.real).sum(1)
        batch.positions = (torch.arange(batch.shape[1]) - starts[:, None]).clamp(min=0)
    way, options = draw_options(rng, subject, batch.shape[0])
    if batch.attention_mask is None:
        batch.attention_mask = torch.ones_like(batch.ids)
    notes |= {**subject.notes, "batch": batch.kind, "way": way}
    count, length = rng.choice([1, 3, 6, 9]), batch.shape[1]
    output = subject.model.generate(
        input_ids=batch.ids,
        attention_mask=batch.attention_mask.long(),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=way not in ("lookup", "assisted", "early"),
        output_scores=True,
        **options,
    )
    repeated = options.get("num_return_sequences", 1)
    if output.sequences.shape != (batch.shape[0] * repeated, length + count):
        raise Wrong(f"{way}: shape {list(output.sequences.shape)}")
    for number, sequence in enumerate(output.sequences):
        row = number // repeated
        if not torch.equal(sequence[:length], batch.ids[row]):
            raise Wrong(f"{way}: the prompt changed")
        start = int((~batch.real[row]).sum())
        real, prompt = sequence[start:], length - start
        what = f"generate, {way}, {batch.kind}"
        if way == "beams":
            check_scores(subject, real, prompt, output.sequences_scores[number], what)
        else:
            check_greedy(subject, real, prompt, what)
