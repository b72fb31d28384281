"""LLaMA's training recipe as arguments of Trainer."""

import math

import pytest
import torch
from support.models import MODELS, TEXT
from transformers import Trainer

from llamoe import llama_recipe, preset

CAUSAL = next(case for case in MODELS if case.name == "LlamoeForCausalLM")


def test_the_papers_values(tmp_path):
    recipe = llama_recipe(tmp_path, use_cpu=True, per_device_train_batch_size=3)
    assert (recipe.learning_rate, recipe.adam_beta1, recipe.adam_beta2) == (3e-4, 0.9, 0.95)
    assert (recipe.weight_decay, recipe.max_grad_norm, recipe.warmup_steps) == (0.1, 1.0, 2000)
    assert recipe.bf16 and recipe.per_device_train_batch_size == 3
    assert "adamw" in recipe.optim


@pytest.mark.parametrize(
    ("name", "rate"), [("llama-13b", 3e-4), ("llama-33b", 1.5e-4), ("llama-4-scout", 1.5e-4)]
)
def test_the_rate_goes_by_the_size(name, rate, tmp_path):
    assert llama_recipe(tmp_path, preset(name), use_cpu=True).learning_rate == rate
    assert llama_recipe(tmp_path, preset(name), use_cpu=True, learning_rate=1e-5).learning_rate == 1e-5


@pytest.mark.parametrize("case", MODELS, ids=[case.name for case in MODELS])
def test_norms_and_biases_do_not_decay(case, tmp_path):
    model = case.make()
    decaying = set(Trainer(model, llama_recipe(tmp_path, use_cpu=True)).get_decay_parameter_names(model))
    for name, weight in model.named_parameters():
        is_spared = name.endswith(".bias") or "norm" in name.rpartition(".")[0].rpartition(".")[2]
        assert (name in decaying) is not is_spared, name
        assert weight.dim() > 1 or is_spared or name.endswith("class_embedding"), name


def test_a_training_follows_it(tmp_path):
    """The rate warms up, falls by a cosine and ends at a tenth; layers are checkpointed; the loss falls."""
    torch.manual_seed(0)
    row = torch.randint(1, TEXT["vocab_size"], (9,))
    data = [{"input_ids": row, "labels": row}] * 8
    options = dict(use_cpu=True, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True)
    recipe = llama_recipe(tmp_path, max_steps=12, warmup_steps=4, learning_rate=4e-3, **options)
    trainer = Trainer(CAUSAL.make_small(), recipe, train_dataset=data)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    rates = [entry["learning_rate"] for entry in history]
    assert max(rates) == rates[4] == 4e-3 and rates[1] == pytest.approx(1e-3)
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)
    # The last step is one of eight before the cosine's end.
    assert rates[-1] == pytest.approx(4e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * 7 / 8)) / 2))
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_checkpointing_can_be_turned_off(name, tmp_path):
    assert not getattr(llama_recipe(tmp_path, use_cpu=True, **{name: False}), name)


def test_other_values_replace_the_recipes_own(tmp_path):
    own = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
    recipe = llama_recipe(tmp_path, use_cpu=True, lr_scheduler_type="linear", **own)
    assert not recipe.lr_scheduler_kwargs and recipe.activation_checkpointing
    assert recipe.activation_checkpointing_kwargs == {"use_reentrant": True}
    recipe = llama_recipe(tmp_path, use_cpu=True, lr_scheduler_kwargs={"min_lr_rate": 0.2})
    assert recipe.lr_scheduler_kwargs == {"min_lr_rate": 0.2}
