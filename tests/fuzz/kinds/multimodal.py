"""Texts with pictures: padded, packed, cached, trained and generated, against a tower and decoder in float64."""

import random
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import DynamicCache, StaticCache

import llamoe

from ..batch import Batch, Fed, check, draw_batch, forward
from ..draw import DTYPES, chance, draw_text, draw_vision, draw_weights
from ..judge import LOG, Judge, JudgeIsWrong, Refused
from ..reference import Decoder
from ..subject import ATTENTION, EXPERTS, Subject, exact_weights, rope_config
from ..tower_reference import Tower
from . import generation
from .cached import borders, join

IMAGE = 3


def draw_multimodal(
    rng: random.Random, seed: int, dtypes: list[str], for_stock: bool
) -> tuple[Subject, Tower, Any]:
    text, vision = draw_text(rng, for_stock=for_stock), draw_vision(rng)
    vision["num_hidden_layers"] = min(2, vision["num_hidden_layers"])
    dtype = DTYPES[rng.choice(dtypes)]
    given = {name: value for name, value in text.items() if for_stock or name != "model_type"}
    config = llamoe.LlamoeConfig(
        text_config=given, vision_config=vision, image_token_index=IMAGE, boi_token_index=4, eoi_token_index=5
    )
    config._attn_implementation = rng.choice(ATTENTION)
    model = draw_weights(llamoe.LlamoeForConditionalGeneration._from_config(config), seed).to(dtype)
    implementation = rng.choice(EXPERTS)
    if implementation is not None:
        model.set_experts_implementation(implementation)
    weights = exact_weights(model)
    parts = {
        prefix: {
            name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)
        }
        for prefix in ("language_model.", "vision_model.")
    }
    judge = Judge(Decoder(parts["language_model."], text, rope_config(text)), dtype, seed)
    notes = {"attention": config._attn_implementation, "experts": implementation}
    subject = Subject(text, model, judge, dtype, for_stock, notes)
    return subject, Tower(parts["vision_model."], vision), weights["multi_modal_projector.linear_1.weight"]


def place_pictures(
    rng: random.Random, generator: torch.Generator, batch: Batch, vision: dict[str, Any], count: int
) -> torch.Tensor | None:
    """Put image tokens of whole tiles among each row's real tokens; all other image tokens become text tokens."""
    batch.ids[batch.ids == IMAGE] = IMAGE + 1
    tiles = 0
    for row, columns in batch.sequences():
        begin = 0
        while begin + count <= len(columns) and chance(rng, 0.6):
            begin += rng.randint(0, len(columns) - count - begin)
            batch.ids[row, columns[begin : begin + count]] = IMAGE
            begin += count
            tiles += 1
    if not tiles:
        return None
    size = vision["image_size"]
    return torch.randn(tiles, vision["num_channels"], size, size, generator=generator)


def embed(
    subject: Subject, tower: Tower, projector: torch.Tensor, ids: torch.Tensor, pixels: torch.Tensor | None
) -> torch.Tensor:
    """Embeddings `[B, T, H]` with picture features in place. B rows, T tokens, H hidden size."""
    table = subject.judge.decoder.weights["model.embed_tokens.weight"]
    x = table[ids].clone()
    if pixels is not None:
        features = tower(pixels.to(subject.dtype).double())[0] @ projector.T
        x[ids == IMAGE] = features.flatten(0, 1)
    return x


