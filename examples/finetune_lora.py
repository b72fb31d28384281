"""Teach a model by LoRA: a folder of questions and answers in, about pictures or not, an adapter out.

    python examples/finetune_lora.py
    accelerate launch --num_processes 2 examples/finetune_lora.py      # on several devices

`data.jsonl` in the folder has an example in each line, {"image": "cat.png", "question": "...", "answer": "..."},
without "image" where there is no picture. The last tenth is held out. The same command goes on after a stop.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import get_peft_model

import llamoe

MODEL = str(Path(__file__).with_name("llamoe-tiny"))
# `python examples/tiny/lessons.py lesson` draws this one.
DATA = Path("lesson")
OUT = Path("finetuned")
RANK = 8
TRAINING = dict(
    num_train_epochs=4, per_device_train_batch_size=32, learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=20,
    logging_steps=10, save_steps=100, use_cpu=not torch.accelerator.is_available(), report_to=[],
)  # fmt: skip


def load(folder: str) -> tuple[Any, Any]:
    """The model, and its processor; for a model without a tower its tokenizer."""
    # Folders of transformers' own LLaMA, Mistral, Mixtral and Llama 4 are read as llamoe's models.
    with llamoe.adopt():
        if getattr(transformers.AutoConfig.from_pretrained(folder), "vision_config", None):
            auto_class, reader = transformers.AutoModelForImageTextToText, transformers.AutoProcessor
        else:
            auto_class, reader = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
        return auto_class.from_pretrained(folder, dtype=torch.float32), reader.from_pretrained(folder)


def read(folder: Path) -> tuple[list[dict], list[dict]]:
    """The examples that are learnt, and those that are held out."""
    lines = (folder / "data.jsonl").read_text().rstrip("\n").split("\n")
    examples = [{**example, "folder": folder} for example in map(json.loads, lines)]
    return examples[: -max(1, len(examples) // 10)], examples[-max(1, len(examples) // 10) :]


def encode(processor: Any, examples: list[dict], answers: list[str], padding_side: str = "right") -> Any:
    """Tokens and pixels of the questions in the model's own chat template, with answers behind them."""
    # LLaMA 1 and 2 have no token for padding, which is masked out.
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts, pictures = [], []
    for example, answer in zip(examples, answers, strict=True):
        content: Any = example["question"]
        pictures.append(
            [llamoe.read_picture(example["folder"] / example["image"])] if "image" in example else []
        )
        if pictures[-1]:
            content = [{"type": "image"}, {"type": "text", "text": content}]
        chat = [{"role": "user", "content": content}]
        texts.append(processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) + answer)
    # The template has written the first token already.
    options = dict(padding=True, padding_side=padding_side, add_special_tokens=False, return_tensors="pt")
    return processor(text=texts, **options, **({"images": pictures} if any(pictures) else {}))


def collate(processor: Any, examples: list[dict]) -> dict[str, torch.Tensor]:
    """A batch in which only answers and their end carry a loss."""
    end = getattr(processor, "tokenizer", processor).eos_token
    batch = encode(processor, examples, [example["answer"] + end for example in examples])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, example in zip(labels, examples, strict=True):
        row[: encode(processor, [example], [""])["input_ids"].shape[1]] = -100
    return {**batch, "labels": labels}


@torch.inference_mode()
def count_right(model: Any, processor: Any, examples: list[dict]) -> str:
    """For each "kind" of question the share of answers that are given word by word."""
    right = defaultdict(list)
    for start in range(0, len(examples), 32):
        batch = examples[start : start + 32]
        inputs = encode(processor, batch, [""] * len(batch), "left").to(model.device)
        ids = model.eval().generate(**inputs, max_new_tokens=64, do_sample=False)
        texts = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for example, text in zip(batch, texts, strict=True):
            right[example.get("kind", "answers")].append(text.strip() == example["answer"].strip())
    return ", ".join(f"{sum(each) / len(each):.1%} of {len(each)} {kind}" for kind, each in right.items())


def train(model: Any, processor: Any, examples: list[dict], out: Path) -> transformers.Trainer:
    """Train what may learn, from the last whole checkpoint if there is one."""
    arguments = transformers.TrainingArguments(str(out), remove_unused_columns=False, **TRAINING)
    trainer = transformers.Trainer(model, arguments, lambda rows: collate(processor, rows), examples)
    # Trainer writes this file last.
    whole = sorted(out.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    trainer.train(resume_from_checkpoint=str(whole[-1].parent) if whole else None)
    return trainer


def main() -> None:
    """Train, and print what the adapter changed."""
    transformers.set_seed(0)
    learnt, held_out = read(DATA)
    model, processor = load(MODEL)
    model = get_peft_model(model, llamoe.lora_config(model, r=RANK))
    model.print_trainable_parameters()
    print("held-out answers right before:", count_right(model, processor, held_out))
    trainer = train(model, processor, learnt, OUT / "checkpoints")
    trainer.save_model(str(OUT / "adapter"))
    # Processes may have a part of the weights each.
    if trainer.accelerator.num_processes == 1:
        print("now:", count_right(model, processor, held_out))


if __name__ == "__main__":
    main()
