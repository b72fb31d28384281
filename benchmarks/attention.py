"""Cases of local attention: prefill of one decoder layer with a small feed-forward; each pass builds its masks."""

import torch
from torch import nn
from transformers import Llama4TextModel, MistralModel

import llamoe

from . import OURS, REFERENCE, roofline
from .harness import Case, Cases, Contestant, tolerance_of
from .memory import available_bytes
from .shapes import Setting, Shape
from .shared_weights import mistral_config, model_pair, text_config

QUADRATIC_NUMBERS = 2
"""Bytes for each pair of tokens while a mask is built: the mask, and one of the two masks that it combines."""


def chunked(
    setting: Setting,
    shape: Shape,
    chunk: int,
    counts: tuple[int, ...],
    long: int,
    patience: float,
) -> Cases:
    """Prefill of several chunks, then of a long text.

    Args:
        setting: device and dtype.
        shape: sizes.
        chunk: tokens in a chunk.
        counts: numbers of chunks, rising.
        long: tokens of the long text. A contestant skips it if its mask would take more than half of the memory, or if
            its last time, scaled with the square of the length, exceeds the patience.
        patience: seconds.
    """
    config = text_config(
        shape,
        moe_layers=[],
        num_local_experts=1,
        intermediate_size_mlp=shape.hidden,
        attention_chunk_size=chunk,
        no_rope_layers=[1],
        max_position_embeddings=max(long, chunk * max(counts)),
    )
    pair = model_pair(setting, Llama4TextModel, llamoe.LlamoeTextModel, config)
    models = dict(zip((REFERENCE, OURS), pair, strict=True))
    result: dict | None = None
    length = 0
    for tokens in [*(chunk * count for count in counts), long]:
        skipped = _left_out(setting, result, length, tokens, patience) if tokens == long and result else {}
        ids = setting.tokens(1, tokens, shape.vocabulary)

        def run(model, ids=ids):
            return lambda: model(ids, use_cache=False).last_hidden_state

        contestants = {name: Contestant(torch.no_grad()(run(model))) for name, model in models.items()}
        result = yield Case(
            name=f"T = {tokens}, {tokens // chunk} chunks",
            contestants=contestants,
            work=_work(models[OURS], tokens, chunk),
            tolerance=tolerance_of(setting.dtype),
            facts={"phase": "chunked", "tokens": tokens, "chunks": tokens // chunk, "chunk": chunk},
            skipped=skipped,
        )
        length = tokens


def windowed(setting: Setting, shape: Shape, window: int, counts: tuple[int, ...]) -> Cases:
    """Prefill under a sliding window, of so many windows: a layer, and its attention alone."""
    config = mistral_config(shape, sliding_window=window, max_position_embeddings=window * max(counts))
    pair = model_pair(setting, MistralModel, llamoe.LlamoeDenseModel, config)
    models = dict(zip((REFERENCE, OURS), pair, strict=True))
    for count in counts:
        ids = setting.tokens(1, window * count, shape.vocabulary)

        def run(model, ids=ids):
            return lambda: model(ids, use_cache=False).last_hidden_state

        yield Case(
            name=f"T = {window * count}, window of {window}",
            contestants={name: Contestant(torch.no_grad()(run(model))) for name, model in models.items()},
            work=None,
            tolerance=tolerance_of(setting.dtype),
            facts={"phase": "window", "tokens": window * count, "window": window},
        )
    for model in pair:
        model.layers[0].mlp = nn.Identity()
    yield Case(
        name=f"T = {window * counts[-1]}, window of {window}, attention alone",
        contestants={name: Contestant(torch.no_grad()(run(model))) for name, model in models.items()},
        work=None,
        tolerance=tolerance_of(setting.dtype),
        facts={"phase": "attention", "tokens": window * counts[-1], "window": window},
    )


def _work(model, tokens: int, chunk: int) -> roofline.Work:
    """The work of a decoder whose scores stay inside chunks, without the head."""
    layer = sum(p.numel() for p in model.layers.parameters())
    itemsize = next(model.parameters()).element_size()
    pairs = tokens // chunk * chunk * (chunk + 1) // 2
    attended = 4 * pairs * model.config.num_attention_heads * model.config.head_dim
    return roofline.Work(
        (layer + 2 * tokens * model.config.hidden_size) * itemsize, 2 * tokens * layer + attended
    )


def _left_out(setting: Setting, last: dict, length: int, tokens: int, patience: float) -> dict[str, str]:
    reasons = {}
    available = available_bytes(setting.device)
    mask = QUADRATIC_NUMBERS * tokens**2
    if mask > available / 2:
        reasons[REFERENCE] = (
            f"a mask of {tokens} x {tokens} takes {mask / 1e9:.1f} GB; {available / 1e9:.1f} GB are free"
        )
    for name, row in last["contestants"].items():
        if name not in reasons and "median" in row:
            expected = row["median"] * (tokens / length) ** 2
            if expected > patience:
                reasons[name] = (
                    f"{row['median']:.2f} s at {length} tokens make {expected:.0f} s if it grows with the square, "
                    f"more than {patience:g} s"
                )
    return reasons
