"""Test plans for several nodes: how the model is divided, and the bytes of each accelerator."""

import re

import pytest
from support.models import dense_config, text_config
from transformers.distributed import DistributedConfig

import llamoe
from llamoe import plan_placement

pytestmark = pytest.mark.slow

HEADS = dict(num_attention_heads=12, num_key_value_heads=4, head_dim=10)


def test_maverick_takes_two_nodes_and_scout_one():
    """In bfloat16 Maverick's 803 GB exceed the memory of eight accelerators, and Scout's 217 GB do not."""
    maverick = plan_placement("llama-4-maverick", nodes=2, gpus=8, ram="1TB")
    assert maverick.distributed_config() == {"tp_size": 8, "pp_size": 2} and maverick.copies == 1
    total = 2 * llamoe.count_parameters(llamoe.preset("llama-4-maverick").text_config).total
    # Every accelerator holds routers and norms. Only the second of two stages holds the head.
    assert total / 16 < maverick.weights < total / 16 * 1.01 < maverick.room
    assert any("load this folder with LlamoeForCausalLM" in note for note in maverick.notes)
    scout = plan_placement("llama-4-scout", nodes=2, gpus=8, ram="1TB")
    assert scout.distributed_config() == {"tp_size": 8, "ep_size": 8}
    assert scout.copies == 2
    DistributedConfig(**scout.distributed_config())
    assert "2 nodes x 8 accelerators" in str(scout) and "2 copies" in str(scout)


def test_numbers_of_heads_and_experts_decide_the_split():
    """12 heads and 4 key/value heads can be divided by two, but not by three or six; 5 experts cannot be divided."""
    config = text_config(num_local_experts=5, **HEADS)
    plan = plan_placement(config, nodes=3, gpus=6, ram="1TB", context=40)
    assert plan.sizes == {"tp_size": 2, "ep_size": 1, "pp_size": 1} and plan.copies == 9
    assert any("5 experts cannot be divided by 2" in note for note in plan.notes)
    even = plan_placement(text_config(num_local_experts=8, **HEADS), nodes=2, gpus=4, ram="1TB", context=40)
    assert even.sizes == {"tp_size": 4, "ep_size": 4, "pp_size": 1}


def test_stages_are_planned_if_the_model_exceeds_one_node():
    config = dense_config(num_hidden_layers=6, **HEADS)
    arguments = dict(gpu_memory=10**9, ram="1TB", headroom=0, context=40, bits=32)
    whole = plan_placement(config, nodes=2, gpus=1, **arguments)
    assert whole.sizes["pp_size"] == 1 and whole.copies == 2
    arguments["gpu_memory"] = whole.weights + whole.cache - 1
    halves = plan_placement(config, nodes=2, gpus=1, **arguments)
    assert halves.distributed_config() == {"pp_size": 2} and halves.remaining >= 0
    assert halves.cache == whole.cache // 2
    arguments["gpu_memory"] = halves.weights + halves.cache - 1
    with pytest.raises(ValueError, match="the fullest of 2 accelerators"):
        plan_placement(config, nodes=2, gpus=1, **arguments)


def test_training_divides_weights_within_a_node_if_they_fit():
    """Training takes 16 bytes for each parameter, of which each accelerator holds an eighth or a sixteenth."""
    small = plan_placement("llama-2-7b", nodes=2, gpus=8, ram="1TB", training=True)
    config = llamoe.preset("llama-2-7b")
    assert small.sizes == {"fsdp_size": 8, "dp_replicate_size": 2}
    assert small.weights == 2 * llamoe.count_parameters(config).total
    # FSDP2 gathers two layers at once, in 16 bits.
    layer = (
        4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    )
    assert small.cache == 2 * 2 * layer
    large = plan_placement("llama-2-70b", nodes=2, gpus=8, ram="1TB", training=True)
    assert large.sizes == {"fsdp_size": 16, "dp_replicate_size": 1}
    # The first axis is divided: 16 of 32 accelerators hold one of the 16 experts of each Scout layer, 16 hold none.
    scout = llamoe.preset("llama-4-scout").text_config
    experts = scout.num_hidden_layers * 3 * scout.hidden_size * scout.intermediate_size
    with pytest.raises(ValueError, match="the fullest of 32 accelerators would hold") as refused:
        plan_placement("llama-4-scout", nodes=4, gpus=8, ram="1TB", training=True)
    rest = llamoe.count_parameters(llamoe.preset("llama-4-scout")).total - 16 * experts
    (weights,) = re.findall(r"hold ([\d.]+) GB of weights", str(refused.value))
    assert float(weights) == pytest.approx(16 * (experts + rest / 32) / 1e9, rel=1e-3)
    alone = plan_placement("llama-2-7b", gpus=8, ram="1TB", training=True)
    assert alone.sizes == {"fsdp_size": 8, "dp_replicate_size": 1}


@pytest.mark.parametrize(
    ("model", "arguments", "named"),
    [
        ("llama-2-7b", dict(nodes=0), "nodes=0"),
        ("llama-2-7b", dict(nodes=2, gpus=0), "gpus=0"),
        ("llama-2-7b", dict(nodes=2, gpus=["24GB", "80GB"]), "gpus="),
        ("llama-2-7b", dict(nodes=2, gpus=8, quantization="int4"), "llamoe int4 weights"),
        ("metaclip-b16", dict(nodes=2, gpus=8), "vision tower"),
    ],
    ids=str,
)
def test_impossible_plans_are_refused(model, arguments, named):
    with pytest.raises(ValueError, match=named):
        plan_placement(model, ram="1TB", **arguments)
