"""Test the computed bytes of the KV cache against the tensors of real caches."""

import pytest
import torch
from support.models import MODELS, stock_text_config
from transformers import DynamicCache, Llama4ForCausalLM

import llamoe
from llamoe.configuration import cache_bytes, cache_tokens, preset


def bytes_of(cache):
    """Return the bytes of each layer's cache. A view counts with its whole storage, except in growing caches.

    Growing caches have memory for further tokens, which does not count.
    """
    return [
        sum(
            tensor.nbytes if grows else tensor.untyped_storage().nbytes()
            for tensor in (layer.keys, layer.values)
        )
        for layer in cache.layers
        for grows in [hasattr(layer, "llamoe_memory")]
    ]


@torch.no_grad()
def most_bytes(model, config, context, piece, batch_size):
    """Read a prompt of `context` tokens in pieces, the rest first; return the most bytes of each layer's cache."""
    cache, most = DynamicCache(config=config), [0] * config.num_hidden_layers
    ids = torch.randint(3, 90, (batch_size, context))
    sizes = [context % piece] * bool(context % piece) + [piece] * (context // piece)
    for part in ids.split(sizes, dim=1):
        model(input_ids=part, past_key_values=cache, use_cache=True)
        most = [max(pair) for pair in zip(most, bytes_of(cache), strict=True)]
    return most


DENSE, MIXTRAL, TEXT, MULTIMODAL = (case for case in MODELS if case.is_head)


@pytest.mark.parametrize(
    ("case", "context", "piece"),
    [
        *((TEXT, *row) for row in [(12, 12), (16, 16), (50, 50), (50, 20), (50, 9), (20, 1), (40, 15)]),
        (DENSE, 50, 20),
        (MIXTRAL, 50, 50),
        (MIXTRAL, 50, 9),
        (MULTIMODAL, 40, 15),
    ],
)
def test_bytes_are_those_of_the_cache(case, context, piece):
    model = case.make().bfloat16()
    expected = most_bytes(model, model.config.get_text_config(), context, piece, batch_size=3)
    assert cache_bytes(model.config, context, batch_size=3, piece=piece) == expected


def test_bytes_are_those_of_transformers_model():
    """transformers' Llama 4 has the same chunks, of 16 tokens."""
    config = stock_text_config()
    expected = most_bytes(Llama4ForCausalLM(config), config, 50, 20, batch_size=2)
    assert cache_bytes(llamoe.from_stock(config), 50, batch_size=2, element_size=4, piece=20) == expected
    assert len(set(expected)) == 2, "full and chunked layers differ"


def test_published_sizes():
    """A token takes keys and values of 8 heads of 128 numbers of 2 bytes; 12 of Scout's 48 layers have no chunks."""
    of_a_token = 2 * 8 * 128 * 2
    tokens = cache_tokens(preset("llama-4-scout"), 131072, piece=4096)
    assert sorted(set(tokens)) == [8191 + 4096, 131072] and tokens.count(131072) == 12
    assert sum(cache_bytes(preset("llama-4-maverick"), 8192)) == 48 * 8192 * of_a_token
    assert sum(cache_bytes(preset("llama-2-7b"), 4096)) == 32 * 4096 * 2 * 32 * 128 * 2


@pytest.mark.parametrize(
    "options",
    [
        dict(context=0),
        dict(context=257),
        dict(context=1.5),
        dict(context=20, piece=21),
        dict(context=20, batch_size=0),
    ],
    ids=str,
)
def test_wrong_sizes_are_refused(options):
    with pytest.raises(ValueError, match=[*options][-1]):
        cache_bytes(TEXT.make_config(), **options)
