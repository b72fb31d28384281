"""Cases of whole decoders, mixture and dense: prefill, decoding, training, `generate`; and of local attention.

Local attention is measured in a prefill of one layer with a small feed-forward; each pass builds its masks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    DynamicCache,
    Llama4ForCausalLM,
    Llama4TextModel,
    LlamaForCausalLM,
    MistralModel,
    PreTrainedModel,
)

import llamoe

from . import AGAIN, OURS, REFERENCE, roofline
from .harness import ROUNDS, SURE_ROUNDS, Case, Cases, Contestant, tolerance_of, tolerance_of_gradients
from .memory import available_bytes
from .shapes import Setting, Shape
from .shared_weights import dense_config, mistral_config, model_pair, text_config

PAST = 64
"""Cached tokens in each row while decoding."""
QUADRATIC_NUMBERS = 2
"""Bytes for each pair of tokens while a mask is built: the mask, and one of the two masks that it combines."""


def mixture(setting: Setting, shape: Shape, layers: int, **what) -> Cases:
    """`Llama4ForCausalLM` and `LlamoeForCausalLM`, every layer a mixture; otherwise as `decoder`."""
    config = text_config(shape, layers)
    pair = model_pair(setting, Llama4ForCausalLM, llamoe.LlamoeForCausalLM, config)
    yield from decoder(setting, pair, **what)


def dense(setting: Setting, shape: Shape, layers: int, **what) -> Cases:
    """`LlamaForCausalLM`, the same again as `AGAIN`, and `LlamoeDenseForCausalLM`; otherwise as `decoder`."""
    config = dense_config(shape, layers)
    pair = model_pair(setting, LlamaForCausalLM, llamoe.LlamoeDenseForCausalLM, config)
    yield from decoder(setting, pair, again=True, **what)


def decoder(
    setting: Setting,
    pair: tuple[PreTrainedModel, PreTrainedModel],
    prefill: tuple[int, ...] = (),
    decode: tuple[int, ...] = (),
    training: tuple[int, ...] = (),
    generate: tuple[int, ...] = (),
    again: bool = False,
) -> Cases:
    """Cases of a decoder.

    Args:
        setting: device and dtype.
        pair: transformers' model and ours.
        prefill: lengths of one row.
        decode: batch sizes of one step, after `PAST` tokens.
        training: lengths of one row, forward and backward.
        generate: batch sizes of `generate` with a static cache, which transformers compiles on a device.
        again: measure stock against itself as well, and take more rounds of all contestants.
    """
    stock, ours = pair
    models = {REFERENCE: stock, OURS: ours} | ({AGAIN: stock} if again else {})
    layers, vocabulary = len(ours.model.layers), ours.vocab_size

    def case(
        name: str, make: Callable, phase: str, tokens: int, work=None, outputs: Any = None, **options
    ) -> Case:
        given = {} if outputs is None else {"outputs": outputs}
        contestants = {who: Contestant(make(model), **given) for who, model in models.items()}
        facts, tolerance = {"phase": phase, "tokens": tokens}, tolerance_of(setting.dtype, layers)
        return Case(
            name, contestants, work, tolerance, facts, least=SURE_ROUNDS if again else ROUNDS, **options
        )

    for length in prefill:
        ids = setting.tokens(1, length, vocabulary)

        def whole(model, ids=ids):
            return torch.no_grad()(lambda: model(ids, use_cache=False).logits)

        yield case(f"prefill, T = {length}", whole, "prefill", length, _work(ours, ids))
    for batch in decode:
        prompt, ids = setting.tokens(batch, PAST, vocabulary), setting.tokens(batch, 1, vocabulary, offset=2)

        def step(model, prompt=prompt, ids=ids):
            return torch.no_grad()(decode_step(model, prompt, ids))

        yield case(f"decode, B = {batch}", step, "decode", batch, _work(ours, ids, PAST))
    # Our model has the same parameters.
    parameters = list(stock.parameters())

    def forget() -> None:
        for parameter in parameters:
            parameter.grad = None

    for length in training:
        ids = setting.tokens(1, length, vocabulary)

        def train(model, ids=ids):
            def run():
                forget()
                model(ids, labels=ids, use_cache=False).loss.backward()
                return [parameter.grad for parameter in parameters]

            return run

        work = roofline.of_training(_work(ours, ids))
        trained = case(f"training, T = {length}", train, "training", length, work, list, before=forget)
        trained.tolerance = tolerance_of_gradients(setting.dtype, layers)
        yield trained
    forget()
    for batch in generate:
        new, prompt = 64, setting.tokens(batch, PAST, vocabulary)
        options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)

        def answer(model, prompt=prompt, options=options):
            return lambda: model.generate(prompt, cache_implementation="static", **options)

        made = case(f"generate {new} tokens, static cache, B = {batch}", answer, "generate", batch)
        for contestant in made.contestants.values():
            # Single steps compare logits. Here one tie would change all later tokens.
            contestant.outputs, contestant.warm_up, contestant.has_own_pool = None, 2, True
        yield made


def decode_step(
    model: PreTrainedModel, prompt: torch.Tensor, ids: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A step of `ids` `[B, 1]` after a prompt, to be run again and again; it yields the logits."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, past_key_values=cache, logits_to_keep=1)

    def run() -> torch.Tensor:
        logits = model(ids, past_key_values=cache).logits
        cache.crop(-1)
        return logits

    return run


def _work(ours: PreTrainedModel, ids: torch.Tensor, past: int = 0) -> roofline.Work:
    hit = roofline.experts_hit(ours, input_ids=ids) if isinstance(ours, llamoe.LlamoeForCausalLM) else []
    return roofline.of_decoder(ours, *ids.shape, past, hit)


def chunked(
    setting: Setting, shape: Shape, chunk: int, counts: tuple[int, ...], long: int, patience: float
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
    plain = dict(moe_layers=[], num_local_experts=1, intermediate_size_mlp=shape.hidden, no_rope_layers=[1])
    longest = max(long, chunk * max(counts))
    config = text_config(shape, attention_chunk_size=chunk, max_position_embeddings=longest, **plain)
    pair = model_pair(setting, Llama4TextModel, llamoe.LlamoeTextModel, config)
    result: dict | None = None
    length = 0
    for tokens in [*(chunk * count for count in counts), long]:
        facts = {"phase": "chunked", "tokens": tokens, "chunks": tokens // chunk, "chunk": chunk}
        case = _hidden_states(setting, shape, pair, f"T = {tokens}, {tokens // chunk} chunks", facts)
        case.work = _work_of_chunks(pair[1], tokens, chunk)
        case.skipped = (
            _left_out(setting, result, length, tokens, patience) if tokens == long and result else {}
        )
        result = yield case
        length = tokens


def windowed(setting: Setting, shape: Shape, window: int, counts: tuple[int, ...]) -> Cases:
    """Prefill under a sliding window, of so many windows: a layer, and its attention alone."""
    config = mistral_config(shape, sliding_window=window, max_position_embeddings=window * max(counts))
    pair = model_pair(setting, MistralModel, llamoe.LlamoeDenseModel, config)
    for count, alone in [*((count, "") for count in counts), (counts[-1], ", attention alone")]:
        if alone:
            for model in pair:
                model.layers[0].mlp = nn.Identity()
        facts = {"phase": "attention" if alone else "window", "tokens": window * count, "window": window}
        yield _hidden_states(setting, shape, pair, f"T = {window * count}, window of {window}{alone}", facts)


def _hidden_states(setting: Setting, shape: Shape, pair: tuple, name: str, facts: dict) -> Case:
    ids = setting.tokens(1, facts["tokens"], shape.vocabulary)

    def run(model):
        return torch.no_grad()(lambda: model(ids, use_cache=False).last_hidden_state)

    contestants = {who: Contestant(run(model)) for who, model in zip((REFERENCE, OURS), pair, strict=True)}
    return Case(name, contestants, None, tolerance_of(setting.dtype), facts)


def _work_of_chunks(model, tokens: int, chunk: int) -> roofline.Work:
    """The work of a decoder whose scores stay inside chunks, without the head."""
    layer = sum(p.numel() for p in model.layers.parameters())
    itemsize = next(model.parameters()).element_size()
    pairs = tokens // chunk * chunk * (chunk + 1) // 2
    attended = 4 * pairs * model.config.num_attention_heads * model.config.head_dim
    moved = layer + 2 * tokens * model.config.hidden_size
    return roofline.Work(moved * itemsize, 2 * tokens * layer + attended)


def _left_out(setting: Setting, last: dict, length: int, tokens: int, patience: float) -> dict[str, str]:
    reasons = {}
    available, mask = available_bytes(setting.device), QUADRATIC_NUMBERS * tokens**2
    if mask > available / 2:
        reasons[REFERENCE] = (
            f"a mask of {tokens} x {tokens} takes {mask / 1e9:.1f} GB; {available / 1e9:.1f} GB are free"
        )
    for name, row in last["contestants"].items():
        expected = row.get("median", 0) * (tokens / length) ** 2
        if name not in reasons and expected > patience:
            reasons[name] = (
                f"{row['median']:.2f} s at {length} tokens make {expected:.0f} s if it grows with the square, more "
                f"than {patience:g} s"
            )
    return reasons
