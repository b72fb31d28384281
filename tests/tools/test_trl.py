"""Test training of our models by TRL: on texts and pictures, by answers, preferences and rewards.

If TRL can train transformers' class of the same weights, losses and gradients must be equal. TRL calls a model's base
and head separately; it does not find the base of transformers' Llama 4.
"""

import importlib.util
import math

import pytest
import torch
from safetensors.torch import load_file
from support.models import draw, stock_dense_config, stock_mixtral_config, stock_text_config
from support.paths import EXAMPLES, TINY
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
)

import llamoe
from llamoe.modeling.moe.layer import Router
from llamoe.modeling.moe.losses import load_balancing_loss

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl"
    ),
    pytest.mark.slow,
]

# Number of tokens of the small model's tokenizer.
VOCABULARY = 784
MODELS = {
    "dense": (llamoe.LlamoeDenseForCausalLM, stock_dense_config(vocab_size=VOCABULARY)),
    "mixtral": (llamoe.LlamoeMixtralForCausalLM, stock_mixtral_config(vocab_size=VOCABULARY)),
    "llama4": (llamoe.LlamoeForCausalLM, stock_text_config(vocab_size=VOCABULARY)),
}
TEXTS = ["a red circle on the left.", "there are three shapes.", "a blue square.", "i do not see a star."]
QUESTIONS = {
    "two_shapes.png": ("What is in the picture?", "a red circle on the left and a blue square on the right."),
    "three_shapes.png": ("How many shapes are there?", "there are three shapes."),
}
# Answers that the model does not give yet, so that it can learn.
LESSON = "the picture is nice."


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(TINY)


@pytest.fixture
def options(tmp_path):
    """Return options that all of TRL's trainers have, for a few steps in float32 on a CPU."""
    return dict(
        output_dir=str(tmp_path / "run"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_steps=3,
        per_device_train_batch_size=2,
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        disable_tqdm=True,
    )


def tiny_model():
    return AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32)


def both_classes(name, folder, auto_class=AutoModelForCausalLM):
    """Load the same weights in our class and in transformers', each from its own folder."""
    model_class, config = MODELS[name]
    kwargs = {}
    if auto_class is AutoModelForSequenceClassification:
        kwargs["num_labels"] = 1
        model_class = getattr(llamoe, model_class.__name__.replace("CausalLM", "SequenceClassification"))
    ours = draw(model_class, llamoe.from_stock(type(config)(**{**config.to_dict(), **kwargs})))
    for layout in ("llamoe", "stock"):
        ours.save_pretrained(folder / layout, layout=layout)
    ours, stock = (auto_class.from_pretrained(folder / layout) for layout in ("llamoe", "stock"))
    assert type(stock).__module__.startswith("transformers.") and type(ours) is model_class
    return ours, stock


def dataset(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


def turn(role, text):
    return [{"role": role, "content": text}]


def picture_rows(make_row):
    """Build a training row for each picture, with its question and its answer."""
    rows = []
    for name, (question, answer) in QUESTIONS.items():
        picture = llamoe.read_picture(EXAMPLES / "pictures" / name)
        rows.append({"images": [picture], **make_row(question, answer)})
    return dataset(rows)


def prompts_and_completions(lesson=None):
    return picture_rows(
        lambda question, answer: {
            "prompt": turn("user", question),
            "completion": turn("assistant", lesson or answer),
        }
    )


def train(trainer):
    """Train; return the trainer's log of each step, and check that losses are finite."""
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    assert len(log) == trainer.args.max_steps
    assert all(torch.tensor([line["loss"], line["grad_norm"]]).isfinite().all() for line in log)
    return log


def changed(before, model):
    """Return the names of the parameters that have changed."""
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check_same_training(mine, its):
    """Compare losses and gradients of each step; only in the first are weights exactly equal."""
    for step, (a, b) in enumerate(zip(mine, its, strict=True)):
        tolerance = 1e-5 if step == 0 else 1e-4
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=10 * tolerance)
        assert a.get("aux_loss", 0.0) == pytest.approx(b.get("aux_loss", 0.0), rel=tolerance)


