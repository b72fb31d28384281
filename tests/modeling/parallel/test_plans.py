"""Plans for several devices, and accelerate's configuration files, as far as one process can test them."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, prepare_multi_gpu_env
from accelerate.utils.launch import prepare_extend_env_parallelism_config
from support.models import MODELS, for_models
from support.paths import EXAMPLES
from transformers import Llama4Config, Llama4TextConfig, Llama4VisionConfig, LlamaConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard as wildcard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import llamoe
from llamoe.modeling.moe.layer import MixtureOfExperts

FILES = EXAMPLES / "accelerate"

# Layers that each device holds as a whole.
WHOLE = ("patch_embedding.linear", "multi_modal_projector.linear_1")


def names_in(model):
    parts = [*model.named_modules(), *model.named_parameters()]
    return {wildcard(name) for name, _ in parts}


def build(config, model_class):
    with torch.device("meta"):
        return model_class(config)


def test_plans_hold_those_of_stock():
    dense, text = llamoe.LlamoeDenseConfig, llamoe.LlamoeTextConfig
    assert dense.base_model_tp_plan == LlamaConfig.base_model_tp_plan
    assert text.base_model_tp_plan == Llama4TextConfig.base_model_tp_plan
    # Stock gathers the outputs of two small layers, by a style that SGLang does not know; ours are whole everywhere.
    for ours, stock in ((llamoe.LlamoeVisionConfig, Llama4VisionConfig), (llamoe.LlamoeConfig, Llama4Config)):
        kept = {name: style for name, style in stock.base_model_tp_plan.items() if name not in WHOLE}
        assert (ours.base_model_tp_plan or {}).items() >= kept.items()
    for ours in (dense, text):
        assert ours.base_model_pp_plan == LlamaConfig.base_model_pp_plan
        assert ours.base_model_fsdp_plan == LlamaConfig.base_model_fsdp_plan


@for_models()
def test_every_rule_names_a_part_and_a_known_style(case):
    model = build(case.make_config(), case.model_class)
    names = names_in(model)
    assert model.tp_plan
    for plan in (model.tp_plan, model._ep_plan):
        assert plan.keys() <= names
        assert set(plan.values()) <= set(ALL_PARALLEL_STYLES)
    assert model.fsdp_plan.keys() <= names
    assert set(model.fsdp_plan.values()) <= {"free_full_weight", "keep_full_weight"}
    assert bool(model._ep_plan) == case.has_experts
    assert model.pp_plan.keys() <= names
    assert bool(model.pp_plan) == case.is_text


def test_a_mixtral_with_a_shared_expert_splits_it():
    (case,) = (case for case in MODELS if "Mixtral" in case.name)
    model = build(case.make_config(use_shared_expert=True), case.model_class)
    rules = {
        rule.rpartition(".")[2]: model.tp_plan[rule] for rule in model.tp_plan if "shared_expert" in rule
    }
    assert rules == {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    assert model.tp_plan.keys() <= names_in(model)


@for_models()
def test_plans_cover_all_but_small_weights(case):
    model = build(case.make_config(), case.model_class)
    for name, parameter in model.named_parameters():
        owner = wildcard(name.rpartition(".")[0])
        planned = owner in model.tp_plan or wildcard(name) in model.tp_plan
        small = parameter.ndim < 2 or name.endswith(
            ("router.weight", "gate.weight", "positional_embedding_vlm")
        )
        small = small or owner.endswith(WHOLE)
        # Later releases of transformers add the embedding to each plan.
        assert planned or small or owner.endswith("embed_tokens"), name
    layers = [
        name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules
    ]
    assert {wildcard(name) for name in layers} <= model.fsdp_plan.keys()


@for_models()
def test_plans_are_not_written_to_config_json(case, tmp_path):
    build(case.make_config(), case.model_class).config.save_pretrained(tmp_path)
    assert "plan" not in (tmp_path / "config.json").read_text().replace("layer_plan", "")


def launch_arguments(name):
    path = str(FILES / f"{name}.yaml")
    arguments = launch_command_parser().parse_args(["--config_file", path, "training.py"])
    return load_config_from_file(path), _validate_launch_command(arguments)[0]


@pytest.mark.parametrize(("name", "count"), [("1gpu", 1), ("2gpu_ddp", 2), ("8gpu", 8)])
def test_the_files_ask_for_fsdp2_or_nothing(name, count):
    config, arguments = launch_arguments(name)
    assert (config.num_processes, config.mixed_precision) == (count, "bf16")
    assert bool(arguments.multi_gpu) == (name == "2gpu_ddp") and not arguments.use_deepspeed
    assert bool(arguments.use_fsdp) == (name == "8gpu")
    if arguments.use_fsdp:
        variables = prepare_multi_gpu_env(arguments)
        assert variables["FSDP_VERSION"] == "2" and variables["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
        assert variables["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
        # Without this variable accelerate uses each model's `_no_split_modules`.
        assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in variables


@pytest.mark.parametrize(("name", "kind"), [("8gpu_context", "CP"), ("8gpu_sequence", "SP")])
def test_the_files_that_share_rows(name, kind, monkeypatch):
    """accelerate reads the sizes from the environment that its launcher makes of the file."""
    config, arguments = launch_arguments(name)
    for key, value in prepare_extend_env_parallelism_config(arguments, {}).items():
        monkeypatch.setenv(key, value)
    sizes = ParallelismConfig()
    assert (sizes.cp_size, sizes.sp_size) == ((4, 1) if kind == "CP" else (1, 4))
    assert sizes.dp_shard_size * 4 == config.num_processes


def test_the_file_for_zero3_makes_each_mixture_a_leaf(monkeypatch):
    config, arguments = launch_arguments("8gpu_zero3")
    assert (config.num_processes, arguments.zero_stage) == (8, 3)
    # DeepSpeed is not installed: compare the classes that accelerate finds and would pass to it.
    leaves = []
    deepspeed = ModuleType("deepspeed.utils")
    deepspeed.set_z3_leaf_modules = lambda model, classes: leaves.append(classes)
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", deepspeed)
    monkeypatch.setattr("accelerate.utils.dataclasses.compare_versions", lambda *_: False)
    plugin = SimpleNamespace(transformer_moe_cls_names=arguments.deepspeed_moe_layer_cls_names)
    for case in MODELS:
        if case.has_experts:
            DeepSpeedPlugin.set_moe_leaf_modules(plugin, build(case.make_config(), case.model_class))
    assert leaves == [[MixtureOfExperts]] * 5
