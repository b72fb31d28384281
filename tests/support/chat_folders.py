"""Write chat models with random weights, and the tokenizer and template of the trained model examples/llamoe-tiny.

`ABOUT_TWO` and `ABOUT_THREE` are the answers that the trained model gives about pictures of the repository.
"""

import torch
from peft import get_peft_model
from support.models import DENSE, draw
from support.paths import EXAMPLES, TINY
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import llamoe

TWO, THREE = (EXAMPLES / "pictures" / name for name in ("two_shapes.png", "three_shapes.png"))
QUESTION = "What is in the picture?"
ABOUT_TWO = "a red circle on the left and a blue square on the right."
ABOUT_THREE = "a green triangle on the left, a yellow star in the middle and a purple circle on the right."

# Without an end-of-text token a model generates until the limit.
ENDLESS = dict(bos_token_id=None, eos_token_id=None)


def write_llama(folder, **sizes):
    """Write a stock LLaMA whose answers have no end; return the folder."""
    return _write(folder, LlamaForCausalLM, LlamaConfig, sizes)


def write_mixtral(folder, **sizes):
    """Write a stock Mixtral whose answers have no end; return the folder."""
    return _write(
        folder, MixtralForCausalLM, MixtralConfig, {"num_local_experts": 5, "sliding_window": None, **sizes}
    )


def _write(folder, model_class, config_class, sizes):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = draw(model_class, config_class(**DENSE | ENDLESS | {"vocab_size": len(tokenizer)} | sizes))
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_adapter(model_folder, folder):
    """Write a LoRA adapter of all layers and experts that changes a model's answers; return the folder."""
    with llamoe.adopt():
        model = AutoModelForCausalLM.from_pretrained(model_folder)
    adapted = get_peft_model(model, llamoe.lora_config(model, r=4))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    adapted.save_pretrained(folder)
    return folder
