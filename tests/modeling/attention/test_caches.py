"""Every kind of cache gives the same tokens; a cache that forgets needed tokens is refused before it is written to."""

import contextlib
import functools
import itertools

import pytest
import torch
from support.models import (
    MODELS,
    dense_config,
    for_models,
    make_asymmetric,
    max_abs,
    multimodal_config,
    new_tokens,
    run,
    text_config,
)
from support.tables import in_turn
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import Fp8QuantizedLayer

import llamoe

# The last two have chunks.
HEADS = [case for case in MODELS if case.is_head]
# The new tokens cross the chunk borders at 32 and 48.
PROMPT, NEW = 29, 20


def named(value):
    return getattr(value, "name", value)


class NoStream(contextlib.nullcontext):
    """A stand-in for a stream on a machine without an accelerator, where all operations have ended already."""

    def wait_stream(self, other):
        pass


@pytest.fixture
def streams(monkeypatch):
    """Without a GPU, move the layers of transformers' offloaded cache outside of streams."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "Stream", NoStream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: NoStream())


KINDS = {
    "static": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
    "no_cache": {"use_cache": False},
    "prefill_in_pieces": {"prefill_chunk_size": 11},
    "static_in_pieces": {"prefill_chunk_size": 11, "cache_implementation": "static"},
    "made_layer_by_layer": lambda config: {"past_key_values": DynamicCache()},
    "dynamic": lambda config: {"past_key_values": DynamicCache(config=config)},
    "static_and_longer": lambda config: {"past_key_values": StaticCache(config=config, max_cache_len=70)},
}


def kinds_options(beams):
    """Return options of `generate`: with twelve tokens each row crosses a border of its chunks."""
    return {"num_beams": beams, "max_new_tokens": 12 if beams == 1 else 6}


@functools.cache
def tokens_without_a_kind(case, beams):
    """Return the tokens that every kind of cache must give."""
    return new_tokens(case.make_small(), case.inputs(length=PROMPT), **kinds_options(beams))


@pytest.mark.parametrize(
    ("case", "kind", "beams"),
    [
        *zip(itertools.cycle(HEADS[2:]), KINDS, itertools.cycle((1, 1, 3, 3))),
        *zip(itertools.cycle(HEADS[:2]), KINDS, itertools.cycle((3, 3, 1, 1))),
    ],
    ids=named,
)
def test_kinds_of_cache_give_the_same_tokens(case, kind, beams, streams):
    """In a padded batch, whose rows have their chunk borders at different indices."""
    model, inputs = case.make_small(), case.inputs(length=PROMPT)
    kind = KINDS[kind](model.config.get_text_config()) if callable(KINDS[kind]) else KINDS[kind]
    given = new_tokens(model, inputs, **kind, **kinds_options(beams))
    assert torch.equal(given, tokens_without_a_kind(case, beams))


@pytest.mark.parametrize(("case", "kind"), in_turn(HEADS, ["dynamic", "static"]), ids=named)
def test_caches_continue_and_can_be_used_again(case, kind):
    """Two calls of `generate` with one cache give the tokens of a longer call, also after a reset of a static cache."""
    model, inputs = case.make_small(), case.row(case.inputs(length=PROMPT), 1)
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    config = model.config.get_text_config()
    static = StaticCache(config=config, max_cache_len=60)
    options = {"do_sample": False, "eos_token_id": -1, "disable_compile": True}
    for _ in range(2):
        options["past_key_values"] = static if kind == "static" else DynamicCache(config=config)
        first = model.generate(**inputs, max_new_tokens=7, **options)
        second = {"input_ids": first, "attention_mask": torch.ones_like(first)}
        assert torch.equal(model.generate(**second, max_new_tokens=NEW - 7, **options), expected)
        static.reset()


# Quantized caches


def quantized(backend):
    return {"cache_implementation": "quantized", "cache_config": {"backend": backend}}


@pytest.mark.parametrize(("case", "beams"), in_turn(HEADS, [1, 3]), ids=named)
def test_fp8_caches(case, beams, monkeypatch):
    """With float64 in place of float8 nothing changes; with float8 logits change a little.

    transformers' Llama 4 refuses these caches.
    """
    model, inputs = case.make_small(), case.inputs(length=PROMPT)
    options = kinds_options(beams)
    expected = new_tokens(model, inputs, **options)
    monkeypatch.setattr(Fp8QuantizedLayer, "fp8_dtype", torch.float64)
    monkeypatch.setattr(Fp8QuantizedLayer, "fp8_max", 1.0)
    assert torch.equal(new_tokens(model, inputs, **options, **quantized("fp8")), expected)
    monkeypatch.undo()
    options = dict(return_dict_in_generate=True, output_logits=True, max_new_tokens=2, eos_token_id=-1)
    plain, given = (model.generate(**inputs, **options, **more) for more in ({}, quantized("fp8")))
    difference = max_abs(given.logits[1], plain.logits[1])
    assert type(given.past_key_values) is QuantizedCache
    assert torch.equal(given.logits[0], plain.logits[0]) and 1e-6 < difference < 0.5 * plain.logits[1].std()


# Caches that forget


IDS = torch.arange(3, 13)[None]
TEXT, DENSE = text_config(), dense_config()


def static(config, length, written=0):
    cache = StaticCache(config=config, max_cache_len=length)
    if written:
        for layer in range(config.num_hidden_layers):
            cache.update(*[torch.zeros(1, 2, written, 20)] * 2, layer)
    return cache


FORGETFUL = {
    "sliding": ("dense", lambda: DynamicCache(config=text_config(num_hidden_layers=3))),
    "sliding_static": ("dense", lambda: static(text_config(num_hidden_layers=3), 30)),
    "all_slide": ("text", lambda: DynamicCache(config=text_config(no_rope_layers=[1] * 5))),
    "short_chunks": ("text", lambda: DynamicCache(config=text_config(attention_chunk_size=8))),
    "short_static_chunks": ("text", lambda: static(text_config(attention_chunk_size=8), 30)),
    "full": ("text", lambda: static(TEXT, 12, written=4)),
}


@pytest.fixture(scope="module")
def heads():
    return {
        "dense": [make_asymmetric(llamoe.LlamoeDenseForCausalLM(DENSE))],
        "text": [
            make_asymmetric(llamoe.LlamoeForCausalLM(TEXT)),
            make_asymmetric(llamoe.LlamoeForConditionalGeneration(multimodal_config(num_experts_per_tok=2))),
        ],
    }


@pytest.mark.parametrize("name", FORGETFUL)
def test_caches_that_forget_what_is_needed_are_refused(name, heads):
    """Without an error the logits would be wrong."""
    family, make = FORGETFUL[name]
    for model in heads[family]:
        cache = make()
        written = cache.get_seq_length()
        with pytest.raises(ValueError, match="past_key_values"):
            model(input_ids=IDS, past_key_values=cache)
        assert cache.get_seq_length() == written


@torch.no_grad()
def test_caches_that_fit_are_accepted(heads):
    """Also caches from other code: with layers that keep all tokens, or with a prefix of keys and values."""
    for family, config in (("dense", DENSE), ("text", TEXT)):
        for model in heads[family]:
            plain = model(input_ids=IDS).logits
            wider = text_config(attention_chunk_size=24) if family == "text" else config
            keeps_all = (
                DENSE if family == "dense" else text_config(attention_chunk_size=None, layer_types=None)
            )
            for cache in (DynamicCache(config=keeps_all), DynamicCache(config=wider)):
                assert max_abs(model(input_ids=IDS, past_key_values=cache).logits, plain) < 1e-5
                assert cache.get_seq_length() == 10
            # peft's prefix tuning makes such caches.
            generator = torch.Generator().manual_seed(0)
            prefix = [torch.randn(2, 2, 4, 20, generator=generator) for _ in range(config.num_hidden_layers)]
            cache = DynamicCache([(states[:1], states[1:]) for states in prefix])
            shifted = model(input_ids=IDS, past_key_values=cache).logits
            assert cache.get_seq_length() == 14 and max_abs(shifted, plain) > 0.1


@torch.no_grad()
def test_static_windows_have_room_for_a_chunk(heads):
    """If no layer keeps all tokens, a static window shorter than a chunk must not overwrite tokens of the chunk."""
    model = make_asymmetric(llamoe.LlamoeForCausalLM(text_config(no_rope_layers=[1] * 5)))
    expected = model(input_ids=IDS).logits
    past = StaticCache(config=model.config, max_cache_len=12)
    assert max_abs(model(input_ids=IDS, past_key_values=past).logits, expected) < 1e-5
    with pytest.raises(ValueError, match="past_key_values"):
        model(input_ids=IDS, past_key_values=past)
    long = IDS.repeat(1, 3)
    past = StaticCache(config=model.config, max_cache_len=20)
    parts = [model(input_ids=piece, past_key_values=past).logits for piece in long.split([14, 1, 15], 1)]
    assert max_abs(torch.cat(parts, 1), model(input_ids=long).logits) < 2e-5


@for_models("is_text")
def test_the_cache_has_two_names(case):
    model, inputs = case.make().eval(), case.row(case.inputs(), 2)
    caches = [DynamicCache(config=model.config.get_text_config()) for _ in range(2)]
    by_names = zip(("cache", "past_key_values"), caches, strict=True)
    assert torch.equal(*(run(model, **inputs, **{name: cache}) for name, cache in by_names))
    assert [cache.get_seq_length() for cache in caches] == [inputs["input_ids"].shape[1]] * 2
    with pytest.raises(ValueError, match="two names of one argument"):
        model(**inputs, cache=caches[0], past_key_values=caches[1])
