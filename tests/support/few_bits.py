"""Small quantized models: of each family one that all formats take, saved and loaded once."""

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

# Outputs are multiples of 16, those of feed-forwards also of 64, as compiled kernels need them; inputs are multiples of
# 32. Sizes differ from each other, and those of experts from those of layers.
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
# Relative: sums and activations of two layers are rounded to bfloat16's 8 bits in another order. Up to 0.02 is
# measured, where the same weights in float32 are as far from both, and 0.3 and more for what is wrong.
CLOSE = 0.04

_folders: list[tempfile.TemporaryDirectory] = []


def make(family: str, **changes) -> torch.nn.Module:
    """A model in float32."""
    model_class, config_class, fields = _FAMILIES[family]
    return draw(model_class, config_class(**{**SIZES, **fields, **changes}))


def save(model: torch.nn.Module, **kwargs) -> Path:
    """A new folder with this model, which goes with the process."""
    _folders.append(tempfile.TemporaryDirectory())
    model.save_pretrained(_folders[-1].name, **kwargs)
    return Path(_folders[-1].name)


FIELDS = ("experts", "linears", "group_size", "activations", "modules_to_not_convert")


@cache
def folder(family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The folder of a family's model; not to be changed."""
    return save(make(family).to(dtype))


def load(path: Path, weights: str = "int4", **kwargs) -> torch.nn.Module:
    """A folder's model with its quantized weights."""
    fields = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
    config = llamoe.QuantizationConfig(weights, **fields)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **kwargs)


@cache
def _loaded(family: str, weights: str) -> torch.nn.Module:
    return load(folder(family), weights)


def packed(family: str, weights: str) -> torch.nn.Module:
    """A quantized copy of a family's model."""
    return copy.deepcopy(_loaded(family, weights))


def codes_and_scales(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Everything that is packed, by name."""
    return {
        f"{path}.{name}": tensor
        for path, module in model.named_modules()
        if isinstance(module, QuantizedExperts | QuantizedLinear)
        for name, tensor in module.state_dict().items()
        if name != "bias"
    }


def token_ids(batch: int = 2, length: int = 11) -> torch.Tensor:
    """Tokens without padding."""
    return torch.randint(3, 101, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
    """A model's logits for these tokens."""
    return model(token_ids() if ids is None else ids, **kwargs).logits


def route_by_position(monkeypatch) -> None:
    """Let each token's place choose its experts, where rounding would send some to others; scores stay the router's."""
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
    """Length of the difference, as a part of the expected length."""
    return ((given.float() - expected.float()).norm() / expected.float().norm()).item()
