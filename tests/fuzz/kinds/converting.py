"""Folders converted, split, cast, upcycled and back: bit for bit unless cast, otherwise the same function."""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

import llamoe
from llamoe.conversion import convert, inspect, merge_kv_heads, upcycle, verify

from ..batch import Fed, check, draw_batch, forward
from ..draw import DTYPES, chance
from ..judge import Judge, Refused, Wrong
from ..reference import DENSE, Decoder
from ..subject import FAMILIES, Subject, draw_subject, exact_weights, rope_config
from .saving import load, same_weights


def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    way = rng.choice(["split", "split", "cast", "meta", "upcycle", "heads", "verify"])
    families = {
        "split": ["llama4_text", "mixtral"],
        "upcycle": list(DENSE),
        "meta": ["llama", "llama4_text", "llama4_text"],
    }
    family = rng.choice(families.get(way, FAMILIES))
    overrides: dict[str, Any] = {}
    # Mostly values that Meta's params.json can express.
    if way == "meta":
        overrides = dict(attention_bias=False, mlp_bias=False, hidden_act="silu", tie_word_embeddings=False)
    subject = draw_subject(
        rng,
        seed,
        family,
        dtypes=["float32", "float32", "bfloat16"],
        for_stock=True,
        experts=[None],
        **overrides,
    )
    notes |= {
        **subject.notes,
        "way": way,
        "dtype": str(subject.dtype),
    }
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        layout = rng.choice(["stock", "llamoe"])
        subject.model.save_pretrained(
            place / "source", layout=layout, max_shard_size=rng.choice(["8KB", "50KB", "5GB"])
        )
        globals()[f"_{way}"](rng, seed, subject, place)


def reads(subject: Subject, folder: Path) -> Any:
    """The model, loaded from a folder by its class; nothing may be missing."""
    model = load(
        type(subject.model), folder, dtype=subject.dtype, attn_implementation=subject.notes["attention"]
    )
    same_weights(model, subject.model, "converted")
    return model


def _split(rng: random.Random, seed: int, subject: Subject, place: Path) -> None:
    options = {
        "shard_size": rng.choice(["9KB", "60KB", "5GB"]),
        "layout": rng.choice(["stock", "llamoe", None]),
    }
    convert(place / "source", place / "split", experts="split", **options)
    convert(place / "split", place / "back", experts="fused")
    reads(subject, place / "back")
    reads(subject, place / "split")


def _cast(rng: random.Random, seed: int, subject: Subject, place: Path) -> None:
    name = rng.choice(["float32", "float16", "bfloat16"])
    convert(
        place / "source",
        place / "cast",
        dtype=name,
        experts=rng.choice(["fused", "split"]) if subject.has_mixture else "fused",
    )
    convert(place / "cast", place / "back")
    model = load(type(subject.model), place / "back", dtype=DTYPES[name])
    same_weights(model, subject.model.to(DTYPES[name]), f"cast to {name}")


def _meta(rng: random.Random, seed: int, subject: Subject, place: Path) -> None:
    shards = rng.choice([count for count in (1, 2, 3) if subject.fields["num_key_value_heads"] % count == 0])
    try:
        convert(
            place / "source",
            place / "meta",
            to="meta",
            shards=shards,
        )
    except ValueError as error:
        # A limit of Meta's format: every such message names the field and the valid values.
        if "valid:" in str(error) or "params.json" in str(error) or "Meta" in str(error):
            raise Refused(str(error)) from error
        raise
    convert(place / "meta", place / "back")
    reads(subject, place / "back")


def _upcycle(rng: random.Random, seed: int, subject: Subject, place: Path) -> None:
    experts = rng.randint(1, 4)
    options = {
        "experts": experts,
        "top_k": rng.randint(1, experts),
    }
    # Llama 4 has no windows, and Mixtral no biases.
    has_bias = subject.fields["attention_bias"] or subject.fields["mlp_bias"]
    family = "mixtral" if subject.forgets else "llama4" if has_bias else rng.choice(["llama4", "mixtral"])
    if family == "llama4":
        options["interleave"] = rng.randint(1, subject.fields["num_hidden_layers"])
    # What is said where nothing is.
    is_usual = family == ("mixtral" if subject.forgets else "llama4")
    upcycle(
        place / "source", place / "moe", family=None if is_usual and chance(rng, 0.5) else family, **options
    )
    model = load(
        llamoe.LlamoeMixtralForCausalLM if family == "mixtral" else llamoe.LlamoeForCausalLM,
        place / "moe",
        dtype=subject.dtype,
        attn_implementation=subject.notes["attention"],
    )
    generator = torch.Generator().manual_seed(seed)
    batch = draw_batch(rng, generator, subject.fields["vocab_size"], ["plain", "left", "packed"], 30)
    with torch.no_grad():
        _, fed = forward(model.eval(), batch)
    # The experts add nothing or are the dense feed-forward, whose reference is the judge; choices do not matter.
    fed = Fed(batch, fed.logits, [], fed.reach)
    check(fed, subject.judge, "upcycled")


def _heads(rng: random.Random, seed: int, subject: Subject, place: Path) -> None:
    """Merged heads are the means of their groups; the reference computes with those."""
    heads = subject.fields["num_key_value_heads"]
    kept = rng.choice([count for count in range(1, heads + 1) if heads % count == 0])
    merge_kv_heads(place / "source", place / "fewer", kv_heads=kept)
    model = load(
        type(subject.model),
        place / "fewer",
        dtype=subject.dtype,
        attn_implementation=subject.notes["attention"],
    )
    weights, dim = dict(subject.judge.decoder.weights), subject.fields["head_dim"]
    for name, value in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            groups = value.unflatten(0, (kept, heads // kept, dim))
            weights[name] = groups.mean(1).flatten(0, 1).to(subject.dtype).double()
    state = exact_weights(model)
    for name, value in weights.items():
        if (state[name] - value).abs().max() > 1e-6 * max(1.0, value.abs().max().item()) + (
            0.02 if subject.dtype == torch.bfloat16 else 0
        ):
            raise Wrong(f"{name} is no mean of its group")
    fields = subject.fields | {"num_key_value_heads": kept}
    judge = Judge(Decoder(state, fields, rope_config(fields)), subject.dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    batch = draw_batch(rng, generator, fields["vocab_size"], ["plain", "left"], 30)
    with torch.no_grad():
        _, fed = forward(model.eval(), batch)
    check(fed, judge, "with fewer heads")


def _verify(rng: random.Random, seed: int, subject: Subject, place: Path) -> None:
    """`verify` finds no difference between equal folders, and finds one changed number."""
    convert(
        place / "source",
        place / "same",
        experts=rng.choice(["fused", "split"]) if subject.has_mixture else "fused",
    )
    found = verify(place / "source", place / "same", tokens=9, rows=1)
    if found.verdict != "equal":
        raise Wrong(f"verify says of equal folders: {found.verdict}, {found.reasons}")
    inspect(place / "source")
    name, parameter = rng.choice(list(subject.model.named_parameters()))
    with torch.no_grad():
        parameter.view(-1)[rng.randrange(parameter.numel())] += 3.0
    subject.model.save_pretrained(place / "other")
    if verify(place / "source", place / "other", logits=False).verdict != "different":
        raise Wrong(f"verify sees no difference in {name}")
