"""Training by `Trainer` and by hand, compared with stock Llama and Llama 4: losses, gradients, hooks and autocast."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models import (
    MODELS,
    MULTIMODAL,
    assert_same_gradients,
    draw,
    loss_and_gradients,
    max_abs,
    rms,
    run,
)
from support.tables import in_turn
from transformers import Trainer, TrainingArguments

import llamoe

HEADS = [case for case in MODELS if case.is_head and case.stock_name]
DENSE, MIXTRAL, TEXT = HEADS[:3]
MIXTURES = [case for case in HEADS if case.has_experts]
ids = {"ids": lambda case: case.name}


def pair(case, **text):
    """Return our model and stock's with the same weights."""
    ours = case.make_small(**text)
    return ours, case.stock_of(ours)


def rows(case, count=8, length=19, seed=2):
    """Return examples with labels on different parts; without padding, to which stock Llama 4 gives other positions."""
    generator = torch.Generator().manual_seed(seed)
    inputs = case.inputs(padding=(0,) * 3, length=length)
    examples = []
    for number in range(count):
        tokens = torch.randint(3, 90, (length,), generator=generator)
        example = {"input_ids": tokens}
        if case.has_images:
            tokens[2:6] = 99
            example["pixel_values"] = inputs["pixel_values"][number % 3]
        labels = tokens.clone()
        labels[: 1 + 2 * number] = -100
        examples.append({**example, "labels": labels})
    return examples


def collate(examples):
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def trainer_of(model, folder, examples, **options):
    options = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "num_train_epochs": 1,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 11,
        **options,
    }
    arguments = TrainingArguments(output_dir=str(folder), **options)
    return Trainer(model, arguments, data_collator=collate, train_dataset=examples, eval_dataset=examples)


def losses_of(trainer, **options):
    trainer.train(**options)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# Trainer


