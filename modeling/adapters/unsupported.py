"""Error messages for what adapters cannot do on experts, and on packed or offloaded weights."""

_REASONS = {
    "adapter_names": "one adapter for each row works only for linear layers, and for rows without pictures: run the "
    "rows of each adapter in a batch of their own (set_adapter)",
    "combination_type": "adapters of experts' stacks can be summed only if all change the same stacks, and by "
    '"linear" or another type that sums factors element by element',
    "hotswap": "factors of experts' stacks can be swapped only for factors of the same rank and layout: load the "
    "adapter under another name, and choose it by set_adapter()",
    "init_lora_weights": "for experts and packed weights it must be True, False or "
    '"gaussian"; all others compute from the values of the weights',
    "merge": "packed or offloaded weights cannot be changed: save the adapter alone, or merge it into the 16-bit model "
    "in memory, for a packed one PeftModel.from_pretrained(model.dequantize(), adapter)",
    "method": "packed weights can be adapted only by LoRA, since other methods compute from the values of weights: "
    "choose LoraConfig, or call model.dequantize() first",
    "shared": "LoRA on experts needs whole experts in each process, and the same batch in all (tp_size = ep_size, no "
    "other size above 1): load the model so, or leave experts out, llamoe.lora_config(model, experts=False)",
    "square": "for a stack with as many inputs as outputs, a saved adapter does not show whether it was trained on "
    "transformers' Llama 4, where lora_A and lora_B are exchanged: adapt both stacks, gate_up_proj and down_proj",
    "target_modules": "the module of experts is no linear layer: name its stacks in target_parameters, "
    '["experts.gate_up_proj", "experts.down_proj"]',
    "target_parameters": "name a packed linear layer in target_modules instead",
    "variant": "this kind of LoRA works only for linear layers of 16 or 32 bits: leave it out, or adapt experts and "
    "packed layers by a second adapter",
}


def unsupported(what: str, asked: str) -> ValueError:
    """Return the error for an unsupported request.

    Args:
        what: the key of the reason.
        asked: the request, and the part of the model to which it applies.
    """
    return ValueError(f"{asked}: {_REASONS[what]}.")
