"""Test LLaMA's training recipe as arguments of Trainer."""

import pytest
from support.models import MODELS
from transformers import Trainer

from llamoe import llama_recipe, preset


def test_the_papers_values(tmp_path):
    recipe = llama_recipe(tmp_path, use_cpu=True, per_device_train_batch_size=3)
    assert (recipe.learning_rate, recipe.adam_beta1, recipe.adam_beta2) == (3e-4, 0.9, 0.95)
    assert (recipe.weight_decay, recipe.max_grad_norm, recipe.warmup_steps) == (0.1, 1.0, 2000)
    assert recipe.bf16 and recipe.per_device_train_batch_size == 3
    assert "adamw" in recipe.optim and recipe.activation_checkpointing
    assert recipe.activation_checkpointing_kwargs == {"use_reentrant": False}
    assert recipe.lr_scheduler_type == "cosine_with_min_lr"
    assert recipe.lr_scheduler_kwargs == {"min_lr_rate": 0.1}


@pytest.mark.parametrize(
    ("name", "rate"), [("llama-13b", 3e-4), ("llama-33b", 1.5e-4), ("llama-4-scout", 1.5e-4)]
)
def test_the_learning_rate_depends_on_the_size(name, rate, tmp_path):
    assert llama_recipe(tmp_path, preset(name), use_cpu=True).learning_rate == rate
    assert llama_recipe(tmp_path, preset(name), use_cpu=True, learning_rate=1e-5).learning_rate == 1e-5


@pytest.mark.parametrize("case", MODELS, ids=[case.name for case in MODELS])
def test_norms_and_biases_do_not_decay(case, tmp_path):
    model = case.make()
    decaying = set(Trainer(model, llama_recipe(tmp_path, use_cpu=True)).get_decay_parameter_names(model))
    for name, weight in model.named_parameters():
        is_excluded = name.endswith(".bias") or "norm" in name.rpartition(".")[0].rpartition(".")[2]
        assert (name in decaying) is not is_excluded, name
        assert weight.dim() > 1 or is_excluded or name.endswith("class_embedding"), name


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_checkpointing_can_be_turned_off(name, tmp_path):
    assert not getattr(llama_recipe(tmp_path, use_cpu=True, **{name: False}), name)


def test_other_values_replace_the_recipes_own(tmp_path):
    options = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
    recipe = llama_recipe(tmp_path, use_cpu=True, lr_scheduler_type="linear", **options)
    assert not recipe.lr_scheduler_kwargs and recipe.activation_checkpointing
    assert recipe.activation_checkpointing_kwargs == {"use_reentrant": True}
    recipe = llama_recipe(tmp_path, use_cpu=True, lr_scheduler_kwargs={"min_lr_rate": 0.2})
    assert recipe.lr_scheduler_kwargs == {"min_lr_rate": 0.2}
