"""Small models whose layers are large enough for compiled kernels, and single tokens through them."""

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

import llamoe
from llamoe.modeling.kernels import cpp_kernels

from .models import draw, mixtral_config, text_config

# Layers large enough for the kernels; sizes that differ, and heads of which one has no whole vector.
SIZES = dict(
    vocab_size=101, hidden_size=192, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3
)


def dense(**fields):
    config = llamoe.LlamoeDenseConfig(**{**SIZES, "intermediate_size": 320, "head_dim": 72, **fields})
    return draw(llamoe.LlamoeDenseForCausalLM, config)


def text(**fields):
    sizes = dict(SIZES, num_hidden_layers=4, intermediate_size=176, intermediate_size_mlp=336, head_dim=80)
    config = text_config(**{**sizes, "num_local_experts": 5, "attention_chunk_size": 64, **fields})
    return draw(llamoe.LlamoeForCausalLM, config)


def mixtral(**fields):
    sizes = dict(SIZES, intermediate_size=176, head_dim=80, num_local_experts=5)
    return draw(llamoe.LlamoeMixtralForCausalLM, mixtral_config(**{**sizes, **fields}))


def ids(length=15):
    return torch.randint(3, 101, (1, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def steps(model, tokens=None, first=5, cache=None, **kwargs):
    """Logits of single tokens after the first ones, which are in `cache` if one is given."""
    tokens = ids() if tokens is None else tokens
    cache = cache or model(tokens[:, :first], use_cache=True).past_key_values
    found = [
        model(tokens[:, i : i + 1], past_key_values=cache, **kwargs).logits
        for i in range(first, tokens.shape[1])
    ]
    return torch.cat(found, 1)


def by_modules(model, monkeypatch, *args, **kwargs):
    with monkeypatch.context() as patched:
        patched.setattr(cpp_kernels, "_library", None)
        return steps(model, *args, **kwargs)


STOCK = {
    dense: transformers.LlamaForCausalLM,
    text: transformers.Llama4ForCausalLM,
    mixtral: transformers.MixtralForCausalLM,
}
"""transformers' class of each family."""
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def adapt(model, name="default", seed=0, autocast_adapter_dtype=True, **fields):
    """A model with one more adapter on all of its layers and experts, and numbers that show."""
    has_experts = any(hasattr(module, "num_experts") for module in model.modules())
    config = LoraConfig(target_modules=LAYERS, target_parameters=STACKS if has_experts else None, **fields)
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
    else:
        model = get_peft_model(model, config, name, autocast_adapter_dtype=autocast_adapter_dtype)
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        if "lora_" in path and f".{name}." in path:
            parameter.data.normal_(generator=generator).mul_(0.07)
    return model.eval()
