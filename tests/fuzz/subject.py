"""A random model with its judges: the reference on the same weights, and stock's class where it has the model."""

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

OURS_DENSE = (llamoe.LlamoeDenseConfig, llamoe.LlamoeDenseForCausalLM)
OURS_MIXTRAL = (llamoe.LlamoeMixtralConfig, llamoe.LlamoeMixtralForCausalLM)
OURS_TEXT = (llamoe.LlamoeTextConfig, llamoe.LlamoeForCausalLM)
CLASSES = {
    "llama": (*OURS_DENSE, "LlamaConfig", "LlamaForCausalLM"),
    "mistral": (*OURS_DENSE, "MistralConfig", "MistralForCausalLM"),
    "ministral": (*OURS_DENSE, "MinistralConfig", "MinistralForCausalLM"),
    "mixtral": (*OURS_MIXTRAL, "MixtralConfig", "MixtralForCausalLM"),
    "llama4_text": (*OURS_TEXT, "Llama4TextConfig", "Llama4ForCausalLM"),
}
FAMILIES = ["llama", "mistral", "ministral", *["mixtral"] * 2, *["llama4_text"] * 3]
DTYPES = ["float32"] * 5 + ["float64", "bfloat16", "bfloat16", "float16"]
ATTENTION = ["sdpa", "sdpa", "sdpa", "eager"]
EXPERTS = [None, None, None, "llamoe", "eager", "batched_mm"]


def rope_config(fields: dict[str, Any]) -> Llama4TextConfig | None:
    """Stock's configuration with a decoder's rotary embedding; None where no layer rotates."""
    if fields["head_dim"] % 2:
        return None
    names = ("head_dim", "rope_parameters", "max_position_embeddings", "num_attention_heads", "hidden_size")
    return Llama4TextConfig(**{name: fields[name] for name in names})


@dataclass
class Subject:
    """One of our causal language models, and its judge.

    Attributes:
        fields: stock's fields.
        stock_can: whether stock's class accepts them.
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
    def has_mixture(self) -> bool:
        return not self.is_dense and any(
            layer_kinds(self.fields, idx)[2] for idx in range(self.fields["num_hidden_layers"])
        )

    @property
    def forgets(self) -> bool:
        """Whether layers have chunks or windows, so that their caches forget tokens."""
        return any(layer_kinds(self.fields, idx)[1] for idx in range(self.fields["num_hidden_layers"]))

    def stock(self) -> Any:
        """Stock's model with the same weights and dtype."""
        _, _, config_name, model_name = CLASSES[self.fields["model_type"]]
        fields = {name: value for name, value in self.fields.items() if name != "model_type"}
        config = getattr(transformers, config_name)(**fields)
        config._attn_implementation = self.model.config._attn_implementation
        if self.fields["model_type"] == "mixtral":
            # torch's grouped product does not take all sizes.
            config._experts_implementation = "eager"
        stock = getattr(transformers, model_name)._from_config(config, dtype=self.judge.dtype)
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
        by_length: also draw rotary embeddings that depend on the length of the pass.
        dtypes, experts: names of dtypes and implementations to choose from.
        **overrides: fields.
    """
    family, for_stock = rng.choice(FAMILIES), chance(rng, 0.6)
    fields = draw_fields(rng, family, by_length, for_stock) | overrides
    dtype = getattr(torch, rng.choice(dtypes))
    config_class, model_class, *_ = CLASSES[family]
    given = {name: value for name, value in fields.items() if for_stock or name != "model_type"}
    config = config_class(**given)
    config._attn_implementation = rng.choice(ATTENTION)
    implementation = rng.choice(experts)
    if family not in DENSE:
        config._experts_implementation = implementation
    model = make_asymmetric(model_class._from_config(config), seed)
    if fields["tie_word_embeddings"]:
        model.get_input_embeddings().weight.data.mul_(fields["hidden_size"] ** -0.5)
    model.to(dtype)
    if implementation is not None and family not in DENSE:
        model.set_experts_implementation(implementation)
    model.set_attn_implementation(config._attn_implementation)
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    judge = Judge(Decoder(weights, fields, rope_config(fields)), dtype, seed)
    notes = {"family": family, "attention": config._attn_implementation, "experts": implementation}
    return Subject(fields, model, judge, for_stock, notes)
