"""Convert the keys of a GGUF file to a configuration.

A key of the architecture that is not known here may change what the model computes, so it is refused. What llama.cpp
takes for granted of Llama 4 is taken here, too: chunks of 8192 tokens, every fourth layer without rotation.

Source: `conversion/` and `src/models/llama.cpp`, `llama4.cpp` of ggml-org/llama.cpp.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...configuration import LlamoeDenseConfig, LlamoeMixtralConfig, LlamoeTextConfig
from ...configuration.errors import CheckpointError
from ..consolidated import Params
from .header import Tensor

ARCHITECTURES = ("llama", "llama4")
# Keys that are read here, or do not change what the model computes.
_KNOWN = frozenset(
    "block_count context_length embedding_length feed_forward_length attention.head_count attention.head_count_kv "
    "attention.key_length attention.value_length attention.layer_norm_rms_epsilon attention.sliding_window vocab_size "
    "expert_count expert_used_count expert_feed_forward_length interleave_moe_layer_step rope.dimension_count "
    "rope.freq_base rope.scaling.type rope.scaling.factor rope.scaling.original_context_length "
    "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.attn_factor rope.scaling.yarn_attn_factor "
    "rope.scaling.finetuned tensor_data_layout".split()
)


def read_config(
    params: Params, tensors: Mapping[str, Tensor]
) -> LlamoeDenseConfig | LlamoeMixtralConfig | LlamoeTextConfig:
    """Make a configuration from keys and tensors.

    Raises:
        CheckpointError: another architecture, a missing key, or one that may change what the model computes.
    """
    architecture = params.entries.get("general.architecture")
    if architecture not in ARCHITECTURES:
        params.reject("general.architecture", " or ".join(map(repr, ARCHITECTURES)))
    prefix = f"{architecture}."
    for name, value in params.entries.items():
        key = name.removeprefix(prefix)
        if key == name or key in _KNOWN or not value or (key, value) == ("attention.causal", True):
            continue
        raise CheckpointError(
            f"{params.origin}: {name} = {str(value)[:60]} is not known here, and may change what the model computes."
        )

    def integer(key: str, default: int | None = None) -> int:
        return params.integer(prefix + key, default)

    hidden, heads = integer("embedding_length"), integer("attention.head_count")
    head_dim = integer("attention.key_length", hidden // heads or 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if integer(key, head_dim) != head_dim:
            params.reject(prefix + key, f"the size of a head, {head_dim}")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{params.origin}: token_embd.weight missing; the checkpoint is not whole.")
    fields: dict[str, Any] = dict(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=integer("feed_forward_length"),
        num_hidden_layers=integer("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=integer("context_length"),
        rms_norm_eps=params.number(f"{prefix}attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in tensors,
        rope_parameters=_read_rope(params, prefix, head_dim, tensors.get("rope_freqs.weight")),
    )
    for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        fields[f"{role}_token_id"] = params.entries.get(f"tokenizer.ggml.{name}_token_id")
    has_experts = bool(params.entries.get(f"{prefix}expert_count"))
    if has_experts:
        fields["num_local_experts"] = integer("expert_count")
        fields["num_experts_per_tok"] = integer("expert_used_count")
    if architecture == "llama4":
        if params.entries.get(f"{prefix}attention.sliding_window") == 0:
            params.reject(f"{prefix}attention.sliding_window", "a number above 0, or no such key")
        fields["intermediate_size_mlp"] = fields["intermediate_size"]
        fields["intermediate_size"] = integer("expert_feed_forward_length")
        fields["interleave_moe_layer_step"] = (
            params.optional_integer(f"{prefix}interleave_moe_layer_step") or 0
        )
        # llama.cpp tells Maverick, which has no such norms, by its number of experts.
        fields["use_qk_norm"] = fields.get("num_local_experts") != 128
        return LlamoeTextConfig(**fields, architectures=["LlamoeForCausalLM"])
    fields["sliding_window"] = params.optional_integer(f"{prefix}attention.sliding_window")
    if has_experts:
        return LlamoeMixtralConfig(**fields, architectures=["LlamoeMixtralForCausalLM"])
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return LlamoeDenseConfig(**fields, **biases, architectures=["LlamoeDenseForCausalLM"])


def _read_rope(params: Params, prefix: str, head_dim: int, factors: Tensor | None) -> dict[str, Any]:
    """Read the rotation; Llama 3's scaling is stored as a factor for each frequency."""
    rope = {"rope_type": "default", "rope_theta": params.number(f"{prefix}rope.freq_base", 10000.0)}
    kind = params.entries.get(f"{prefix}rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": params.number(f"{prefix}rope.scaling.factor")}
    elif kind != "none":
        params.reject(f"{prefix}rope.scaling.type", "'linear', 'yarn' or 'none'")
    if kind == "yarn":
        key = f"{prefix}rope.scaling.original_context_length"
        rope["original_max_position_embeddings"] = params.integer(key)
        for name, keys in (
            ("attention_factor", ("yarn_attn_factor", "attn_factor")),
            ("beta_fast", ("yarn_beta_fast",)),
            ("beta_slow", ("yarn_beta_slow",)),
        ):
            for key in (f"{prefix}rope.scaling.{key}" for key in keys):
                if key in params:
                    rope[name] = params.number(key)
    if factors is None or bool((found := factors.read().float()).eq(1).all()):
        return rope
    if kind != "none" or (scaling := _llama3_scaling(found, rope["rope_theta"], head_dim)) is None:
        raise CheckpointError(
            f"{factors.origin}: its factors of frequencies are not those of Llama 3's scaling."
        )
    return {**rope, "rope_type": "llama3", **scaling}


def _llama3_scaling(factors: torch.Tensor, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Return the parameters of Llama 3's scaling with these factors `[head_dim / 2]`, or None if no model has such."""
    factor = float(str(np.float32(factors.max().item())))
    for high in (1.0, 4.0):
        rope = {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": 8192,
        }
        turns = (
            8192 * theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim) / (2 * math.pi)
        )
        # 1 where a frequency is unchanged, 0 where it is divided by the factor.
        part = ((turns - 1) / (high - 1)).clamp(0, 1) if high > 1 else (turns > 1).double()
        expected = 1 / (part + (1 - part) / factor)
        if factors.shape == expected.shape and torch.allclose(expected, factors.double(), rtol=1e-4):
            return rope
    return None
