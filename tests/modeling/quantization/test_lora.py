"""peft's adapters on quantized models: training, saving, merging into 16 bits, and what is refused."""

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from support.few_bits import (
    CLOSE,
    FAMILIES,
    WEIGHTS,
    distance,
    folder,
    load,
    logits,
    packed,
    route_by_position,
    token_ids,
)
from support.tables import in_turn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import llamoe

MIXTURES = ("text", "mixtral")
# Of gradients: some are sums that nearly cancel. Up to 0.05 is measured, and 0.15 for dequantized weights in bfloat16.
GRADIENTS = 0.1


def adapt(model, config=None):
    """Add an adapter to all linear layers and experts, none of whose factors is zero."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, config or llamoe.lora_config(model, r=3))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter.dtype))
    return adapted.eval()


def backward(model):
    """Return logits, and the gradients of adapters and inputs."""
    embedded = model.get_input_embeddings()(token_ids()).detach().requires_grad_()
    model.zero_grad()
    found = model(inputs_embeds=embedded).logits.float()
    (found * torch.linspace(-1, 1, found.numel()).view_as(found)).mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found.detach(), gradients | {"inputs": embedded.grad}


@pytest.mark.parametrize(("family", "weights"), [*in_turn(FAMILIES, WEIGHTS), ("mixtral", "int8")])
def test_adapters_do_beside_packed_weights_what_they_do_beside_dequantized_ones(family, weights, monkeypatch):
    route_by_position(monkeypatch)
    plain = logits(packed(family, weights))
    adapted = adapt(packed(family, weights))
    reference = adapt(packed(family, weights).dequantize(torch.float32))
    found, gradients = backward(adapted)
    expected, its_gradients = backward(reference)
    assert distance(plain, expected) > 0.3
    assert distance(found, expected) < CLOSE
    assert gradients.keys() == its_gradients.keys()
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == gradients.keys() - {"inputs"}
    if family in MIXTURES:
        assert any("experts.lora_A" in name for name in trained)
        assert any("experts.base_layer.lora_B" in name for name in trained)
    for name, gradient in gradients.items():
        assert distance(gradient, its_gradients[name]) < GRADIENTS, name
    # peft makes float32 factors for every quantized base.
    assert {p.dtype for name, p in adapted.named_parameters() if ".lora_" in name} == {torch.float32}


@pytest.mark.slow
def test_from_four_bits_over_training_to_a_merged_model_of_sixteen(tmp_path, monkeypatch):
    route_by_position(monkeypatch)
    path, ids = folder("text"), token_ids(4, 9)
    base = prepare_model_for_kbit_training(load(path, "int4"))
    model = get_peft_model(base, llamoe.lora_config(base, r=3))
    options = TrainingArguments(
        tmp_path / "run", max_steps=4, per_device_train_batch_size=4, learning_rate=0.01, logging_steps=1,
        lr_scheduler_type="constant", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    trained = logits(model.eval())
    trainer.save_model(tmp_path / "adapter")
    # `prepare_model_for_kbit_training` casts plain weights to float32, so outputs are equal only after it.
    again = prepare_model_for_kbit_training(load(path, "int4"))
    again = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.equal(logits(again), trained)
    # Merge into the dequantized weights, and into the original ones.
    again.get_base_model().dequantize()
    assert distance(logits(again), trained) < CLOSE
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter").eval()
    for adapted in (again, plain):
        expected = logits(adapted)
        merged = adapted.merge_and_unload()
        assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
        assert distance(logits(merged), expected) < CLOSE


@pytest.mark.parametrize("weights", WEIGHTS)
def test_peft_prepares_a_packed_model_for_training(weights):
    model = packed("mixtral", weights)
    codes = {name: tensor.clone() for name, tensor in model.state_dict().items() if "proj" in name}
    # As in many programs, the function was imported before llamoe.
    prepared = prepare_model_for_kbit_training(model)
    assert not hasattr(prepared, "is_loaded_in_4bit") and prepared.is_gradient_checkpointing
    assert prepared.model.norm.weight.dtype == torch.float32
    state = prepared.state_dict()
    assert all(
        state[name].dtype == old.dtype and torch.equal(state[name], old) for name, old in codes.items()
    )
    adapted = get_peft_model(prepared, llamoe.lora_config(prepared, r=3)).train()
    adapted.gradient_checkpointing_enable()
    _, expected = backward(adapted)
    adapted.gradient_checkpointing_disable()
    _, found = backward(adapted)
    assert found.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


def layers(model):
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


@pytest.mark.parametrize(
    ("weights", "chosen", "is_safe"),
    [("int4", {}, False), ("int8", {"linears": False}, True)],
)
def test_nothing_is_merged_into_packed_weights(weights, chosen, is_safe):
    model = adapt(load(folder("mixtral"), weights, **chosen))
    is_packed = lambda layer: getattr(layer.get_base_layer(), "storage", None) is not None  # noqa: E731
    before = logits(model)
    codes = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if not tensor.is_floating_point()
    }
    assert codes
    for merge in (model.merge_adapter, model.merge_and_unload, *(layer.merge for layer in layers(model))):
        if not hasattr(merge.__self__, "get_base_layer") or is_packed(merge.__self__):
            with pytest.raises(
                ValueError, match=f"{weights}.*cannot be changed: .*merge it into .*dequantize"
            ):
                merge(safe_merge=is_safe)
    assert not any(layer.merged for layer in layers(model) if is_packed(layer))
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in codes.items())
    # Layers of 16 bits are merged before a packed one refuses; the model still computes the same.
    assert distance(logits(model), before) < CLOSE


def lora(target, **fields):
    """Return a config for one linear layer or stack; fields are set later, since peft then checks no packages."""
    linear, stack = ([target], None) if "." not in target else ([], [target])
    config = LoraConfig(target_modules=linear, target_parameters=stack)
    for field, value in fields.items():
        setattr(config, field, value)
    return config


METHODS = {"ADALORA": {"total_step": 10}, "HRA": {}, "IA3": {"feedforward_modules": ["down_proj"]}, "OFT": {}}
REFUSED = [
    *(
        (
            PEFT_TYPE_TO_CONFIG_MAPPING[method](target_modules=["q_proj", "down_proj"], **fields),
            rf"^{method} .*model\.layers\.0\.self_attn\.q_proj, .* int8",
        )
        for method, fields in METHODS.items()
    ),
    (lora("o_proj", init_lora_weights="pissa"), r"='pissa'\) for a packed layer"),
    (lora("experts.down_proj", init_lora_weights="loftq"), r"='loftq'\) for down_proj"),
    (lora("o_proj", use_dora=True), r"use_dora=True.*\.$"),
    (lora("experts.down_proj", use_dora=True), r"use_dora=True.*\.$"),
    (
        LoraConfig(target_modules=["q_proj"], target_parameters=["v_proj.weight"]),
        r"target_parameters names .*v_proj\.weight: .*target_modules",
    ),
]


@pytest.mark.parametrize(("config", "says"), REFUSED, ids=lambda each: str(each)[:60])
def test_what_needs_the_numbers_of_packed_weights_is_refused(config, says):
    """Refused are methods other than LoRA, factors computed from weights, and packed weights as `target_parameters`."""
    model = packed("text", "int8")
    with pytest.raises(ValueError, match=says):
        get_peft_model(model, config)


@pytest.mark.parametrize("begin", ["gaussian", "eva", False])
def test_factors_that_are_not_computed_from_weights_are_not_refused(begin):
    model = packed("text", "int8")
    before = logits(model)
    # EVA supports linear layers only.
    config = llamoe.lora_config(model, experts=begin != "eva", init_lora_weights=begin)
    adapted = get_peft_model(model, config)
    assert torch.equal(logits(adapted), before) == (begin is not False)


def test_what_is_not_packed_still_merges():
    model = load(folder("mixtral"), "int8", linears=False)
    adapted = adapt(model, LoraConfig(target_modules=["q_proj"], use_dora=True, modules_to_save=["norm"]))
    before = logits(adapted)
    assert distance(logits(adapted.merge_and_unload()), before) < CLOSE
