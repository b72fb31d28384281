"""Train an adapter on offloaded experts with the Trainer; one run is killed, to be compared with whole runs."""

import os

import peft
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import llamoe

from .offload import load_both

RUN = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 1e-2,
    "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 2, "report_to": [], "use_cpu": True,
    "disable_tqdm": True, "seed": 1,
}  # fmt: skip


def trainer_of(model, folder, callback=None, rank=3, **options) -> Trainer:
    """Return a Trainer of a new adapter on fixed random rows; `options` replace those of `RUN`."""
    torch.manual_seed(3)
    rows = torch.randint(3, 199, (8, 23), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in rows]
    adapted = peft.get_peft_model(model, llamoe.lora_config(model, r=rank, dropout=0.1))
    callbacks = [] if callback is None else [callback]
    arguments = TrainingArguments(str(folder), **RUN | options)
    return Trainer(adapted, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


class Killed(TrainerCallback):
    """Kills the process in the third step, as `kill -9` does."""

    def on_substep_end(self, args, state, control, **_):
        if state.global_step == 2:
            os.kill(os.getpid(), 9)


def train_until_killed(folder: str, into: str) -> None:
    """Train the offloaded model of a folder until it is killed; needs a process of its own."""
    trainer_of(load_both(folder, 2)[1], into, Killed()).train()
