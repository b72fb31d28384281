"""Read a folder of questions and answers, with or without pictures, make batches, and count right answers.

`data.jsonl` in the folder has an example in each line, {"image": "cat.png", "question": "...", "answer": "..."};
examples without a picture have no "image". The last tenth is held out.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import llamoe


def read(folder: Path) -> tuple[list[dict], list[dict]]:
    """Return the training examples and the held-out ones."""
    lines = (folder / "data.jsonl").read_text().rstrip("\n").split("\n")
    examples = [{**example, "folder": folder} for example in map(json.loads, lines)]
    return examples[: -max(1, len(examples) // 10)], examples[-max(1, len(examples) // 10) :]


def encode(processor: Any, examples: list[dict], answers: list[str], padding_side: str = "right") -> Any:
    """Return tokens and pixels of the questions in the model's chat template, each followed by its answer."""
    # LLaMA 1 and 2 have no padding token. Any token will do, as padding is masked out.
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
    # No special tokens: the chat template has written them.
    options = dict(padding=True, padding_side=padding_side, add_special_tokens=False, return_tensors="pt")
    return processor(text=texts, **options, **({"images": pictures} if any(pictures) else {}))


def collate(processor: Any, examples: list[dict]) -> dict[str, torch.Tensor]:
    """Make a batch in which only answers and their end token have a loss."""
    end = getattr(processor, "tokenizer", processor).eos_token
    batch = encode(processor, examples, [example["answer"] + end for example in examples])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, example in zip(labels, examples, strict=True):
        row[: encode(processor, [example], [""])["input_ids"].shape[1]] = -100
    return {**batch, "labels": labels}


@torch.inference_mode()
def count_right(model: Any, processor: Any, examples: list[dict]) -> str:
    """Return the share of exact answers for each "kind" of question, as a sentence."""
    right = defaultdict(list)
    for start in range(0, len(examples), 32):
        batch = examples[start : start + 32]
        inputs = encode(processor, batch, [""] * len(batch), "left").to(model.device)
        ids = model.eval().generate(**inputs, max_new_tokens=64, do_sample=False)
        texts = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for example, text in zip(batch, texts, strict=True):
            right[example.get("kind", "answers")].append(text.strip() == example["answer"].strip())
    return ", ".join(f"{sum(equal) / len(equal):.1%} of {len(equal)} {kind}" for kind, equal in right.items())