@pytest.mark.parametrize(
    ("case", "is_adapted"),
    [(DENSE, False), (MULTIMODAL, False), (MIXTRAL, False), (MIXTRAL, True), (TEXT, True)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_resumed_training_equals_one_that_was_not_stopped(case, is_adapted, tmp_path):
    """The model that resumes begins with other weights, so all that it has comes from the checkpoint."""

    def make(seed):
        model = case.make_small(seed=0 if is_adapted else seed)
        torch.manual_seed(seed)
        return get_peft_model(model, llamoe.lora_config(model, r=2)) if is_adapted else model

    whole, resumed = make(0), make(5)
    losses = losses_of(trainer_of(whole, tmp_path, rows(case), save_strategy="steps", save_steps=2))
    trainer = trainer_of(resumed, tmp_path / "again", rows(case), save_strategy="steps", save_steps=2)
    assert losses_of(trainer, resume_from_checkpoint=str(tmp_path / "checkpoint-2")) == losses
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


@pytest.mark.parametrize("case", HEADS, **ids)
def test_label_smoothing_predicts_the_next_token(case, tmp_path):
    """Trainer shifts labels for class names that it knows; otherwise a model would learn to repeat its input."""
    model, examples = case.make_small(), rows(case, count=2)
    if case.has_experts:
        model.config.get_text_config().router_z_loss_coef = 0.3
    batch = collate(examples)
    labels = batch.pop("labels")[:, 1:]
    logits = run(model, **batch)[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten(), label_smoothing=0.2)
    trainer = trainer_of(model, tmp_path, examples, label_smoothing_factor=0.2)
    # Trainer computes the loss itself, without router losses.
    with pytest.warns(UserWarning, match="router_z_loss_coef") if case.has_experts else nullcontext():
        losses = losses_of(trainer)
    assert losses == [pytest.approx(expected.item(), rel=1e-4)]


@pytest.mark.parametrize("case", [DENSE, MIXTRAL, MULTIMODAL], **ids)
def test_evaluation_gives_logits_and_nothing_beside_them(case, tmp_path):
    """Trainer gathers logits alone; router logits, losses and image features are no predictions."""
    model, examples = case.make_small(), rows(case, count=8)
    config = model.config.get_text_config()
    if case.has_experts:
        config.output_router_logits = config.output_expert_load = True
    seen = []
    trainer = trainer_of(model, tmp_path, examples)
    trainer.compute_metrics = lambda results: (
        seen.append(results) or {"mean": float(results.predictions.mean())}
    )
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_mean"} <= set(metrics)
    shape = (8, 19, config.vocab_size)
    assert isinstance(seen[0].predictions, np.ndarray) and seen[0].predictions.shape == shape
    batch = collate(examples)
    labels = batch.pop("labels")
    assert np.array_equal(seen[0].label_ids, labels.numpy())
    assert max_abs(torch.from_numpy(seen[0].predictions), run(model, **batch)) < 1e-5


@pytest.mark.parametrize(
    ("case", "name"),
    [(MIXTRAL, MIXTRAL.name), (MULTIMODAL, MULTIMODAL.name), (TEXT, "LlamoeForSequenceClassification")],
    ids=lambda value: getattr(value, "name", value),
)
def test_router_losses_do_not_grow_with_pieces(case, name, tmp_path):
    """A batch in equal micro-batches has the router losses of the whole batch, not their sum over micro-batches."""
    example, losses = rows(case, count=1)[0], []
    router = dict(output_router_logits=True, router_aux_loss_coef=0.7, router_z_loss_coef=0.3)
    if "Sequence" in name:
        example["labels"] = torch.tensor(2)
        router["num_labels"] = 5
    for size, steps in ((4, 1), (1, 4)):
        model = draw(getattr(llamoe, name), case.make_config(**router))
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        losses += losses_of(trainer_of(model, tmp_path, [example] * 4, **options))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Hooks


@pytest.mark.parametrize(
    ("case", "reentrant"),
    in_turn([case for case in MODELS if case.is_head or not case.is_text], [True, False]),
    ids=lambda value: getattr(value, "name", value),
)
def test_frozen_layers_pass_gradients_on_to_an_adapter(case, reentrant):
    """With `enable_input_require_grads` adapters get gradients under reentrant checkpointing, too."""
    model, inputs = case.make_small().train(), case.inputs()
    model.add_adapter(LoraConfig(target_modules="all-linear", exclude_modules=[], init_lora_weights=False))
    expected = loss_and_gradients(model, inputs)
    assert len(expected[1]) > 10
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same_gradients(loss_and_gradients(model, inputs), expected, 1e-4)


# Mixed precision


def under_autocast(model, batch):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch)
    output.loss.backward()
    return output


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        (DENSE, None),
        *zip((*MIXTURES, MIXTRAL), ("llamoe", "eager", "grouped_mm", "batched_mm"), strict=True),
        (MIXTRAL, "grouped_mm"),
        (TEXT, "llamoe"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_bfloat16_autocast_errs_as_stock_does(case, implementation):
    """Errors under autocast, with float32 weights, are like stock's; tokens take all experts, so no choice can flip."""
    # `grouped_mm` needs multiples of 8 in bfloat16.
    sizes = {"intermediate_size": 56, "num_experts_per_tok": 5} if case.has_experts else {}
    ours, stock = pair(case, **sizes)
    if case.has_experts:
        ours.set_experts_implementation(implementation)
    batch = collate(rows(case, count=3, length=37))
    reference = ours(**batch).logits.detach()
    given = under_autocast(ours, batch)
    expected = under_autocast(stock, batch)
    assert given.logits.dtype == expected.logits.dtype == torch.bfloat16
    error, its_error = (rms(x.logits.float() - reference) for x in (given, expected))
    assert 0 < error <= 2 * its_error
    assert given.loss.item() == pytest.approx(ours(**batch).loss.item(), rel=2e-2)
    assert all(parameter.grad.dtype == torch.float32 for parameter in ours.parameters())
    gradients, theirs = (
        {name: p.grad.clone() for name, p in model.named_parameters()} for model in (ours, stock)
    )
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    _, exact = loss_and_gradients(ours, inputs, labels=batch["labels"])
    norm = sum(g.square().sum() for g in exact.values()).sqrt()
    errors = [
        sum((side[name] - exact[name]).square().sum() for name in exact).sqrt() / norm
        for side in (gradients, theirs)
    ]
    assert 0 < errors[0] <= 2 * errors[1] + 0.02, errors
