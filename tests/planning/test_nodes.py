"""Several nodes: which split is chosen, its sizes and bytes, and accelerate's own reading of the written file."""

import json

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.launch import prepare_extend_env_parallelism_config, prepare_multi_gpu_env
from support.models import dense_config, text_config
from transformers.distributed import DistributedConfig

import llamoe
from llamoe import plan_placement

pytestmark = pytest.mark.slow

GB = 10**9
HEADS = dict(num_attention_heads=12, num_key_value_heads=4, head_dim=10)


def test_maverick_takes_two_nodes_and_scout_one():
    """In bfloat16: 803 GB are more than eight cards have, and 217 are not."""
    maverick = plan_placement("llama-4-maverick", nodes=2, gpus=8, ram="1TB")
    assert maverick.distributed_config() == {"tp_size": 8, "pp_size": 2} and maverick.copies == 1
    total = 2 * llamoe.count_parameters(llamoe.preset("llama-4-maverick").text_config).total
    # Routers and norms are on every card, and the last of two stages has the head alone.
    assert total / 16 < maverick.weights < total / 16 * 1.01 < maverick.room
    assert any("LlamoeForCausalLM loads the text model" in note for note in maverick.notes)
    scout = plan_placement("llama-4-scout", nodes=2, gpus=8, ram="1TB")
    assert scout.distributed_config() == {"tp_size": 8, "ep_size": 8}
    assert scout.copies == 2
    DistributedConfig(**scout.distributed_config())
    assert "2 nodes x 8 accelerators" in str(scout) and "2 copies" in str(scout)


def test_heads_and_experts_choose_the_split():
    """12 heads and 4 key/value heads are for four of six cards no more than for two; 5 experts for none."""
    config = text_config(num_local_experts=5, **HEADS)
    plan = plan_placement(config, nodes=3, gpus=6, ram="1TB", context=40)
    assert plan.sizes == {"tp_size": 2, "ep_size": 1, "pp_size": 1} and plan.copies == 9
    assert any("5 experts are not divided by 2" in note for note in plan.notes)
    even = plan_placement(
        text_config(num_local_experts=8, **HEADS), nodes=1 + 1, gpus=4, ram="1TB", context=40
    )
    assert even.sizes == {"tp_size": 4, "ep_size": 4, "pp_size": 1}


def test_stages_are_for_what_one_node_has_no_memory_for():
    config = dense_config(num_hidden_layers=6, **HEADS)
    arguments = dict(gpu_memory=10**9, ram="1TB", headroom=0, context=40, bits=32)
    whole = plan_placement(config, nodes=2, gpus=1, **arguments)
    assert whole.sizes["pp_size"] == 1 and whole.copies == 2
    arguments["gpu_memory"] = whole.weights + whole.cache - 1
    halves = plan_placement(config, nodes=2, gpus=1, **arguments)
    assert halves.distributed_config() == {"pp_size": 2} and halves.remaining >= 0
    assert halves.cache == whole.cache // 2
    arguments["gpu_memory"] = halves.weights + halves.cache - 1
    with pytest.raises(ValueError, match="2 nodes of 1"):
        plan_placement(config, nodes=2, gpus=1, **arguments)


def test_training_shares_inside_of_a_node_if_it_fits():
    """Sixteen bytes a parameter on each eighth, or on each sixteenth card."""
    small = plan_placement("llama-2-7b", nodes=2, gpus=8, ram="1TB", training=True)
    total = llamoe.count_parameters(llamoe.preset("llama-2-7b")).total
    assert small.sizes == {"fsdp_size": 8, "dp_replicate_size": 2} and small.weights == 2 * total
    large = plan_placement("llama-2-70b", nodes=2, gpus=8, ram="1TB", training=True)
    assert large.sizes == {"fsdp_size": 16, "dp_replicate_size": 1}
    with pytest.raises(ValueError, match=r"training takes 102\.6 GB .* on each of 32 accelerators"):
        plan_placement("llama-4-scout", nodes=4, gpus=8, ram="1TB", training=True)
    alone = plan_placement("llama-2-7b", gpus=8, ram="1TB", training=True)
    assert alone.sizes == {"fsdp_size": 8, "dp_replicate_size": 1}


def launched(path):
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "training.py"])
    return load_config_from_file(str(path)), _validate_launch_command(arguments)[0]


@pytest.mark.parametrize(("model", "shards", "replicas"), [("llama-2-7b", 8, 2), ("llama-2-70b", 16, 1)])
def test_accelerate_reads_the_file_for_training(model, shards, replicas, tmp_path, monkeypatch):
    path = tmp_path / "nodes.yaml"
    plan_placement(model, nodes=2, gpus=8, ram="1TB", training=True).save_accelerate_config(path)
    config, arguments = launched(path)
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (16, 2, "bf16")
    arguments.main_process_ip, arguments.main_process_port = "10.0.0.1", 29500
    variables = prepare_multi_gpu_env(arguments)
    assert variables["ACCELERATE_USE_FSDP"] == "true" and variables["FSDP_VERSION"] == "2"
    if replicas > 1:
        for key, value in prepare_extend_env_parallelism_config(arguments, {}).items():
            monkeypatch.setenv(key, value)
        sizes = ParallelismConfig()
        assert (sizes.dp_shard_size, sizes.dp_replicate_size) == (shards, replicas)
    assert "--machine_rank N --main_process_ip IP" in path.read_text()


def test_accelerate_reads_the_file_for_inference(tmp_path):
    path = tmp_path / "nodes.yaml"
    plan_placement("llama-4-maverick", nodes=2, gpus=8, ram="1TB").save_accelerate_config(path)
    config, arguments = launched(path)
    assert (config.num_processes, config.num_machines, arguments.multi_gpu) == (16, 2, True)
    assert not arguments.use_fsdp
    assert "distributed_config=DistributedConfig(tp_size=8, pp_size=2)" in path.read_text()
    # A copy of its own for each node.
    plan_placement("llama-4-scout", nodes=2, gpus=8, ram="1TB").save_accelerate_config(path)
    config, _ = launched(path)
    assert (config.num_processes, config.num_machines) == (8, 1)
    assert yaml.safe_load(path.read_text())["distributed_type"] == "MULTI_GPU"


@pytest.mark.parametrize(
    ("model", "arguments", "named"),
    [
        ("llama-2-7b", dict(nodes=0), "nodes=0"),
        ("llama-2-7b", dict(nodes=2, gpus=0), "gpus=0"),
        ("llama-2-7b", dict(nodes=2, gpus=["24GB", "80GB"]), "gpus="),
        ("llama-2-7b", dict(nodes=2, gpus=8, bits=4), "int4"),
        ("metaclip-b16", dict(nodes=2, gpus=8), "vision tower"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said(model, arguments, named):
    with pytest.raises(ValueError, match=named):
        plan_placement(model, ram="1TB", **arguments)


def test_a_plan_is_data():
    plan = plan_placement("llama-4-scout", nodes=2, gpus=8, ram="1TB")
    assert json.loads(json.dumps(plan.distributed_config())) == plan.distributed_config()
