"""Test the planned memory of a training step with adapters against real models."""

import dataclasses
import json

import pytest
import torch
from peft import get_peft_model
from support.models import MODELS

import llamoe
from llamoe.planning.training import _saved_in_layer

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in MODELS}
HEADS = {
    "dense": CASES["LlamoeDenseForCausalLM"],
    "mixtral": CASES["LlamoeMixtralForCausalLM"],
    "llama4": CASES["LlamoeForCausalLM"],
    "multimodal": CASES["LlamoeForConditionalGeneration"],
}
TOKENS = 48
# Layers so large that their saved tensors outweigh those outside the layers.
WIDE = dict(hidden_size=192, intermediate_size=320, head_dim=32)


def saved_bytes(model, tokens, checkpointing):
    """Return the bytes that autograd saves in a forward pass, without weights and adapters."""
    adapted = get_peft_model(model, llamoe.lora_config(model, r=3)).train()
    if checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
        adapted.enable_input_require_grads()
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*adapted.parameters(), *adapted.buffers()]}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # The reference keeps the tensor alive, so that no other tensor gets its address.
            saved[storage.data_ptr()] = tensor
        return tensor

    ids = torch.randint(3, 90, (1, tokens))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        adapted(input_ids=ids, labels=ids, use_cache=False, skip_logits=True)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("name", ["dense", "mixtral", "llama4"])
def test_activations_are_those_of_a_real_forward(name):
    """Compare what four more layers save in bfloat16. Masks and indices, which are not planned, may take a tenth."""
    make = HEADS[name].make
    small, large = (make(**WIDE, num_hidden_layers=count).to(torch.bfloat16) for count in (2, 6))
    config = large.config
    for checkpointing in (False, True):
        measured = saved_bytes(large, TOKENS, checkpointing) - saved_bytes(small, TOKENS, checkpointing)
        planned = [
            TOKENS * config.hidden_size * 2
            if checkpointing
            else _saved_in_layer(config, index, (1, TOKENS), 3, True, on_cpu=True)
            for index in range(2, 6)
        ]
        assert measured == pytest.approx(sum(planned), rel=0.1)
        small, large = (make(**WIDE, num_hidden_layers=count).to(torch.bfloat16) for count in (2, 6))


@pytest.mark.parametrize("name", HEADS)
def test_adapters_and_their_states_are_counted(name):
    model = HEADS[name].make()
    for experts in (True, False) if name != "dense" else (True,):
        adapted = get_peft_model(HEADS[name].make(), llamoe.lora_config(model, r=5, experts=experts))
        trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
        options = dict(gpus=0, ram="8GB", adapters=5, adapt_experts=experts, context=TOKENS)
        step = llamoe.plan_placement(model.config, **options).training
        assert step.trained == trained
        assert step.adapters == step.gradients == 4 * trained and step.optimizer == 8 * trained
        assert step.experts == (experts and name != "dense")


def test_memory_for_a_step_stays_free():
    """The step reduces the cache of experts, and the plan's text lists what takes its memory."""
    options = dict(gpus=0, ram="20GB", headroom="1GB", quantization="int4:128")
    alone = llamoe.plan_placement("mixtral-8x7b", context=1, **options)
    plan = llamoe.plan_placement("mixtral-8x7b", adapters=8, context=512, **options)
    step = plan.training
    assert plan.experts_memory == alone.experts_memory + sum(alone.cache.values()) - step.memory
    # 512 tokens choose all experts of each layer, which are read in forward and backward if they are not cached.
    assert step.expert_bytes == pytest.approx(2 * plan.experts["disk"] * (1 - plan.hit_share), rel=1e-6)
    assert json.loads(json.dumps(dataclasses.asdict(plan)["training"]))["rank"] == 8
    text = str(plan)
    assert "rank 8 on attention, feed-forwards and routed experts: 111,673,344 numbers" in text
    assert "with skip_logits" in text and plan.tokens_per_second is None


def test_an_accelerator_without_memory_for_a_step_stays_empty():
    config = HEADS["dense"].make_config()
    options = dict(ram="8GB", headroom=0, adapters=5, context=TOKENS)
    step = llamoe.plan_placement(config, gpus=["1GB"], **options).training.memory
    plan = llamoe.plan_placement(config, gpus=["1GB", step // 2], **options)
    assert plan.device_map == {"": 0} and plan.remaining[1] == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"adapters": 0}, "adapters=0"),
        ({"adapters": 4, "training": True, "gpus": 1}, "leave nodes and training out"),
        (
            {"adapters": 4, "context": 10**7, "ram": "20GB"},
            r"does not fit into the devices' memory without headroom and [\d.]+ GB for a training step",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        llamoe.plan_placement("mistral-7b-v0.1", **{"gpus": 0, "ram": "64GB", **options})
