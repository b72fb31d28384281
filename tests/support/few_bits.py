"""Small models with int4 and int8 weights; each family's model has sizes that every format accepts."""

import copy
import tempfile
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import llamoe
from llamoe.modeling.moe import Router
from llamoe.modeling.quantization import QuantizedExperts, QuantizedLinear

from .models import draw

# Numbers of outputs are multiples of 16, and of 64 in feed-forwards, which the fast kernels need. Numbers of inputs are
# multiples of 32. No two sizes are equal, so that a confused axis fails.
SIZES = dict(
    vocab_size=101,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_FAMILIES = {
    "dense": (llamoe.LlamoeDenseForCausalLM, llamoe.LlamoeDenseConfig, dict(intermediate_size=320)),
    "text": (
        llamoe.LlamoeForCausalLM,
        llamoe.LlamoeTextConfig,
        dict(
            intermediate_size=64,
            intermediate_size_mlp=320,
            num_local_experts=5,
            interleave_moe_layer_step=2,
            attention_chunk_size=16,
        ),
    ),
    "mixtral": (
        llamoe.LlamoeMixtralForCausalLM,
        llamoe.LlamoeMixtralConfig,
        dict(intermediate_size=64, num_local_experts=5, num_experts_per_tok=2),
    ),
}
FAMILIES = tuple(_FAMILIES)
WEIGHTS = ("int4", "int8")
# Largest `distance` between bfloat16 logits of the same weights that were computed in two ways, and so rounded in
# different orders. Measured: up to 0.02, as from float32; a wrong computation gives 0.3 and more.
CLOSE = 0.04

# Keeps the folders of `save` until the process ends.
_folders: list[tempfile.TemporaryDirectory] = []


def make(family: str, **changes) -> torch.nn.Module:
    """Return a family's model in float32."""
    model_class, config_class, fields = _FAMILIES[family]
    return draw(model_class, config_class(**{**SIZES, **fields, **changes}))


def save(model: torch.nn.Module, **kwargs) -> Path:
    """Save a model to a temporary folder, which is deleted when the process ends; return the folder."""
    _folders.append(tempfile.TemporaryDirectory())
    model.save_pretrained(_folders[-1].name, **kwargs)
    return Path(_folders[-1].name)


# Options of `load` that are fields of `QuantizationConfig`.
FIELDS = ("experts", "linears", "group_size", "activations", "modules_to_not_convert")


@cache
def folder(family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save a family's model once, and return its folder, which tests must not change."""
    return save(make(family).to(dtype))


def load(path: Path, weights: str = "int4", **kwargs) -> torch.nn.Module:
    """Load a folder's model with quantized weights."""
    fields = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
    config = llamoe.QuantizationConfig(weights, **fields)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **kwargs)


@cache
def _loaded(family: str, weights: str) -> torch.nn.Module:
    return load(folder(family), weights)


def packed(family: str, weights: str) -> torch.nn.Module:
    """Return a copy of a family's quantized model, which tests may change."""
    return copy.deepcopy(_loaded(family, weights))


def codes_and_scales(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of all quantized layers and experts, by name."""
    return {
        f"{path}.{name}": tensor
        for path, module in model.named_modules()
        if isinstance(module, QuantizedExperts | QuantizedLinear)
        for name, tensor in module.state_dict().items()
        if name != "bias"
    }


def token_ids(batch: int = 2, length: int = 11) -> torch.Tensor:
    """Return token ids `[batch, length]` without padding."""
    return torch.randint(3, 101, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
    """Return a model's logits for `ids`, by default those of `token_ids`."""
    return model(token_ids() if ids is None else ids, **kwargs).logits


def route_by_position(monkeypatch) -> None:
    """Choose each token's experts by its position, since rounding could change the router's choice; keep the scores."""
    original = Router.choose

    def choose(router, logits_TE):
        num_tokens, num_experts = logits_TE.shape
        chosen = (3 * torch.arange(num_tokens)[:, None] + torch.arange(router.top_k)) % num_experts
        bias_TE = torch.zeros(num_tokens, num_experts)
        router.balancing_bias = bias_TE.scatter(1, chosen, 1e3 - torch.arange(router.top_k).expand_as(chosen))
        try:
            return original(router, logits_TE)
        finally:
            router.balancing_bias = None

    monkeypatch.setattr(Router, "choose", choose)


def distance(given: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the expected tensor."""
    return ((given.float() - expected.float()).norm() / expected.float().norm()).item()
