"""Train a LoRA adapter on a folder of questions and answers, with or without pictures.

    python examples/finetune_lora.py
    accelerate launch --num_processes 2 examples/finetune_lora.py      # on several devices

`question_folder.py` describes the folder. If training was stopped, the same command continues it.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import get_peft_model
from question_folder import collate, count_right, read

import llamoe

MODEL = str(Path(__file__).with_name("llamoe-tiny"))
# `python examples/tiny/lessons.py lesson` writes this folder.
DATA = Path("lesson")
OUT = Path("finetuned")
RANK = 8
TRAINING = dict(
    num_train_epochs=4, per_device_train_batch_size=32, learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=20,
    logging_steps=10, save_steps=100, use_cpu=not torch.accelerator.is_available(), report_to=[],
)  # fmt: skip


def load(folder: str) -> tuple[Any, Any]:
    """Return a folder's model and its processor, or its tokenizer if the model has no vision tower."""
    # Folders of transformers' own LLaMA, Mistral, Mixtral and Llama 4 are read as llamoe's models.
    with llamoe.adopt():
        if getattr(transformers.AutoConfig.from_pretrained(folder), "vision_config", None):
            auto_class, reader = transformers.AutoModelForImageTextToText, transformers.AutoProcessor
        else:
            auto_class, reader = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
        return auto_class.from_pretrained(folder, dtype=torch.float32), reader.from_pretrained(folder)


def train(model: Any, processor: Any, examples: list[dict], out: Path) -> transformers.Trainer:
    """Train the unfrozen parameters, from the last complete checkpoint if there is one."""
    arguments = transformers.TrainingArguments(str(out), remove_unused_columns=False, **TRAINING)
    trainer = transformers.Trainer(model, arguments, lambda rows: collate(processor, rows), examples)
    # Trainer writes this file last, so that checkpoints with it are complete.
    whole = sorted(out.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    trainer.train(resume_from_checkpoint=str(whole[-1].parent) if whole else None)
    return trainer


def main() -> None:
    """Train, and print right answers before and after."""
    transformers.set_seed(0)
    learnt, held_out = read(DATA)
    model, processor = load(MODEL)
    model = get_peft_model(model, llamoe.lora_config(model, r=RANK))
    model.print_trainable_parameters()
    print("held-out answers right before:", count_right(model, processor, held_out))
    trainer = train(model, processor, learnt, OUT / "checkpoints")
    trainer.save_model(str(OUT / "adapter"))
    # With several processes each may hold only a part of the weights.
    if trainer.accelerator.num_processes == 1:
        print("now:", count_right(model, processor, held_out))


if __name__ == "__main__":
    main()
