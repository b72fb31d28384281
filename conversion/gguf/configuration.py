"""Convert the keys of a GGUF file to a configuration.

A key that is not listed here is refused, since it may change what the model computes. Two facts of Llama 4 are in no
key, and are assumed as llama.cpp assumes them: chunks of 8192 tokens, and every fourth layer without rotation.

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

# Keys that are read here, or have no effect on what the model computes.
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
    """Make a configuration from the keys and tensors of a file.

    Raises:
        CheckpointError: the architecture is another, a key is missing, or a key that is not read may change what the
            model computes.
        ValueError: a value is invalid.
    """
    keys, architecture = params.entries, params.entries.get("general.architecture")
    if architecture not in ("llama", "llama4"):
        params.reject("general.architecture", "'llama' or 'llama4'")
    prefix = f"{architecture}."
    for name, value in keys.items():
        key = name.removeprefix(prefix)
        if key != name and value and key not in _KNOWN and (key, value) != ("attention.causal", True):
            raise CheckpointError(
                f"{params.origin}: {name} = {str(value)[:60]} is not read, and may change what the model computes."
            )
    params = Params({key.removeprefix(prefix): value for key, value in keys.items()}, params.origin)
    hidden, heads = params.integer("embedding_length"), params.integer("attention.head_count")
    head_dim = params.integer("attention.key_length", hidden // heads or 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if params.integer(key, head_dim) != head_dim:
            params.reject(key, f"the size of a head, {head_dim}")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{params.origin}: token_embd.weight missing; the checkpoint is not whole.")
    fields: dict[str, Any] = dict(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=params.integer("feed_forward_length"),
        num_hidden_layers=params.integer("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=params.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=params.integer("context_length"),
        rms_norm_eps=params.number("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in tensors,
        rope_parameters=_read_rope(params, head_dim, tensors.get("rope_freqs.weight")),
    )
    for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        fields[f"{role}_token_id"] = keys.get(f"tokenizer.ggml.{name}_token_id")
    if num_experts := params.optional_integer("expert_count"):
        fields |= {
            "num_local_experts": num_experts,
            "num_experts_per_tok": params.integer("expert_used_count"),
        }
    window = params.optional_integer("attention.sliding_window")
    if architecture == "llama4":
        if window is None and "attention.sliding_window" in params:
            params.reject("attention.sliding_window", "a number above 0, or no such key")
        fields |= {
            "intermediate_size_mlp": fields["intermediate_size"],
            "intermediate_size": params.integer("expert_feed_forward_length"),
            "interleave_moe_layer_step": params.optional_integer("interleave_moe_layer_step") or 0,
            # llama.cpp takes a model of 128 experts for Maverick, which has no such norms.
            "use_qk_norm": num_experts != 128,
        }
        return LlamoeTextConfig(**fields, architectures=["LlamoeForCausalLM"])
    fields["sliding_window"] = window
    if num_experts:
        return LlamoeMixtralConfig(**fields, architectures=["LlamoeMixtralForCausalLM"])
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return LlamoeDenseConfig(**fields, **biases, architectures=["LlamoeDenseForCausalLM"])


def _read_rope(params: Params, head_dim: int, factors: Tensor | None) -> dict[str, Any]:
    """Read the rotary parameters; Llama 3's scaling is stored as `factors`, one for each frequency."""
    rope = {"rope_type": "default", "rope_theta": params.number("rope.freq_base", 10000.0)}
    kind = params.entries.get("rope.scaling.type", "none")
    if kind not in ("linear", "yarn", "none"):
        params.reject("rope.scaling.type", "'linear', 'yarn' or 'none'")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": params.number("rope.scaling.factor")}
    if kind == "yarn":
        key = "rope.scaling.original_context_length"
        rope["original_max_position_embeddings"] = params.integer(key)
        for key in ("yarn_attn_factor", "attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
            if (name := f"rope.scaling.{key}") in params:
                rope[key.removeprefix("yarn_").replace("attn", "attention")] = params.number(name)
    values = None if factors is None else factors.read().float()
    if values is None or (values == 1).all():
        return rope
    scaling = _llama3_scaling(values, rope["rope_theta"], head_dim) if kind == "none" else None
    if scaling is None:
        raise CheckpointError(
            f"{params.origin}: rope_freqs.weight: its factors of frequencies are not those of Llama 3's scaling."
        )
    return rope | scaling


def _llama3_scaling(factors: torch.Tensor, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Return the parameters of Llama 3's scaling that give these factors `[head_dim / 2]`; None if none do."""
    factor = float(str(np.float32(factors.max().item())))
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    rotations = 8192 * frequencies / (2 * math.pi)
    for high in (1.0, 4.0):
        # 1 if a frequency is unchanged, 0 if it is divided by the factor.
        share = ((rotations - 1) / (high - 1)).clamp(0, 1) if high > 1 else (rotations > 1).double()
        expected = 1 / (share + (1 - share) / factor)
        if factors.shape == expected.shape and torch.allclose(expected, factors.double(), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": 8192,
            }
    return None