@torch.no_grad()
def balancing_loss(model, batch):
    """Return the load-balancing loss over the tokens of all mixture layers together, as TRL computes it."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, output_router_logits=True).router_logits
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return load_balancing_loss(logits, routers, batch["attention_mask"], is_pooled=True).item()


def sft(model, data, processing_class, options, peft_config=None, **more):
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(**{**options, **more}),
        train_dataset=data,
        processing_class=processing_class,
        peft_config=peft_config,
    )


def dpo(model, data, processing_class, options, **more):
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**{**options, **more})
    return DPOTrainer(model=model, args=args, train_dataset=data, processing_class=processing_class)


@pytest.mark.parametrize("name", ["dense", "mixtral"])
def test_sft_on_texts_is_that_of_stocks_class(name, tmp_path, tokenizer, options):
    data = dataset([{"text": text} for text in TEXTS])
    mine, its = (train(sft(model, data, tokenizer, options)) for model in both_classes(name, tmp_path))
    check_same_training(mine, its)
    assert ("aux_loss" in mine[0]) == (name == "mixtral")


def test_sft_of_experts_on_disk_is_that_of_experts_in_memory(tmp_path, tokenizer, options):
    """LoRA on attention and on all experts, whose weights are read from disk when needed."""
    model_class, config = MODELS["mixtral"]
    draw(model_class, llamoe.from_stock(config)).save_pretrained(tmp_path / "base")
    data = dataset([{"text": text} for text in TEXTS])
    logs, trained = [], []
    for more in ({}, {"experts_memory": "100KB"}):
        model = model_class.from_pretrained(tmp_path / "base", **more)
        torch.manual_seed(3)
        config = llamoe.lora_config(model, r=2, dropout=0.1)
        trainer = sft(model, data, tokenizer, options, config, gradient_accumulation_steps=2)
        logs.append([(line["loss"], line["grad_norm"]) for line in train(trainer)])
        trained.append({name: p for name, p in trainer.model.named_parameters() if p.requires_grad})
    assert logs[0] == logs[1]
    assert all(torch.equal(tensor, trained[1][name]) for name, tensor in trained[0].items())


def test_sft_of_llama_4_has_stocks_loss(tmp_path, tokenizer, options):
    """By default TRL adds Mixtral's load-balancing loss with the configuration's coefficient."""
    ours, stock = both_classes("llama4", tmp_path)
    data = dataset([{"text": text} for text in TEXTS[:2]])
    before = weights(ours)
    trainer = sft(ours, data, tokenizer, options, router_aux_loss_coef=0.0)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        expected = stock(**batch).loss.item()
    log = train(trainer)
    assert log[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert log[-1]["loss"] < log[0]["loss"] - 0.1
    assert "aux_loss" not in log[0]
    assert changed(before, ours) == set(before)

    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "llamoe")
    # TRL computes none of llamoe's own losses.
    ours.config.router_z_loss_coef = 1.0
    balance = balancing_loss(ours, batch)
    first = train(sft(ours, data, tokenizer, options))[0]
    assert first["aux_loss"] == pytest.approx(balance, rel=1e-5)
    assert ours.config.router_aux_loss_coef > 0
    assert first["loss"] == pytest.approx(expected + ours.config.router_aux_loss_coef * balance, rel=1e-5)


def test_packed_texts_do_not_see_each_other(tokenizer, options):
    """Texts are separated by their position ids, without flash attention, too."""
    model_class, config = MODELS["llama4"]
    model = draw(model_class, llamoe.from_stock(config))
    data = dataset([{"text": text} for text in TEXTS])
    packed = sft(model, data, tokenizer, options, packing=True, max_length=64, router_aux_loss_coef=0.0)
    batch = next(iter(packed.get_train_dataloader()))
    assert "attention_mask" not in batch and (batch["position_ids"] == 0).sum() == len(TEXTS)
    with torch.no_grad():
        together = model(**batch, fused_lm_head=True)
        alone = []
        for text in TEXTS:
            ids = tokenizer(text + tokenizer.eos_token, return_tensors="pt")["input_ids"]
            logits = model(input_ids=ids).logits[0, :-1]
            alone.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    given = together.log_probs[together.label_mask]
    assert given.sort().values == pytest.approx(torch.cat(alone).sort().values, abs=1e-4)


@pytest.mark.parametrize("name", ["dense", "mixtral", "llama4"])
def test_preferences_between_texts(name, tmp_path, tokenizer, options):
    """DPO loads its reference model from the folder, in the class that config.json names."""
    ours, stock = both_classes(name, tmp_path)
    rows = [{"prompt": "what? ", "chosen": text, "rejected": "no."} for text in TEXTS[:2]]
    data = dataset(rows)
    trainer = dpo(ours, data, tokenizer, options)
    assert type(trainer.ref_model) is type(ours)
    mine = train(trainer)
    # Before the first step DPO's loss is log 2; the rest is the load-balancing loss.
    balance = getattr(ours.config, "router_aux_loss_coef", 0.0) * mine[0].get("aux_loss", 0.0)
    assert mine[0]["loss"] == pytest.approx(math.log(2) + balance, rel=1e-5)
    assert mine[-1]["loss"] < mine[0]["loss"] - 0.05
    assert mine[-1]["rewards/margins"] > mine[0]["rewards/margins"]
    if name != "llama4":
        check_same_training(mine, train(dpo(stock, data, tokenizer, options)))


@pytest.mark.parametrize("name", ["dense", "mixtral", "llama4"])
def test_rewards_are_learnt_from_preferences(name, tmp_path, tokenizer, options):
    from trl import RewardConfig, RewardTrainer

    data = dataset([{"chosen": text, "rejected": "no."} for text in TEXTS[:2]])
    if name == "llama4":
        config = llamoe.from_stock(MODELS[name][1])
        config.num_labels = 1
        models = [draw(llamoe.LlamoeForSequenceClassification, config)]
    else:
        models = both_classes(name, tmp_path, AutoModelForSequenceClassification)
    logs = []
    for model in models:
        args = RewardConfig(**options)
        trainer = RewardTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
        logs.append(train(trainer))
    models[0].save_pretrained(tmp_path / "learnt")
    learnt = AutoModelForSequenceClassification.from_pretrained(tmp_path / "learnt")
    assert type(learnt) is type(models[0]) and not changed(weights(models[0]), learnt)
    assert logs[0][-1]["loss"] < logs[0][0]["loss"]
    assert logs[0][-1]["margin"] > logs[0][0]["margin"]
    if len(logs) == 2:
        check_same_training(*logs)


COLUMNS = {
    "prompt and completion": (
        lambda q, a: {"prompt": turn("user", q), "completion": turn("assistant", a)},
        {},
    ),
    "messages, answers only": (
        lambda q, a: {"messages": turn("user", q) + turn("assistant", a)},
        {"assistant_only_loss": True},
    ),
    "messages": (lambda q, a: {"messages": turn("user", q) + turn("assistant", a)}, {}),
    "prompt and completion, all": (
        lambda q, a: {"prompt": turn("user", q), "completion": turn("assistant", a)},
        {"completion_only_loss": False},
    ),
    "text in columns without a chat": (lambda q, a: {"prompt": f"<|image|>{q}", "completion": a}, {}),
}
"""For each row of the table: how columns are made of a question and its answer, and options of `SFTConfig`."""


@pytest.mark.parametrize("columns", COLUMNS)
def test_what_is_in_the_loss(columns, processor, options):
    """Check the table in docs/evaluation.md of the terms in each trainer's loss."""
    make_row, more = COLUMNS[columns]
    trainer = sft(tiny_model(), picture_rows(make_row), processor, options, max_length=None, **more)
    batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    patch = trainer.model.config.image_token_id
    ids, labels = batch["input_ids"], batch["labels"]
    assert (ids == patch).sum() == 2 * trainer.model.config.vision_config.tokens_per_tile
    learnt = [processor.decode(row[mask]) for row, mask in zip(ids, labels != -100, strict=True)]
    answers = [answer for _, answer in QUESTIONS.values()]
    if columns == "text in columns without a chat":
        # The end of an answer is not trained either, since TRL adds no end token.
        assert learnt == answers
    elif columns in ("messages", "prompt and completion, all"):
        whole = [
            processor.decode(row[mask]) for row, mask in zip(ids, batch["attention_mask"].bool(), strict=True)
        ]
        assert learnt == whole and (labels == patch).sum() == (ids == patch).sum()
    else:
        assert learnt == [f"{answer}<|eot|>" for answer in answers]
    if columns not in ("messages", "prompt and completion, all"):
        assert not (labels == patch).any()

    # Ignored labels change nothing: the loss is that of the other labels, computed from the model's own logits.
    text_config = trainer.model.config.text_config
    balance = text_config.router_aux_loss_coef * balancing_loss(trainer.model, batch)
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "pixel_values")}
        logits = trainer.model(**inputs).logits[:, :-1].transpose(1, 2)
        loss = trainer.compute_loss(trainer.model, batch).item()
    nll = torch.nn.functional.cross_entropy(logits, labels[:, 1:], ignore_index=-100).item()
    assert loss == pytest.approx(nll + balance, rel=1e-5, abs=1e-6)


