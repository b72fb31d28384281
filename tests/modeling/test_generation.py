"""`generate` of every class with a head, compared with stock, and with each row alone."""

import copy
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import (
    IMAGE_TOKEN,
    LENGTH,
    MODELS,
    MULTIMODAL,
    PADDING,
    draw,
    for_models,
    generate,
    max_abs,
    new_tokens,
)
from support.tables import in_turn
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

# The tiny configs have chunks of 16: of eight new tokens some are after the border at 32.
PROMPT = 29


@functools.cache
def pair(case):
    """Return a model, and stock's with the same weights; tests change neither."""
    model = case.make_small()
    return model, case.stock_of(model)


def named(value):
    return getattr(value, "name", value)


HEADS = [case for case in MODELS if case.is_head]
DENSE, MIXTRAL, TEXT = HEADS[:3]


def without_images(inputs):
    ids = inputs["input_ids"]
    return {"input_ids": ids.masked_fill(ids == IMAGE_TOKEN, 50), "attention_mask": inputs["attention_mask"]}


def with_embeddings(model, inputs):
    """Return the inputs with embeddings in place of ids."""
    inputs = dict(inputs)
    return {"inputs_embeds": model.get_input_embeddings()(inputs.pop("input_ids")), **inputs}


# Compared with stock

WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.9},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.7},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12},
    "prefill_in_pieces": {"prefill_chunk_size": 11},
}


@pytest.mark.parametrize(
    ("way", "case"), [*in_turn(WAYS, [TEXT, MULTIMODAL]), *in_turn(WAYS, [DENSE, MIXTRAL])], ids=named
)
def test_tokens_and_scores_are_those_of_stock(case, way):
    """Tokens and scores are equal; for Llama 4 with a single row, since stock is wrong under left padding."""
    inputs = case.inputs(length=PROMPT)
    inputs = case.row(inputs, 1) if case.has_experts else inputs
    # Stock takes pictures only in these two ways of decoding.
    inputs = inputs if way in ("greedy", "sampling") else without_images(inputs)
    if "lookup" in way:
        repeated = inputs["input_ids"][:1, -10:].repeat(1, 3)  # so that prompt lookup finds repetitions
        inputs = {"input_ids": repeated, "attention_mask": torch.ones_like(repeated)}
    options = {"return_dict_in_generate": True, "output_scores": True, **WAYS[way]}
    given, expected = (generate(one, inputs, **options) for one in pair(case))
    assert torch.equal(given.sequences, expected.sequences)
    assert given.sequences.shape[1] > inputs["input_ids"].shape[1] + 3
    for mine, theirs in zip(given.scores, expected.scores, strict=True):
        finite = theirs.isfinite()
        assert torch.equal(mine.isfinite(), finite)
        assert max_abs(mine[finite], theirs[finite]) < 1e-4


# Compared with each row alone


@pytest.mark.parametrize(
    ("case", "by", "use_cache"),
    [
        *(
            (case, "ids", use_cache)
            for case, use_cache in zip(HEADS, (False, True, True, False), strict=True)
        ),
        (DENSE, "embeddings", True),
        (MULTIMODAL, "embeddings", True),
    ],
    ids=named,
)
def test_beams_of_a_batch_are_those_of_each_row(case, by, use_cache):
    """Rows have no tile, two tiles and one tile; each beam must use the tiles of its row."""
    model, inputs = case.make_small(), case.inputs(length=PROMPT)
    options = {"num_beams": 3, "num_return_sequences": 2, "use_cache": use_cache}
    given = inputs if by == "ids" else with_embeddings(model, inputs)
    options = {"max_new_tokens": 8, "eos_token_id": -1, **options}
    together = model.generate(**given, **options)[:, -8:]
    assert together.shape == (6, 8)
    for row in range(len(PADDING)):
        alone = new_tokens(model, case.row(inputs, row), **options)
        assert torch.equal(together[2 * row : 2 * row + 2], alone)


IN_TRAINING = {
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "assistant": {"prompt_lookup_num_tokens": 3},
    "adapter": {},
}


