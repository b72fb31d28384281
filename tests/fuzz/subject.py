"""Draw a random model, with the reference on the same weights, and stock's model if stock accepts the configuration."""

import random
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from support.models import make_asymmetric
from transformers import Llama4TextConfig

import llamoe

from .draw import chance, draw_fields
from .judge import Judge
from .reference import DENSE, Decoder, layer_kinds

CLASSES = {
    "llama": (llamoe.LlamoeDenseForCausalLM, transformers.LlamaForCausalLM),
    "mistral": (llamoe.LlamoeDenseForCausalLM, transformers.MistralForCausalLM),
    "ministral": (llamoe.LlamoeDenseForCausalLM, transformers.MinistralForCausalLM),
    "mixtral": (llamoe.LlamoeMixtralForCausalLM, transformers.MixtralForCausalLM),
    "llama4_text": (llamoe.LlamoeForCausalLM, transformers.Llama4ForCausalLM),
}
FAMILIES = ["llama", "mistral", "ministral", *["mixtral"] * 2, *["llama4_text"] * 3]
DTYPES = ["float32"] * 5 + ["float64", "bfloat16", "bfloat16", "float16"]
ATTENTION = ["sdpa", "sdpa", "sdpa", "eager"]
EXPERTS = [None, None, None, "llamoe", "eager", "batched_mm"]


def rope_config(fields: dict[str, Any]) -> Llama4TextConfig | None:
    """Return a stock configuration with a decoder's rotary embedding; None for odd head sizes, which have none."""
    if fields["head_dim"] % 2:
        return None
    names = ("head_dim", "rope_parameters", "max_position_embeddings", "num_attention_heads", "hidden_size")
    return Llama4TextConfig(**{name: fields[name] for name in names})


@dataclass
class Subject:
    """One of our causal language models, and its judge.

    Attributes:
        fields: the configuration in stock's fields.
        model: our model.
        judge: compares with the reference.
        stock_can: True if stock's class accepts the configuration.
        notes: what was drawn, for the message of a fault.
    """

    fields: dict[str, Any]
    model: Any
    judge: Judge
    stock_can: bool
    notes: dict[str, Any]

    @property
    def is_dense(self) -> bool:
        return self.fields["model_type"] in DENSE

    @property
    def layers(self) -> list[tuple[bool, str | None, bool]]:
        return [layer_kinds(self.fields, idx) for idx in range(self.fields["num_hidden_layers"])]

    @property
    def has_mixture(self) -> bool:
        return any(is_moe for _, _, is_moe in self.layers)

    @property
    def forgets(self) -> bool:
        """True if layers have chunks or windows, whose caches drop old tokens."""
        return any(local for _, local, _ in self.layers)

    def stock(self) -> Any:
        """Build stock's model with the same weights and dtype."""
        _, stock_class = CLASSES[self.fields["model_type"]]
        fields = {name: value for name, value in self.fields.items() if name != "model_type"}
        config = stock_class.config_class(**fields)
        config._attn_implementation = self.model.config._attn_implementation
        if self.fields["model_type"] == "mixtral":
            # torch's grouped product does not take all sizes.
            config._experts_implementation = "eager"
        stock = stock_class._from_config(config, dtype=self.judge.dtype)
        stock.load_state_dict(self.model.state_dict())
        return stock.train(self.model.training)


def draw_subject(
    rng: random.Random,
    seed: int,
    by_length: bool = False,
    dtypes: list[str] = DTYPES,
    experts: list[str | None] = EXPERTS,
    **overrides: Any,
) -> Subject:
    """Draw a model.

    Args:
        rng: source of all choices.
        seed: of the weights.
        by_length: also draw rotary embeddings that depend on the length of a forward.
        dtypes, experts: dtypes, and implementations of experts, to choose from.
        **overrides: fields of the configuration that are not drawn.
    """
    family, for_stock = rng.choice(FAMILIES), chance(rng, 0.6)
    fields = draw_fields(rng, family, by_length, for_stock) | overrides
    dtype = getattr(torch, rng.choice(dtypes))
    model_class, _ = CLASSES[family]
    given = {name: value for name, value in fields.items() if for_stock or name != "model_type"}
    config = model_class.config_class(**given)
    attention, implementation = rng.choice(ATTENTION), rng.choice(experts)
    model = make_asymmetric(model_class(config), seed)
    if fields["tie_word_embeddings"]:
        model.get_input_embeddings().weight.data.mul_(fields["hidden_size"] ** -0.5)
    model.to(dtype)
    if implementation is not None and family not in DENSE:
        model.set_experts_implementation(implementation)
    model.set_attn_implementation(attention)
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    judge = Judge(Decoder(weights, fields, rope_config(fields)), dtype, seed)
    notes = {"family": family, "attention": attention, "experts": implementation}
    return Subject(fields, model, judge, for_stock, notes)
