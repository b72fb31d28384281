"""Error messages for what adapters do not support on experts and on packed or offloaded weights."""

_REASONS = {
    "adapter_names": "a batch with an adapter for each row is for linear layers and texts alone: run the rows of each "
    "adapter by themselves (set_adapter)",
    "combination_type": "adapters that change experts' stacks are summed if all change the same ones, by "
    '"linear" and other types that join factors number by number',
    "hotswap": "factors of experts' stacks are swapped for those of the same rank and layout alone: load the adapter "
    "under a name of its own, and choose it by set_adapter()",
    "init_lora_weights": "LoRA on experts and packed weights begins with True, False or "
    '"gaussian"; others compute from the numbers of a matrix',
    "merge": "weights that are packed or offloaded cannot be changed: merge into the model of 16 bits in memory, of a "
    "packed one by PeftModel.from_pretrained(model.dequantize(), adapter), or save the adapter alone",
    "method": "packed weights are adapted by LoRA alone, since other methods compute from their codes: choose "
    "LoraConfig, or call model.dequantize() first",
    "shared": "LoRA on experts needs whole experts in each process, and one batch for all (tp_size = ep_size, no "
    "more): load the model so, or leave the experts out, llamoe.lora_config(model, experts=False)",
    "square": "a stack with as many inputs as outputs does not tell in a file whether it was trained on transformers' "
    "Llama 4, which exchanges lora_A and lora_B, or on llamoe: adapt both stacks, gate_up_proj and down_proj",
    "target_modules": "the experts' module is no linear layer: name its stacks in target_parameters, "
    '["experts.gate_up_proj", "experts.down_proj"]',
    "target_parameters": "a packed linear layer is adapted by target_modules",
    "variant": "this kind of LoRA is for linear layers of 16 or 32 bits alone: leave it out, or give "
    "experts and packed layers an adapter of their own",
}


def unsupported(what: str, asked: str) -> ValueError:
    """Return the error for an unsupported request.

    Args:
        what: a key of the table.
        asked: the request, and the part of the model that it is for.
    """
    return ValueError(f"{asked}: {_REASONS[what]}.")
