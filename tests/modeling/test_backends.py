"""Which attention and experts implementations run, the multimodal class's base model, and folders that stock reads."""

import copy

import pytest
import torch
import transformers
from support.models import (
    MULTIMODAL,
    SHALLOW_MODELS,
    for_models,
    max_abs,
    run,
    stock_text_config,
)
from support.tables import in_turn

import llamoe
from llamoe.modeling.attention.layer import eager_attention_forward
from llamoe.modeling.moe.experts import IMPLEMENTATIONS, Experts


@pytest.fixture
def calls(monkeypatch):
    """Return a counter of the calls of each attention and experts implementation."""
    counts = {}

    def count(name, function):
        def counted(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return counted

    for module in ("attention.layer", "vision"):
        name = f"llamoe.modeling.{module}.eager_attention_forward"
        monkeypatch.setattr(name, count("eager_attention", eager_attention_forward))
    monkeypatch.setattr(Experts, "loop_over_experts", count("eager", Experts.loop_over_experts))
    theirs = {name: IMPLEMENTATIONS[name] for name in ("grouped_mm", "batched_mm")}
    IMPLEMENTATIONS.update({name: count(name, function) for name, function in theirs.items()})
    yield counts
    IMPLEMENTATIONS.update(theirs)


@for_models(models=SHALLOW_MODELS)
@pytest.mark.parametrize("when", ["load", "set"])
def test_attention_implementation_is_taken(case, when, calls, tmp_path):
    model, inputs = case.make(), case.inputs()
    run(model, **inputs)
    assert "eager_attention" not in calls
    if when == "set":
        model.set_attn_implementation("eager")
    else:
        model.save_pretrained(tmp_path)
        model = case.model_class.from_pretrained(tmp_path, attn_implementation="eager")
    run(model, **inputs)
    layers = sum(type(module).__name__ in model._no_split_modules for module in model.modules())
    assert calls["eager_attention"] == layers


@pytest.mark.parametrize(
    ("case", "name", "when"),
    in_turn(
        [case for case in SHALLOW_MODELS if case.has_experts],
        ["eager", "grouped_mm", "batched_mm"],
        ["load", "set", "from_config"],
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_experts_implementation_is_taken(case, name, when, calls, tmp_path):
    all_layers = {"moe_layers": [0, 1]} if case.is_llama4 else {}
    model, inputs = case.make(**all_layers), case.inputs()
    model.set_experts_implementation("eager")
    expected = run(model, **inputs)
    if when == "set":
        model.set_experts_implementation(name)
    elif when == "load":
        model.save_pretrained(tmp_path)
        model = case.model_class.from_pretrained(tmp_path, experts_implementation=name)
    else:
        weights = model.state_dict()
        model = case.auto_class.from_config(case.make_config(**all_layers), experts_implementation=name)
        model.load_state_dict(weights)
        model.eval()
    calls.clear()
    assert max_abs(run(model, **inputs), expected) < 1e-5 * expected.std()
    assert calls == {name: 2}


def test_stock_does_not_choose_our_experts():
    """A config from stock's class says "eager", which is slow; our class chooses its own implementation."""
    stock = transformers.Llama4ForCausalLM(stock_text_config())
    assert stock.config._experts_implementation == "eager"
    for config in (stock.config, llamoe.from_stock(stock.config)):
        ours = llamoe.LlamoeForCausalLM(config)
        assert ours.config._experts_implementation == "llamoe"


@for_models("has_experts", models=SHALLOW_MODELS)
def test_unknown_experts_implementation(case, tmp_path):
    model = case.make()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"experts_implementation=\"fast\".*grouped_mm"):
        model.set_experts_implementation("fast")
    with pytest.raises(ValueError, match=r"experts_implementation=\"fast\".*grouped_mm"):
        case.model_class.from_pretrained(tmp_path, experts_implementation="fast")


# The multimodal class and its base model


def test_view_of_the_model_below_the_head():
    model, inputs = MULTIMODAL.make(), MULTIMODAL.inputs()
    names = set(model.state_dict())
    view = model.model
    assert type(view) is llamoe.LlamoeModel and view is model.model and view is model.base_model
    assert model.get_decoder() is view.language_model is model.language_model.model
    states = run(view, **inputs)
    assert torch.equal(model.get_output_embeddings()(states), run(model, **inputs))
    assert set(model.state_dict()) == names and "model" not in dict(model.named_children())

    model.train()
    assert model.model.training
    model.eval()
    assert not model.model.training
    model.to(torch.bfloat16)
    assert model.model.dtype == torch.bfloat16

    model.multi_modal_projector = copy.deepcopy(model.multi_modal_projector)
    assert model.model is not view and model.model.multi_modal_projector is model.multi_modal_projector
    model.set_decoder(copy.deepcopy(model.get_decoder()))
    assert model.model.language_model is model.language_model.model


def test_assigning_the_model_below_the_head():
    """A new `model` replaces the modules; as a child it would be a second copy of the weights."""
    model = MULTIMODAL.make()
    names, replacement = set(model.state_dict()), copy.deepcopy(model.model)
    model.model = replacement
    assert set(model.state_dict()) == names
    assert model.language_model.model is replacement.language_model


# What transformers reads without llamoe
