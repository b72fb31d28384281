"""Tests of all model classes: each runs on every class to which it applies, made from a tiny config."""

import copy
import pickle

import pytest
import torch
from support.models import (
    SHALLOW_MODELS,
    assert_same_gradients,
    assert_same_weights,
    for_models,
    loss_and_gradients,
    main_output,
    max_abs,
    run,
)
from support.tables import in_turn
from transformers import AutoConfig, DynamicCache


def named(value):
    return getattr(value, "name", str(value))


# Saving, loading and copying


@for_models(models=SHALLOW_MODELS)
def test_auto_classes_give_our_class(case, tmp_path):
    model = case.make()
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is type(model.config) and config == model.config
    loaded = case.auto_class.from_pretrained(tmp_path)
    assert type(loaded) is case.model_class
    assert_same_weights(loaded.state_dict(), model.state_dict())
    made = case.auto_class.from_config(config)
    assert type(made) is case.model_class and made.state_dict().keys() == model.state_dict().keys()


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    ("case", "how"),
    in_turn(SHALLOW_MODELS, [copy.deepcopy, pickled]),
    ids=lambda it: getattr(it, "name", None) or it.__name__,
)
def test_copies_are_equal_and_independent(case, how):
    model, inputs = case.make(), case.inputs()
    expected = run(model, **inputs)
    getattr(model, "model", None)  # make the `LlamoeModel` of the head, which the copy must not share
    other = how(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run(other, **inputs), expected)


@for_models(models=SHALLOW_MODELS)
def test_meta_construction_leaves_no_buffer_wrong(case):
    """FSDP makes models on the meta device and fills them by `to_empty`, after which buffers may have any values."""
    model, inputs = case.make(), case.inputs()
    with torch.device("meta"):
        other = case.model_class(case.make_config())
    other.to_empty(device="cpu").load_state_dict(model.state_dict())
    other.eval()
    for (name, buffer), (_, expected) in zip(other.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert torch.equal(run(other, **inputs), run(model, **inputs))


@pytest.mark.parametrize(
    ("case", "tied"),
    in_turn([case for case in SHALLOW_MODELS if case.is_head], [True, False]),
    ids=named,
)
def test_resized_vocabulary(case, tied, tmp_path):
    model, inputs = case.make(tie_word_embeddings=tied), case.inputs()
    before = run(model, **inputs)
    model.resize_token_embeddings(120)
    output = model(**inputs, labels=inputs["input_ids"])
    assert output.logits.shape[-1] == model.config.get_text_config().vocab_size == 120
    assert max_abs(output.logits[..., :101], before) < 1e-5
    assert output.loss.isfinite()
    model.save_pretrained(tmp_path)
    assert torch.equal(run(case.model_class.from_pretrained(tmp_path), **inputs), output.logits)


# Outputs


@for_models()
def test_forward_changes_no_input(case):
    model, inputs = case.make(), case.inputs()
    given, expected = copy.deepcopy(inputs), run(model, **inputs)
    assert all(torch.equal(inputs[name], given[name]) for name in given)
    if case.is_text:  # any number but zero marks a token
        inputs["attention_mask"] = 2 * inputs["attention_mask"]
        assert torch.equal(run(model, **inputs), expected)


# Training


def gradients(case, model, **options):
    inputs = case.inputs()
    return loss_and_gradients(model, inputs, labels=inputs["input_ids"] if case.is_head else None, **options)


@pytest.mark.parametrize(("case", "reentrant"), in_turn(SHALLOW_MODELS, [False, True]), ids=named)
def test_checkpointing_keeps_the_gradients(case, reentrant):
    expected = gradients(case, case.make().train())
    model = case.make().train()
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    calls = []
    for layer in layers:
        layer.input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_gradients(gradients(case, model), expected)
    # Each layer runs again in backward, or checkpointing saves no memory.
    assert len(calls) == 2 * len(layers)


@for_models("is_head", "has_experts", models=SHALLOW_MODELS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_checkpointing_keeps_or_refuses_router_loss(case, reentrant):
    """Under reentrant checkpointing router logits have no graph: router losses would train nothing, and are refused."""
    model = case.make(router_aux_loss_coef=3.0).train()
    expected = gradients(case, model, output_router_logits=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        with pytest.raises(ValueError, match="use_reentrant"):
            gradients(case, model, output_router_logits=True)
    else:
        assert_same_gradients(gradients(case, model, output_router_logits=True), expected)


@for_models("is_text", models=SHALLOW_MODELS)
def test_no_cached_token_is_lost_under_checkpointing(case):
    """With gradients and checkpointing layers get no cache, as in stock, so a cache with tokens is refused."""
    model, past = case.make().train(), DynamicCache()
    ids = case.inputs(padding=(0,))["input_ids"]
    expected = run(model, input_ids=ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    output = model(input_ids=ids, past_key_values=past, use_cache=True)
    assert max_abs(main_output(output), expected) < 1e-5
    assert output.past_key_values is None and past.get_seq_length() == 0
    parts = [run(model, input_ids=part, past_key_values=past) for part in ids.split(29, 1)]
    assert max_abs(torch.cat(parts, 1), expected) < 1e-5
    with pytest.raises(ValueError, match="past_key_values"):
        model(input_ids=ids, past_key_values=past)