@torch.no_grad()
def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(seed)
    for_stock = chance(rng, 0.6)
    way = rng.choice(["forward", "forward", "cached", "generate"])
    # Picture features are computed in the model's dtype, and the reference takes them as exact.
    dtypes = ["float32"] * 5 + ["float64"] + (["bfloat16"] if way == "forward" else [])
    subject, tower, projector = draw_multimodal(rng, seed, dtypes, for_stock)
    fields, vision = subject.fields, tower.config
    count = subject.config.vision_config.tokens_per_tile
    kinds = {
        "forward": ["plain", "ones", "left", "right", "sides", "packed", "offset"],
        "cached": ["plain", "ones", "left", "offset"],
        "generate": ["plain", "ones", "left"],
    }[way]
    batch = draw_batch(
        rng, generator, fields["vocab_size"], kinds, rng.choice([30, 50]), fields["pad_token_id"]
    )
    if way == "generate":
        batch.position_ids = None
        batch.positions = (torch.arange(batch.shape[1]) - (~batch.real).sum(1)[:, None]).clamp(min=0)
        batch.attention_mask = batch.real.long()
    pixels = place_pictures(rng, generator, batch, vision, count)
    batch.embeds = embed(subject, tower, projector, batch.ids, pixels)
    notes |= {**subject.notes, "batch": batch.kind, "way": way}
    given = {} if pixels is None else {"pixel_values": pixels.to(rng.choice([subject.dtype, torch.float32]))}
    if way == "generate":

        def images(row, start):
            def put(ids, x):
                x = x.clone()
                x[: batch.shape[1] - start] = batch.embeds[row, start:]
                return x

            return put

        options = generation.draw_options(rng, subject, batch.shape[0])
        if options[0] in ("early", "assisted", "pieces"):
            options = ("greedy", {})
        try:
            generation.generate(rng, subject, batch, *options, images=images, **given)
        except ValueError as error:
            # Without a cache, the whole text is read again, with generated image tokens.
            if options[0] == "no cache" and "Image features and image tokens do not match" in str(error):
                raise Refused(str(error)) from error
            raise
        return
    if way == "cached":
        check(feed(rng, subject, batch, given), subject.judge, "logits through a cache")
        return
    if chance(rng, 0.2) and pixels is not None:
        features = subject.model.get_image_features(given["pixel_values"])
        given = {"mm_encoder_outputs": {"image": features}}
    if chance(rng, 0.2):
        given |= {"input_ids": None, "inputs_embeds": subject.model.get_input_embeddings()(batch.ids)}
    _, fed = forward(subject.model, batch, **given)
    check(fed, subject.judge, "logits")
    if subject.is_stock_right(batch) and "pixel_values" in given and subject.dtype != torch.bfloat16:
        fed.logits = stock_logits(subject, vision, batch, given["pixel_values"])
        check(fed, subject.judge, "stock's logits", JudgeIsWrong)


def stock_logits(
    subject: Subject, vision: dict[str, Any], batch: Batch, pixels: torch.Tensor
) -> torch.Tensor:
    config = transformers.Llama4Config(
        text_config=dict(subject.fields), vision_config=dict(vision), image_token_index=IMAGE
    )
    config._attn_implementation = subject.notes["attention"]
    stock = transformers.Llama4ForConditionalGeneration._from_config(config, dtype=subject.dtype).eval()
    stock.load_state_dict(subject.model.state_dict())
    return stock(**batch.inputs(), pixel_values=pixels.to(subject.dtype)).logits


def feed(rng: random.Random, subject: Subject, batch: Batch, given: dict[str, Any]) -> Fed:
    """Feed all pictures with the first piece, which ends after the last of them; then pieces and steps."""
    last = int((batch.ids == IMAGE).any(0).nonzero().max()) + 1 if given else 0
    ends = [end for end in borders(rng, batch.shape[1]) if end >= last]
    text = subject.config.text_config
    caches = [
        DynamicCache(),
        DynamicCache(config=text),
        StaticCache(config=text, max_cache_len=batch.shape[1]),
    ]
    cache, fed, begin = rng.choice(caches), None, 0
    for end in ends:
        piece = batch.columns(begin, end)
        with LOG.recording() as calls:
            output = subject.model(**piece.inputs(), past_key_values=cache, **given)
        fed = join(fed, Fed.of(piece, output.logits, calls, batch.reach()))
        begin, given = end, {}
    assert fed is not None
    embeds = batch.embeds
    return replace(fed, batch=replace(fed.batch, embeds=embeds))
