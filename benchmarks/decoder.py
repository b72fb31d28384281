"""Measure decoders at the sizes of 7B models: a token behind a cache, and a prompt, in each format.

Three layers of Mistral 7B, and two of Mixtral with four experts, with embedding and head, of random weights. Formats
compute different functions, so that outputs are compared between ours and stock's in float32 and bfloat16 alone.
"""

from collections.abc import Callable, Iterator

import torch
from transformers import (
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

import llamoe

from .harness import OURS, STOCK, Case
from .random_models import build
from .weights import Setting

BEHIND, PROMPTS, STEPS = (64, 2048), (128, 512), 4


def sizes_of_7b() -> Iterator[Case]:
    """Yield the cases of both models: tokens, then prompts."""
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    sizes |= dict(vocab_size=32000, max_position_embeddings=32768, sliding_window=None, head_dim=128)
    mistral = MistralConfig(**sizes, num_hidden_layers=3)
    mixtral = MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
    for name, stock_class, config in (
        ("Mistral", MistralForCausalLM, mistral),
        ("Mixtral", MixtralForCausalLM, mixtral),
    ):
        yield from cases(name, stock_class, config)


def cases(name: str, stock_class: type[PreTrainedModel], config) -> Iterator[Case]:
    """Yield the cases of one model, in bfloat16 beside stock, int8 and int4 beside ours in bfloat16."""
    setting = Setting(torch.device("cpu"), torch.bfloat16)
    ours = {
        weights: build(setting, llamoe.from_stock(config), weights) for weights in ("bf16", "int8", "int4")
    }
    with torch.device("meta"):
        stock = stock_class(config)
    stock.load_state_dict(dict(ours["bf16"].named_parameters()), assign=True)
    # Its tables of angles were made without memory.
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config)
    models = {
        STOCK: stock.eval(),
        OURS: ours["bf16"],
        f"{OURS}, int8": ours["int8"],
        f"{OURS}, int4": ours["int4"],
    }
    for past in BEHIND:
        runs = {
            who: token(model, setting.tokens(1, past, config.vocab_size)) for who, model in models.items()
        }
        yield Case(f"{name}, a token behind {past}", runs, None, parts=STEPS, at_most={OURS: 1.03})
    for length in PROMPTS:
        ids = setting.tokens(1, length, config.vocab_size)
        runs = {who: prompt(model, ids) for who, model in models.items()}
        yield Case(f"{name}, a prompt of {length}", runs, None, at_most={OURS: 1.03})


def token(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], None]:
    """Return a function that decodes `STEPS` tokens behind a cache of `ids` `[1, past]`, again and again."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)

    @torch.no_grad()
    def run() -> None:
        for _ in range(STEPS):
            model(ids[:, :1], past_key_values=cache)
        cache.crop(-STEPS)

    return run


def prompt(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that computes the last token's logits of a prompt `[1, length]`."""
    return torch.no_grad()(lambda: model(ids, use_cache=False, logits_to_keep=1).logits)
