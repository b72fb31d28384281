"""Continuous batching (`generate_batch`) gives each prompt the tokens that it has alone, or is refused."""

import pytest
import torch
from support.models import MODELS, for_models, new_tokens
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

pytestmark = pytest.mark.slow

HEADS = [case for case in MODELS if case.is_head]


def prompts(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]


def batch(model, inputs, count):
    settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1)
    sizes = ContinuousBatchingConfig(page_size=4, num_blocks=24, max_batch_tokens=24)
    options = {"generation_config": settings, "continuous_batching_config": sizes, "warmup": False}
    results = model.generate_batch(inputs, **options)
    assert [result.prompt_ids for result in results.values()] == inputs
    return [result.generated_tokens for result in results.values()]


def each_alone(model, inputs, count):
    return [
        new_tokens(model, {"input_ids": torch.tensor([ids])}, max_new_tokens=count)[0].tolist()
        for ids in inputs
    ]


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.name)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_continuous_batching_equals_each_prompt_alone(case, attention):
    """Tokens are equal with more prompts than fit into the cache at once; Llama 4 is without chunks here."""
    model = case.make_small(**({"attention_chunk_size": None, "layer_types": None} if case.is_llama4 else {}))
    model.set_attn_implementation(attention)
    inputs = prompts(40, 1, 4, 9, 25)
    expected = each_alone(model, inputs, 7)
    assert batch(model, inputs, 7) == expected
    assert model.config._attn_implementation == attention
    assert each_alone(model, inputs[:1], 7) == expected[:1]


@for_models("is_head", "is_llama4")
def test_continuous_batching_refuses_chunks(case):
    """transformers' masks for the paged cache would ignore chunks, and be wrong in silence."""
    model = case.make_small()
    with pytest.raises(ValueError, match="attention_chunk_size = 16"):
        batch(model, prompts(4, 12), 5)
    with pytest.raises(ValueError, match="attention_chunk_size"):
        model.generate(torch.tensor(prompts(12)), cache_implementation="paged", max_new_tokens=5)
