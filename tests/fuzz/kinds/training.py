"""Test losses and the gradients of every parameter, with router losses and gradient checkpointing."""

import random
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch.nn import functional as F

from ..batch import KINDS, Batch, Fed, draw_batch, forward
from ..draw import chance
from ..judge import RUNS, Judge, Wrong, largest
from ..reference import Decoder, Result
from ..subject import draw_subject

# Factor on the tolerance, since gradients are sums over all tokens, of either sign.
LOOSER = 20


def draw_labels(rng: random.Random, batch: Batch) -> torch.Tensor:
    """Draw labels: the ids of most real tokens that follow a real token, and -100 for all others."""
    labels = torch.where(batch.real, batch.ids, -100)
    starts = batch.real.clone()
    starts[:, 1:] &= ~batch.real[:, :-1]
    labels[starts] = -100
    dropped = torch.tensor([[chance(rng, 0.2) for _ in row] for row in batch.ids.tolist()])
    return labels.masked_fill(dropped, -100)


def exact_loss(
    decoder: Decoder, fed: Fed, labels: torch.Tensor, options: dict[str, Any], blur: Any = None
) -> tuple[torch.Tensor, list[Result]]:
    """Return the reference's loss, with its autograd graph, and its result for each sequence."""
    rows = torch.zeros(*fed.batch.shape, fed.logits.shape[-1], dtype=torch.float64)
    results, chosen = [], []
    for row, columns, choices, run in fed.references(decoder):
        result = run(choices, blur)
        rows = rows.index_put((torch.tensor(row), columns), result.logits)
        results.append(result)
        chosen.append(choices)
    # Join the tokens of all sequences, for each mixture.
    routers = [torch.cat(layer) for layer in zip(*(result.router_logits for result in results), strict=True)]
    targets = labels[:, 1:].reshape(-1)
    total = F.cross_entropy(rows[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    count = (targets != -100).sum()
    items = options.get("num_items_in_batch", count)
    loss, share = total / items, count / items if "num_items_in_batch" in options else 1.0
    if options["aux"]:
        picks = [torch.cat(layer) for layer in zip(*chosen, strict=True)]
        shares_LE = torch.stack([logits.softmax(-1).mean(0) for logits in routers])
        used_LE = torch.stack([F.one_hot(pick, shares_LE.shape[1]).sum(1).double().mean(0) for pick in picks])
        # Stock's Mixtral takes the mean over layers before the product.
        if decoder.config["model_type"] == "mixtral":
            used_LE, shares_LE = used_LE.mean(0), shares_LE.mean(0)
        term = used_LE.shape[-1] * (used_LE * shares_LE).sum(-1).mean()
        loss = loss + share * options["aux"] * term
    if options["z"]:
        terms = [logits.logsumexp(-1).square().mean() for logits in routers]
        loss = loss + share * options["z"] * torch.stack(terms).mean()
    return loss, results


def exact_gradients(judge: Judge, fed: Fed, labels: torch.Tensor, options: dict, blur: Any = None):
    """Return the reference's loss, the gradient of each weight, and the result for each sequence."""
    exact = judge.decoder
    leaves = {name: value.clone().requires_grad_() for name, value in exact.weights.items()}
    if exact.config["tie_word_embeddings"]:
        leaves.pop("lm_head.weight", None)
    decoder = Decoder(leaves, exact.config, exact.stock_config)
    loss, results = exact_loss(decoder, fed, labels, options, blur)
    loss.backward()
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
    }
    return loss.detach(), gradients, results


def check_gradients(
    judge: Judge, model: Any, fed: Fed, labels: torch.Tensor, loss: torch.Tensor, options: dict
) -> None:
    """Compare the loss, and the gradients that its backward pass has left in the parameters."""
    exact, expected, results = exact_gradients(judge, fed, labels, options)
    with torch.no_grad():
        for (_, _, choices, run), result in zip(fed.references(judge.decoder), results, strict=True):
            judge.check_choices(result, choices, run, "training")

    # All parameters share a few runs with random roundings, since each run takes a backward pass.
    @cache
    def rounded(number: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return exact_gradients(judge, fed, labels, options, judge.blur())[:2]

    numbers = cycle(range(RUNS))
    judge.check_values(loss, exact, lambda _: rounded(next(numbers))[0], f"loss, {fed.batch.kind}")
    floor = max(map(largest, expected.values())) / 100
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise Wrong(f"{name} has no gradient")
        judge.check_values(
            parameter.grad,
            expected[name],
            lambda _, name=name: rounded(next(numbers))[1][name],
            f"the gradient of {name}, {fed.batch.kind}",
            size=LOOSER * max(largest(expected[name]), floor),
        )


def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    subject = draw_subject(rng, seed, dtypes=["float32"] * 6 + ["float64", "bfloat16"])
    model = subject.model.train()
    batch = draw_batch(rng, subject.fields, [kind for kind in KINDS if kind != "mask4d"], 33)
    labels = draw_labels(rng, batch)
    notes |= {**subject.notes, "batch": batch.kind}
    options: dict[str, Any] = {"aux": 0.0, "z": 0.0}
    given: dict[str, Any] = {}
    if subject.has_mixture and chance(rng, 0.4):
        options["aux"] = model.config.router_aux_loss_coef = rng.choice([0.01, 0.7])
        given["output_router_logits"] = True
    if subject.has_mixture and chance(rng, 0.25):
        options["z"] = model.config.router_z_loss_coef = rng.choice([0.001, 0.3])
    if not (labels[:, 1:] != -100).any():
        # Without labels the loss is NaN, in stock's classes too.
        return
    if chance(rng, 0.3):
        options["num_items_in_batch"] = given["num_items_in_batch"] = rng.randint(1, 50)
    if chance(rng, 0.3):
        reentrant = chance(rng, 0.3) and not (options["aux"] or options["z"])
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        notes["checkpointing"] = "reentrant" if reentrant else "yes"
        if reentrant:
            model.enable_input_require_grads()
        given["use_cache"] = False
    output, fed = forward(model, batch, labels=labels, **given)
    output.loss.backward()
    check_gradients(subject.judge, model, fed, labels, output.loss, options)
