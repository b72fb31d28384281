"""Continuous batching (`generate_batch`) of every head: each prompt as by itself, or refused."""

from dataclasses import fields

import pytest
import torch
from support.models import IMAGE_TOKEN, MODELS, MULTIMODAL, for_models, new_tokens
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

pytestmark = pytest.mark.slow

HEADS = [case for case in MODELS if case.is_head]
TEXT = next(case for case in HEADS if case.name == "LlamoeForCausalLM")


def batching(page_size=4, **options):
    # Older releases have another name for it.
    name = (
        "page_size"
        if "page_size" in {field.name for field in fields(ContinuousBatchingConfig)}
        else "block_size"
    )
    sizes = {name: page_size, "num_blocks": 24, "max_batch_tokens": 24}
    return ContinuousBatchingConfig(**sizes, **options)


def prompts(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]


def settings(count, **options):
    return GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, **options)


def batch(model, inputs, count, **options):
    options = {"continuous_batching_config": batching(), "warmup": False, **options}
    results = model.generate_batch(inputs, generation_config=settings(count), **options)
    assert [result.prompt_ids for result in results.values()] == inputs
    return [result.generated_tokens for result in results.values()]


def each_alone(model, inputs, count):
    return [
        new_tokens(model, {"input_ids": torch.tensor([ids])}, max_new_tokens=count)[0].tolist()
        for ids in inputs
    ]


@pytest.mark.parametrize(
    ("case", "attention"),
    [*zip(HEADS, ("eager", "sdpa", "eager", "sdpa"), strict=True)],
    ids=lambda value: getattr(value, "name", value),
)
def test_continuous_batching_equals_each_prompt_alone(case, attention):
    """More prompts than fit at once, up to the last token of a chunk; dense models know no such limit."""
    model = case.make_small()
    model.set_attn_implementation(attention)
    lengths, count = ((11, 1, 4, 9, 7), 5) if case.is_llama4 else ((40, 1, 4, 9, 25), 7)
    inputs = prompts(*lengths)
    expected = each_alone(model, inputs, count)
    assert batch(model, inputs, count) == expected
    assert model.config._attn_implementation == attention
    if case.is_llama4:
        assert model.config.get_text_config().layer_types.count("chunked_attention") == 1
    assert each_alone(model, inputs[:1], count) == expected[:1]


@for_models("is_head", "is_llama4")
def test_continuous_batching_refuses_more_than_a_chunk(case):
    """Behind the border it would be wrong without a word: stock's paged masks know nothing of chunks."""
    model = case.make_small()
    inputs = prompts(4, 12)
    with pytest.raises(ValueError, match=r"request 1 has 12 .* = 5\..*attention_chunk_size = 16"):
        batch(model, inputs, 5)
    with pytest.raises(ValueError, match="request 1 has 12"):
        batch(model, inputs, 3, max_new_tokens=5)
    with pytest.raises(ValueError, match="request 0 has 4 prompt tokens and max_new_tokens = None"):
        batch(model, inputs, None)
    with pytest.raises(ValueError, match="request 0 has 12"):
        model.generate(torch.tensor(inputs[1:]), cache_implementation="paged", max_new_tokens=5)
    assert batch(model, inputs, 4) == each_alone(model, inputs, 4)
    manager = model.init_continuous_batching(settings(4), batching())
    try:
        with pytest.raises(ValueError, match="request late has 12 prompt tokens and max_new_tokens = 5"):
            manager.add_request(inputs[1], request_id="late", max_new_tokens=5)
        with pytest.raises(ValueError, match="13 prompt tokens and max_new_tokens = 4"):
            manager.add_requests(prompts(13))
    finally:
        model.set_attn_implementation("sdpa")


def test_without_chunks_continuous_batching_knows_no_limit():
    model = TEXT.make_small(attention_chunk_size=None, layer_types=None)
    inputs = prompts(12, 30)
    assert batch(model, inputs, 6) == each_alone(model, inputs, 6)


def test_continuous_batching_takes_no_images():
    model = MULTIMODAL.make_small()
    with pytest.raises(ValueError, match=r"request 1 has image tokens"):
        batch(model, [[3, 4], [5, IMAGE_TOKEN, 6]], 3)


def test_manager_is_kept_between_requests():
    model, inputs = TEXT.make_small(), prompts(11, 3, 8)
    expected = each_alone(model, inputs, 5)
    assert batch(model, inputs, 5, persistent_manager=True) == expected
    assert batch(model, inputs[::-1], 5, persistent_manager=True) == expected[::-1]
    model.destroy_cached_continuous_batching_manager()
    options = {"generation_config": settings(5), "continuous_batching_config": batching(), "warmup": False}
    with model.continuous_batching_context_manager(**options) as manager:
        for ids, tokens in zip(inputs, expected, strict=True):
            request = manager.add_request(ids)
            result = next(result for result in manager.request_id_iter(request) if result.is_finished())
            assert result.generated_tokens == tokens
