"""`generate` in all its modes: every token must be the reference's best, and every score the reference's."""

import random
from typing import Any

import torch
from torch.nn import functional as F

from ..batch import draw_batch
from ..draw import chance
from ..judge import MARGIN, PASSES, Wrong, largest
from ..subject import Subject, draw_subject


def exact_logits(subject: Subject, ids: torch.Tensor, blur: Any = None) -> torch.Tensor:
    decoder = subject.judge.decoder
    return decoder(decoder.embed(ids), torch.arange(len(ids)), len(ids), blur=blur)


def check_greedy(subject: Subject, sequence: torch.Tensor, prompt: int, what: str) -> None:
    """Each new token has the highest logit, or one that rounding may exchange with it."""
    result = exact_logits(subject, sequence)
    subject.judge.check_no_tie(result)
    logits = result.logits[prompt - 1 : -1]
    new = sequence[prompt:]
    gap = (logits.max(-1).values - logits.gather(1, new[:, None])[:, 0]).max().item()
    if gap <= 2 * PASSES[subject.judge.dtype] * max(1.0, largest(logits)):
        return
    blurred = exact_logits(subject, sequence, subject.judge.blur()).logits[prompt - 1 : -1]
    if gap > 2 * MARGIN * largest(blurred - logits):
        raise Wrong(f"{what}: a token whose logit is {gap:.2e} below the best")


def check_scores(subject: Subject, sequence: torch.Tensor, prompt: int, score: float, what: str) -> None:
    """A beam's score is the mean log-probability of its new tokens."""
    result = exact_logits(subject, sequence)
    subject.judge.check_no_tie(result)

    def mean(logits):
        return F.log_softmax(logits[prompt - 1 : -1], -1).gather(1, sequence[prompt:, None]).mean().item()

    expected = mean(result.logits)
    difference = abs(score - expected)
    if difference > PASSES[subject.judge.dtype] * 10:
        allowed = abs(mean(exact_logits(subject, sequence, subject.judge.blur()).logits) - expected)
        if difference > 3 * MARGIN * allowed:
            raise Wrong(f"{what}: a beam's score is {score:.6g} instead of {expected:.6g}")


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
    match way:
        case "static":
            return way, {"cache_implementation": "static"}
        case "no cache":
            return way, {"use_cache": False}
        case "beams":
            beams = rng.choice([2, 3])
            return way, {"num_beams": beams, "num_return_sequences": rng.randint(1, beams)}
        case "pieces":
            return way, {"prefill_chunk_size": rng.choice([1, 3, 8])}
        case "dynamic":
            return way, {"cache_implementation": "dynamic"}
        case "lookup":
            return way, {"prompt_lookup_num_tokens": 2}
        case "early":
            return way, {"assistant_early_exit": rng.randint(1, subject.fields["num_hidden_layers"] - 1)}
        case "assisted":
            other = draw_subject(
                rng, rng.randrange(10**6), dtypes=["float32"], vocab_size=subject.fields["vocab_size"]
            )
            return way, {"assistant_model": other.model if chance(rng, 0.5) else subject.model}
    return way, {}


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
            check_scores(subject, real, prompt, output.sequences_scores[number].item(), what)
        else:
            check_greedy(subject, real, prompt, what)