@pytest.mark.parametrize(("way", "case"), in_turn(IN_TRAINING, HEADS, times=2), ids=named)
def test_generate_in_training_under_checkpointing(case, way):
    """Under checkpointing stock's layers drop the cache, so that each token depends on the one before it alone."""
    model, inputs = case.make_small(), case.inputs(length=PROMPT)
    inputs = case.row(inputs, 1) if way == "assistant" else inputs
    expected = generate(model, inputs, **IN_TRAINING[way])
    if way == "adapter":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    assert torch.equal(generate(model, inputs, **IN_TRAINING[way]), expected)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers and all(layer.gradient_checkpointing for layer in layers)


# Images and embeddings


@pytest.mark.parametrize(
    ("case", "way"), in_turn(HEADS, ["greedy", "sampling", "prefill_with_ids"]), ids=named
)
def test_embeddings_give_the_tokens_of_their_ids(case, way):
    model, inputs = case.make_small(), case.inputs(length=PROMPT)
    given = with_embeddings(model, inputs)
    expected = new_tokens(model, inputs, **WAYS.get(way, {}))
    if way == "prefill_with_ids":  # with both inputs, the ids are only returned before the new tokens
        given["input_ids"] = inputs["input_ids"]
        assert torch.equal(new_tokens(model, given), expected)
    else:
        assert torch.equal(generate(model, given, **WAYS[way]), expected)


def test_precomputed_features_are_taken():
    """Features that were computed once serve several prompts with the same picture."""
    model, inputs = MULTIMODAL.make_small(), MULTIMODAL.inputs(length=PROMPT)
    with torch.no_grad():
        features = model.get_image_features(inputs["pixel_values"])
    expected = new_tokens(model, inputs)
    del inputs["pixel_values"]
    # A list with one entry for each tile is allowed, too.
    for stacked in (features.pooler_output, list(features.pooler_output)):
        features.pooler_output = stacked
        assert torch.equal(new_tokens(model, inputs | {"mm_encoder_outputs": {"image": features}}), expected)


def test_a_conversation_goes_on_with_another_picture():
    """A second message has its own picture, while the first message stays in the cache."""
    model, inputs = MULTIMODAL.make(), MULTIMODAL.inputs(padding=(0, 0), length=PROMPT)
    first = {**MULTIMODAL.row(inputs, 1), "pixel_values": inputs["pixel_values"][:2]}
    ids = first["input_ids"]
    result = generate(model, first, return_dict_in_generate=True)
    tail = torch.tensor([[41, 42, *[IMAGE_TOKEN] * 4, 43, 44]])
    ids = torch.cat([result.sequences, tail], 1)
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    second = torch.randn(1, *inputs["pixel_values"].shape[1:])
    expected = new_tokens(model, {**whole, "pixel_values": torch.cat([first["pixel_values"], second])})
    past = result.past_key_values
    given = new_tokens(model, {**whole, "pixel_values": second}, cache=past)
    assert torch.equal(given, expected)


# Drafting


def smaller(case, **text):
    return draw(case.model_class, case.make_config(num_hidden_layers=2, **text))


@pytest.mark.parametrize("case", [MIXTRAL, MULTIMODAL], ids=named)
def test_assisted_tokens_are_those_without_an_assistant(case):
    """Tokens are equal over the chunk borders at 32 and 48, with many drafts rejected; one assistant is stock's."""
    (model, stock), inputs = pair(case), without_images(case.row(case.inputs(length=PROMPT), 1))
    expected = new_tokens(stock, inputs, max_new_tokens=24)
    for assistant in (smaller(case), copy.deepcopy(model)):
        given = new_tokens(model, inputs, assistant_model=assistant, max_new_tokens=24)
        assert torch.equal(given, expected)


