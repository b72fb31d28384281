"""Heads for sequences, tokens and answers, and resized embeddings, on the reference's hidden states."""

import random
from typing import Any

import torch

import llamoe

from ..batch import Batch, Fed, check, draw_batch, forward
from ..draw import chance
from ..judge import LOG, Wrong
from ..subject import Subject, draw_subject

HEADS = ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]


@torch.no_grad()
def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(seed)
    subject = draw_subject(rng, seed, dtypes=["float32"] * 3 + ["bfloat16"], for_stock=True)
    pad = subject.fields["pad_token_id"]
    batch = draw_batch(
        rng, generator, subject.fields["vocab_size"], ["plain", "left", "right", "packed", "sides"], 30, pad
    )
    notes |= {**subject.notes, "batch": batch.kind}
    if chance(rng, 0.4):
        notes["way"] = "resized"
        resized(rng, subject, batch)
    else:
        # Only the dense family finds answers.
        kind = rng.choice(HEADS[:2] if subject.has_mixture else HEADS)
        notes["way"] = kind
        classify(rng, seed, subject, batch, kind)


def resized(rng: random.Random, subject: Subject, batch: Batch) -> None:
    """Old rows are unchanged, and new logits come from new rows."""
    model, size = subject.model, subject.fields["vocab_size"]
    new = size + rng.choice([-4, 1, 5, 17])
    multiple = rng.choice([None, None, 8])
    model.resize_token_embeddings(new, mean_resizing=chance(rng, 0.3), pad_to_multiple_of=multiple)
    new = new if multiple is None else -(-new // multiple) * multiple
    config = model.config.get_text_config()
    if config.vocab_size != new or model.lm_head.weight.shape[0] != new:
        raise Wrong(f"vocab_size {config.vocab_size} and {model.lm_head.weight.shape[0]} rows, not {new}")
    table, kept = model.get_input_embeddings().weight, min(size, new)
    weights = dict(subject.judge.decoder.weights)
    if not torch.equal(table[:kept].double(), weights["model.embed_tokens.weight"][:kept]):
        raise Wrong("a row that stays is another")
    weights |= {"model.embed_tokens.weight": table.double(), "lm_head.weight": model.lm_head.weight.double()}
    subject.judge.decoder.weights = weights
    batch.ids.clamp_(max=new - 1)
    if subject.fields["pad_token_id"] is not None and subject.fields["pad_token_id"] >= new:
        return
    _, fed = forward(model, batch)
    check(fed, subject.judge, "logits with other embeddings")


def classify(rng: random.Random, seed: int, subject: Subject, batch: Batch, kind: str) -> None:
    family = type(subject.model).__name__.removesuffix("ForCausalLM")
    config = subject.model.config
    config.num_labels = labels = 2 if "Answer" in kind else rng.choice([1, 2, 5])
    model = getattr(llamoe, family + kind)._from_config(config).to(subject.dtype).eval()
    model.set_attn_implementation(subject.notes["attention"])
    base = model.transformer if hasattr(model, "transformer") else model.model
    base.load_state_dict(subject.model.model.state_dict())
    scorer = model.qa_outputs if "Answer" in kind else model.score
    generator = torch.Generator().manual_seed(seed)
    for parameter in scorer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    if subject.has_mixture and subject.notes["experts"] is not None:
        model.set_experts_implementation(subject.notes["experts"])
    pad = subject.fields["pad_token_id"]
    if "Sequence" in kind and pad is None and batch.shape[0] > 1:
        # Refused: without a padding token, a row's last token is unknown.
        return
    with LOG.recording() as calls:
        output = model(**batch.inputs())
    weight = scorer.weight.detach().double()
    bias = (
        scorer.bias.detach().double() if scorer.bias is not None else torch.zeros(labels, dtype=torch.float64)
    )
    decoder = subject.judge.decoder
    decoder.weights = dict(decoder.weights) | {
        "lm_head.weight": torch.cat([weight, bias[:, None]], 1)[:, :-1]
    }
    exact = Fed.of(batch, torch.zeros(*batch.shape, labels), calls, batch.reach())
    for row, columns in batch.sequences():
        x, positions = decoder.embed(batch.ids[row, columns]), batch.positions[row, columns]

        def run(choices=None, blur=None, x=x, positions=positions):
            more = {} if blur is None else {"blur": blur}
            result = decoder(x, positions, batch.reach(), None, choices, **more)
            result.logits = result.logits + bias
            return result

        choices = [chosen[row, columns] for chosen in exact.choices]
        if "Answer" in kind:
            given = torch.stack([output.start_logits, output.end_logits], -1)[row, columns]
        elif "Token" in kind:
            given = output.logits[row, columns]
        else:
            last = (
                int((batch.ids[row] != pad).nonzero().max())
                if pad is not None and (batch.ids[row] != pad).any()
                else None
            )
            if pad is None:
                last = batch.shape[1] - 1
            if last is None or last not in columns.tolist():
                # A row of padding only, or a real token with the padding's id.
                continue
            place = columns.tolist().index(last)
            subject.judge.check(
                output.logits[row], run, choices, kind, lambda result, p=place: result.logits[p]
            )
            continue
        subject.judge.check(given, run, choices, kind)
