"""Cases at the sizes of models of 7B on a CPU: a token behind a cache, and a prompt, in 16 bits, int8 and int4.

Three layers of Mistral 7B, and two of Mixtral 8x7B with four of its eight experts: layers as large as published ones,
so that a token's weights are read from memory as in a whole model, and few, so that a measurement takes minutes.
Weights are random. What is cached is drawn, and not read: the time of a token depends on its number alone.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM, MixtralForCausalLM, PreTrainedModel

import llamoe

from . import OURS, REFERENCE
from .bars import PEERS_IN_LLAMA_CPP
from .few_bits import CONTEXT, FIRST, LLAMA_CPP, LlamaCpp, saved
from .gguf_files import find_converter, make_files
from .harness import IN_BFLOAT16, Case, Cases, Contestant, LeftOut
from .saved_models import SavedModel, load_packed

CACHED = (64, 2048, 8192)
"""Tokens of the cache behind which one is computed."""
PROMPTS = (128, 512)
"""Tokens of a prompt."""
PRECISIONS = ("bfloat16", "int8", "int4")
TOKENS = 5
"""Tokens of a run."""
STOCK = f"{REFERENCE}, bfloat16"
_SIZES = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=2 * max(CACHED),
)
MISTRAL = SavedModel(
    "Mistral 7B, 3 layers", llamoe.LlamoeDenseForCausalLM, LlamaForCausalLM, dict(_SIZES, num_hidden_layers=3)
)
MIXTRAL = SavedModel(
    "Mixtral 8x7B, 2 layers, 4 experts",
    llamoe.LlamoeMixtralForCausalLM,
    MixtralForCausalLM,
    dict(_SIZES, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2),
)


class Decoder:
    """A model of transformers' or ours, with a cache for each number of tokens."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.caches: dict[int, DynamicCache] = {}

    def _cache_of(self, cached: int) -> DynamicCache:
        config = self.model.config
        found = DynamicCache(config=config)
        generator = torch.Generator().manual_seed(0)
        shape = 1, config.num_key_value_heads, cached, config.head_dim
        for layer in range(config.num_hidden_layers):
            keys, values = torch.randn(2, *shape, generator=generator).bfloat16()
            found.update(keys, values, layer)
        return found

    @torch.inference_mode()
    def tokens(self, cached: int) -> None:
        """`TOKENS` tokens behind `cached` ones, which are then forgotten."""
        if cached not in self.caches:
            self.caches[cached] = self._cache_of(cached)
        for _ in range(TOKENS):
            self.model(torch.tensor([[FIRST]]), past_key_values=self.caches[cached])
        self.caches[cached].crop(-TOKENS)

    @torch.inference_mode()
    def prompt(self, length: int) -> None:
        """The logits of a prompt's last token."""
        self.model(torch.full((1, length), FIRST), use_cache=False, logits_to_keep=1)


class PeerDecoder(LlamaCpp):
    """The same of llama.cpp, whose cache is read from tokens."""

    def tokens(self, cached: int) -> None:
        """As `Decoder.tokens`."""
        self.go_on([FIRST] * cached, TOKENS)

    def prompt(self, length: int) -> None:
        """As `Decoder.prompt`, with the logits of all tokens, which `LlamaCpp` asks for."""
        self.logits([FIRST] * length)


def _makers(model: SavedModel, folder: Path) -> dict[str, Callable[[], Any]]:
    def stock() -> Decoder:
        return Decoder(model.stock.from_pretrained(folder, dtype=torch.bfloat16).eval())

    def ours(precision: str) -> Decoder:
        return Decoder(load_packed(model, folder, precision))

    makers: dict[str, Callable[[], Any]] = {STOCK: cache(stock)}
    makers |= {f"{OURS}, {precision}": cache(partial(ours, precision)) for precision in PRECISIONS}
    try:
        files = make_files(find_converter(), folder)
    except LeftOut:
        return makers
    kinds = [PEERS_IN_LLAMA_CPP[precision] for precision in PRECISIONS]
    return makers | {f"{LLAMA_CPP}, {kind}": cache(partial(PeerDecoder, files[kind])) for kind in kinds}


def seven_billion(model: SavedModel) -> Cases:
    """A token behind each number of cached tokens, then each prompt; llama.cpp where it is installed."""
    with saved((model,)) as [folder]:
        makers = _makers(model, folder)
        for phase, counts in (("tokens", CACHED), ("prompt", PROMPTS)):
            for count in counts:

                def run(make: Callable[[], Any], phase: str = phase, count: int = count) -> None:
                    getattr(make(), phase)(count)

                contestants = {
                    # In few bits another function is computed, and nothing is compared.
                    who: Contestant(partial(run, make), None, 1, has_own_pool=True)
                    for who, make in makers.items()
                    # llama.cpp has room for so many tokens alone.
                    if not who.startswith(LLAMA_CPP) or count + TOKENS <= CONTEXT
                }
                is_token = phase == "tokens"
                name = f"{model.name}, " + (
                    f"a token behind {count:,}" if is_token else f"a prompt of {count}"
                )
                facts = dict(phase=phase, model=model.name, tokens=1 if is_token else count)
                facts |= {"cached": count} if is_token else {}
                parts = TOKENS if is_token else 1
                yield Case(name, contestants, None, IN_BFLOAT16, facts, reference=STOCK, parts=parts)
