"""Train a dense model for three steps on random rows, and write the losses to a file.

python tests/support/train_in_rows.py FOLDER LOSSES.json, alone or by `accelerate launch` in several processes.
"""

import json
import sys

import torch
from transformers import Trainer, TrainingArguments

import llamoe

ROWS, LENGTH = 6, 32


def main():
    """Train, and let the first process write the losses."""
    folder, losses = sys.argv[1:]
    arguments = TrainingArguments(
        output_dir=f"{losses}-checkpoints",
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    model = llamoe.LlamoeDenseForCausalLM.from_pretrained(folder)
    rows = torch.randint(3, 90, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    # Under sequence parallelism the model needs explicit positions.
    positions = torch.arange(LENGTH)
    data = [{"input_ids": row, "labels": row, "position_ids": positions} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    if trainer.is_world_process_zero():
        with open(losses, "w") as file:
            json.dump([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], file)


if __name__ == "__main__":
    main()