@pytest.mark.parametrize("name", ["LlamoeDenseForCausalLM", "LlamoeForCausalLM"])
def test_drafting_with_the_first_layers(name):
    case = next(case for case in MODELS if case.name == name)
    model, inputs = case.make(), case.row(case.inputs(length=PROMPT), 1)
    layers = []
    model.model.layers[3 if case.has_experts else 2].register_forward_hook(lambda *_: layers.append(1))
    expected = new_tokens(model, inputs, max_new_tokens=24)
    plain = len(layers)
    assert torch.equal(new_tokens(model, inputs, assistant_early_exit=2, max_new_tokens=24), expected)
    # Drafts run the first layers alone, so the later layers run at most as often as without drafts.
    assert 0 < len(layers) - plain <= plain
    assert model.config.num_hidden_layers == len(model.model.layers)
    assert torch.equal(new_tokens(model, inputs, max_new_tokens=24), expected)


def test_a_turn_without_pictures_may_say_so():
    model = MULTIMODAL.make_small()
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(2))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = new_tokens(model, inputs, max_new_tokens=5)
    assert torch.equal(new_tokens(model, inputs, pixel_values=None, max_new_tokens=5), expected)


@for_models("is_head")
def test_all_logits_may_be_kept(case):
    model, inputs = case.make_small(), case.inputs(length=PROMPT)
    assert torch.equal(new_tokens(model, inputs, logits_to_keep=0), new_tokens(model, inputs))


# Prompts that are not padded on the left


def on_the_right(inputs, padding):
    """Return the rows without pictures, with the first row's padding after its tokens."""
    inputs = {name: value.clone() for name, value in without_images(inputs).items()}
    for value in inputs.values():
        value[0] = value[0].roll(-padding)
    return inputs


@for_models("is_head", "is_llama4")
@pytest.mark.parametrize("padding", [3, 20])
def test_prompts_padded_on_the_right_are_refused(case, padding):
    """Positions count real tokens, so chunks would be wrong; the error speaks of prompts, whatever cache is used."""
    model, inputs = case.make_small(), case.inputs(padding=(padding, 0))
    on_the_left = new_tokens(model, without_images(inputs))[0]
    inputs = on_the_right(inputs, padding)
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 2}):
        with pytest.raises(ValueError, match=r'last token of row 0 counts as padding.*padding_side = "left"'):
            new_tokens(model, inputs, **options)
    with pytest.raises(ValueError, match="or by pad_token_id"):
        new_tokens(model, {"input_ids": inputs["input_ids"]})
    alone = {name: value[:1, :-padding] for name, value in inputs.items()}
    assert torch.equal(new_tokens(model, alone)[0], on_the_left)


@for_models("is_head", "is_llama4")
def test_a_mask_with_a_hole_is_named(case):
    """A mask with a hole is an error if the cache keeps a window of tokens; with all tokens it is right."""
    model, inputs = case.make_small(), case.inputs(padding=(0,), length=PROMPT)
    inputs.pop("pixel_values", None)
    hole = slice(PROMPT - 6, PROMPT - 3)
    inputs["attention_mask"][:, hole] = 0
    with pytest.raises(
        ValueError, match=r"attention_mask hides tokens between.*past_key_values=DynamicCache\(\)"
    ):
        new_tokens(model, inputs)
    shown = {name: value[inputs["attention_mask"] == 1][None] for name, value in inputs.items()}
    assert torch.equal(new_tokens(model, inputs, past_key_values=DynamicCache()), new_tokens(model, shown))


@for_models("is_head", "is_text")
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 2}, {"mask": None}],
)
def test_right_padding_within_a_chunk_is_stocks(case, options):
    """Within one chunk, or without chunks, right padding gives a warning and stock's tokens, also without a mask."""
    # No temperature: stock's counts padding, ours does not.
    text = dict(attention_chunk_size=LENGTH + 7, attn_temperature_tuning=False) if case.is_llama4 else {}
    model, inputs = case.make_small(**text), on_the_right(case.inputs(padding=(3, 0)), 3)
    if "mask" in options:
        options, inputs = {}, {"input_ids": inputs["input_ids"]}
    if "cache_implementation" in options:
        options = {**options, "disable_compile": True}
    assert torch.equal(
        new_tokens(model, inputs, **options), new_tokens(case.stock_of(model), inputs, **options)
    )