def test_sft_with_pictures_learns_and_is_saved(tmp_path, processor, options):
    """TRL's defaults include gradient checkpointing; the saved model gives the trained answers."""
    data = prompts_and_completions(LESSON)
    trainer = sft(tiny_model(), data, processor, options, max_length=None, max_steps=25)
    assert trainer.args.gradient_checkpointing
    before = weights(trainer.model)
    log = train(trainer)
    assert log[-1]["loss"] < 0.5 * log[0]["loss"]
    names = changed(before, trainer.model)
    parts = ("feed_forward.experts.gate_up_proj", "router", "vision_model", "multi_modal_projector")
    assert all(any(part in name for name in names) for part in parts)
    trainer.save_model(tmp_path / "saved")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert type(model) is llamoe.LlamoeForConditionalGeneration
    assert model.config.text_config.output_router_logits
    state = trainer.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    picture = {"type": "image", "path": str(EXAMPLES / "pictures/two_shapes.png")}
    question = {"type": "text", "text": QUESTIONS["two_shapes.png"][0]}
    chat = [{"role": "user", "content": [picture, question]}]
    saved = AutoProcessor.from_pretrained(tmp_path / "saved")
    inputs = saved.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    given = model.eval().generate(**inputs, max_new_tokens=12, do_sample=False)
    assert saved.decode(given[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) == LESSON


def test_an_adapter_is_trained_by_its_folders_name(tmp_path, options):
    """TRL makes model, processor and adapter itself."""
    from peft import PeftModel

    config = llamoe.lora_config(tiny_model(), r=4)
    trainer = sft(
        str(TINY), prompts_and_completions(LESSON), None, options, config, max_length=None, max_steps=4
    )
    assert type(trainer.model.get_base_model()) is llamoe.LlamoeForConditionalGeneration
    log = train(trainer)
    assert log[-1]["loss"] < log[0]["loss"]
    trainer.save_model(tmp_path / "adapter")
    learnt = load_file(tmp_path / "adapter/adapter_model.safetensors")
    experts = [
        tensor for name, tensor in learnt.items() if "feed_forward.experts" in name and "lora_B" in name
    ]
    assert experts and all(tensor.abs().max() > 0 for tensor in experts)
    opened = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    with torch.no_grad():
        ours, its = (model.eval()(**batch).logits for model in (opened, trainer.model))
    assert torch.equal(ours, its)


def test_a_cut_through_a_picture_is_refused(processor, options):
    """TRL gives this message only if our error is of the type that it catches."""
    trainer = sft(tiny_model(), prompts_and_completions(), processor, options, max_length=12)
    with pytest.raises(ValueError, match=r"max_length` \(12\) is too short"):
        trainer.train()


def test_grpo_rewards_answers_about_pictures(processor, options):
    """Sampled answers get rewards from a function here, and better answers become more likely."""
    from trl import GRPOConfig, GRPOTrainer

    seen = []

    def few_letters(completions, answer, **_):
        texts = [completion[0]["content"] for completion in completions]
        seen.extend(zip(texts, answer, strict=True))
        return [-float(len(text)) for text in texts]

    data = picture_rows(lambda question, answer: {"prompt": turn("user", question), "answer": answer})
    args = GRPOConfig(
        **{**options, "per_device_train_batch_size": 4, "learning_rate": 1e-4, "max_steps": 2},
        num_generations=4,
        max_completion_length=16,
        temperature=2.0,
    )
    trainer = GRPOTrainer(
        model=tiny_model(),
        args=args,
        train_dataset=data,
        processing_class=processor,
        reward_funcs=few_letters,
    )
    before = weights(trainer.model)
    log = train(trainer)
    assert len(seen) == 8 and len({text for text, _ in seen}) > 2
    assert "<|patch|>" not in "".join(text for text, _ in seen)
    assert any(line["reward_std"] > 0 for line in log)
    names = changed(before, trainer.model)
    assert any("experts" in name for name in names) and any("vision_model" in name for name in names)
