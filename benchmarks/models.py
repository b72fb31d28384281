"""Cases of whole decoders, mixture and dense: prefill, decoding with a cache, training, and `generate` in one graph."""

from collections.abc import Callable
from functools import partial

import torch
from transformers import DynamicCache, Llama4ForCausalLM, LlamaForCausalLM, PreTrainedModel

import llamoe

from . import AGAIN, OURS, REFERENCE, roofline
from .harness import ROUNDS, SURE_ROUNDS, Case, Cases, Contestant, tolerance_of, tolerance_of_gradients
from .shapes import Setting, Shape
from .shared_weights import dense_config, model_pair, text_config

PAST = 64
"""Cached tokens in each row while decoding."""


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
    models = dict(zip((REFERENCE, OURS), pair, strict=True))
    if again:
        models[AGAIN] = models[REFERENCE]
    yield from _prefill(setting, models, prefill)
    yield from _decode(setting, models, decode)
    yield from _training(setting, models, training)
    yield from _generate(setting, models, generate)


def _rounds(models: dict) -> int:
    return SURE_ROUNDS if AGAIN in models else ROUNDS


def _contestants(models: dict, make: Callable) -> dict[str, Contestant]:
    return {name: Contestant(torch.no_grad()(make(model))) for name, model in models.items()}


def _work(models: dict, ids: torch.Tensor, past: int = 0) -> roofline.Work:
    ours = models[OURS]
    hit = roofline.experts_hit(ours, input_ids=ids) if isinstance(ours, llamoe.LlamoeForCausalLM) else []
    return roofline.of_decoder(ours, *ids.shape, past, hit)


def _prefill(setting: Setting, models: dict, lengths: tuple[int, ...]) -> Cases:
    for length in lengths:
        ids = setting.tokens(1, length, models[OURS].vocab_size)
        yield Case(
            name=f"prefill, T = {length}",
            contestants=_contestants(
                models, lambda model, ids=ids: lambda: model(ids, use_cache=False).logits
            ),
            work=_work(models, ids),
            tolerance=tolerance_of(setting.dtype, len(models[OURS].model.layers)),
            facts={"phase": "prefill", "tokens": length},
            least=_rounds(models),
        )


def _decode(setting: Setting, models: dict, batches: tuple[int, ...]) -> Cases:
    vocabulary = models[OURS].vocab_size
    for batch in batches:
        prompt = setting.tokens(batch, PAST, vocabulary)
        ids = setting.tokens(batch, 1, vocabulary, offset=2)
        yield Case(
            name=f"decode, B = {batch}",
            contestants=_contestants(models, partial(decode_step, prompt=prompt, ids=ids)),
            work=_work(models, ids, PAST),
            tolerance=tolerance_of(setting.dtype, len(models[OURS].model.layers)),
            facts={"phase": "decode", "tokens": batch},
            least=_rounds(models),
        )


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


def _training(setting: Setting, models: dict, lengths: tuple[int, ...]) -> Cases:
    # Our model has the same parameters.
    parameters = list(models[REFERENCE].parameters())

    def forget() -> None:
        for parameter in parameters:
            parameter.grad = None

    tolerance = tolerance_of_gradients(setting.dtype, len(models[OURS].model.layers))
    for length in lengths:
        ids = setting.tokens(1, length, models[OURS].vocab_size)

        def step(model, ids=ids) -> Callable[[], list[torch.Tensor]]:
            def run():
                forget()
                model(ids, labels=ids, use_cache=False).loss.backward()
                return [parameter.grad for parameter in parameters]

            return run

        yield Case(
            name=f"training, T = {length}",
            contestants={name: Contestant(step(model), outputs=list) for name, model in models.items()},
            work=roofline.of_training(_work(models, ids)),
            tolerance=tolerance,
            facts={"phase": "training", "tokens": length},
            least=_rounds(models),
            before=forget,
        )
    forget()


def _generate(setting: Setting, models: dict, batches: tuple[int, ...], new: int = 64) -> Cases:
    for batch in batches:
        prompt = setting.tokens(batch, PAST, models[OURS].vocab_size)

        def whole(model, prompt=prompt) -> Callable[[], torch.Tensor]:
            def run():
                return model.generate(
                    prompt,
                    max_new_tokens=new,
                    min_new_tokens=new,
                    do_sample=False,
                    cache_implementation="static",
                    pad_token_id=0,
                )

            return run

        # Single steps compare logits. Here one tie would change all later tokens.
        yield Case(
            name=f"generate {new} tokens, static cache, B = {batch}",
            contestants={
                name: Contestant(whole(model), outputs=None, warm_up=2, has_own_pool=True)
                for name, model in models.items()
            },
            work=None,
            tolerance=tolerance_of(setting.dtype, len(models[OURS].model.layers)),
            facts={"phase": "generate", "tokens": batch},
            least=_rounds(models),
        )
