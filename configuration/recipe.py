"""The training recipe of the LLaMA paper, as arguments of transformers' Trainer."""

from os import PathLike
from typing import TYPE_CHECKING, Any

from .decoder import DecoderConfig
from .multimodal import LlamoeConfig
from .parameter_count import count_parameters

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Two names of one argument of `TrainingArguments`: the current one, and the former one.
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def llama_recipe(
    output_dir: str | PathLike, config: DecoderConfig | LlamoeConfig | None = None, **options: Any
) -> "TrainingArguments":
    """Return Trainer's arguments for LLaMA's training recipe (Touvron et al. 2023, section 2.3).

    The recipe is AdamW with betas of 0.9 and 0.95, a weight decay of 0.1 on all weights except norms and biases, 2,000
    steps of warm-up and then a cosine that ends at a tenth of the learning rate, gradients clipped at a norm of 1,
    bfloat16, and activation checkpointing without reentrance. The paper's batches had 4 million tokens: choose
    `per_device_train_batch_size` and `gradient_accumulation_steps` for that.

    Args:
        output_dir: folder for checkpoints.
        config: configuration of the model. With 20 billion parameters or more the learning rate is 1.5e-4, else 3e-4.
        options: further arguments of `TrainingArguments`, or other values for those of the recipe.
    """
    from transformers import TrainingArguments

    size = count_parameters(config).total if config is not None else 0
    recipe: dict[str, Any] = {
        "learning_rate": 3e-4 if size < 20e9 else 1.5e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine_with_min_lr",
        "warmup_steps": 2000,
        "bf16": True,
    } | options
    if not any(name in options for name in _CHECKPOINTING):
        recipe["activation_checkpointing"] = True
        if not any(f"{name}_kwargs" in options for name in _CHECKPOINTING):
            recipe["activation_checkpointing_kwargs"] = {"use_reentrant": False}
    if "lr_scheduler_type" not in options:
        recipe.setdefault("lr_scheduler_kwargs", {"min_lr_rate": 0.1})
    return TrainingArguments(output_dir=str(output_dir), **recipe)
