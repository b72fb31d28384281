"""Mistral AI's `params.json` as our configurations.

`params.json` has the keys of mistral-inference's `TransformerArgs`. In the first release of Mixtral it may have Hugging
Face's names instead, the numbers of experts outside of `moe`, and numbers as text. An unknown key may change what the
model computes, so it is refused.

Without `rope_theta`, a model with a sliding window has the rotary base 10000, others 1000000. This was the rule of
mistral-inference in December 2023, when the key was new: Mistral 7B v0.1, which has a window and no such key, was
trained with 10000. Later folders have the key.

Source: `args.py`, `cache.py`, `moe.py` and `transformer.py` of mistralai/mistral-inference.
"""

from collections.abc import Mapping
from typing import Any

from ...configuration import LlamoeDenseConfig, LlamoeMixtralConfig
from ...configuration.errors import CheckpointError
from ..consolidated import Params, read_decoder

_CONTEXT = 32768
_THETA, _THETA_WITH_WINDOW = 1000000.0, 10000.0
_EXPERTS = ("num_experts", "num_experts_per_tok")
# Hugging Face's names in the first release of Mixtral, and Mistral AI's.
_RENAMED = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
    "num_local_experts": "num_experts",
    "_sliding_window": "sliding_window",
}
# Keys of Mistral AI's params.json that Meta's lacks.
OWN_KEYS = frozenset(
    "hidden_dim hidden_size sliding_window _sliding_window moe model_type vision_encoder lora".split()
)
_KNOWN = frozenset(
    "dim n_layers head_dim hidden_dim n_heads n_kv_heads norm_eps vocab_size rope_theta sliding_window moe max_seq_len "
    "tied_embeddings".split()
)
# Keys of other models' code, with the only value at which the model computes what our classes compute.
_ONLY = {
    "model_type": "transformer",
    "causal": True,
    "hidden_act": "silu",
    "activation": "silu",
    "moe.norm_topk_prob": True,
    "moe.route_every_n": 1,
    "moe.routed_scale": 1,
}
# Keys of other models' code, and of quantized weights, that have no effect if they are false, 0 or empty.
_OFF = frozenset(
    "use_biases use_bias attention_bias qkv_bias mlp_bias qk_norm use_qk_norm use_scaled_rope dropout "
    "attention_dropout "
    "attn_logit_softcap final_logit_softcap attn_logit_softcapping final_logit_softcapping q_lora_rank kv_lora_rank "
    "attn_temperature_tuning moe.first_k_dense_replace moe.num_shared_experts rope_scaling yarn llama_4_scaling "
    "vision_encoder multimodal lora quantization quantization_config".split()
)
# A key that never changes what the model computes.
_NO_EFFECT = "max_batch_size"


def read_params(content: Mapping[str, Any], origin: str) -> tuple[Params, dict[str, str]]:
    """Rename the entries of params.json as in mistral-inference; return them, and a reason for each ignored key."""
    as_written = Params.of(content, origin)
    entries: dict[str, Any] = {}
    for name, value in as_written.entries.items():
        if (current := _RENAMED.get(name, name)) in entries:
            as_written.reject(name, f"only one of {name} and {current}")
        entries[current] = value
    counts = {name: entries.pop(name) for name in _EXPERTS if name in entries}
    if mixture := as_written.part("moe"):
        counts |= {_RENAMED.get(name, name): value for name, value in mixture.entries.items()}
    if counts:
        entries["moe"] = counts
    others = {name: value for name, value in entries.items() if name not in (*_KNOWN, _NO_EFFECT)}
    others |= {f"moe.{name}": value for name, value in counts.items() if name not in _EXPERTS}
    for name, value in others.items():
        if not (value == _ONLY[name] if name in _ONLY else name in _OFF and not value):
            expected = f"; expected: {_ONLY[name]!r}, or nothing" if name in _ONLY else ""
            raise CheckpointError(
                f"{origin}: {name} = {str(value)[:60]} may change what the model computes; only decoders of text with "
                f"plain weights are converted{expected}. If the entry changes nothing, remove it."
            )
    params = Params({name: value for name, value in entries.items() if name in _KNOWN}, origin)
    reason = "has no effect on what the model computes"
    return params, {f"params.json: {_NO_EFFECT}": reason} if _NO_EFFECT in as_written else {}


def read_config(params: Params) -> LlamoeDenseConfig | LlamoeMixtralConfig:
    """Make a folder's configuration from the parameters of `read_params`, which `measure` has completed."""
    fields = read_decoder(params) | _read_window(params)
    theta = _THETA_WITH_WINDOW if "sliding_window" in fields else _THETA
    fields |= {
        "intermediate_size": params.integer("hidden_dim"),
        "max_position_embeddings": params.integer("max_seq_len", _CONTEXT),
        "rope_parameters": {"rope_type": "default", "rope_theta": params.number("rope_theta", theta)},
        "tie_word_embeddings": params.flag("tied_embeddings"),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    mixture = params.part("moe")
    if mixture is None:
        return LlamoeDenseConfig(**fields, architectures=["LlamoeDenseForCausalLM"])
    # Mixtures have no biases.
    del fields["attention_bias"], fields["mlp_bias"]
    experts, chosen = (mixture.integer(name) for name in _EXPERTS)
    return LlamoeMixtralConfig(
        **fields,
        num_local_experts=experts,
        num_experts_per_tok=chosen,
        architectures=["LlamoeMixtralForCausalLM"],
    )


def _read_window(params: Params) -> dict[str, Any]:
    """Read the sliding window, and which layers have it, as fields of the configuration.

    `sliding_window` is a number, a number as text, or a list that repeats over the layers, with null for no window.
    """
    entry, layers = params.entries.get("sliding_window"), params.integer("n_layers")
    windows = entry if isinstance(entry, list) else [entry]
    windows = [int(window) if str(window).isdecimal() else window for window in windows]
    sizes = {window for window in windows if window is not None}
    if not sizes and windows == [None]:
        return {}
    if len(sizes) != 1 or layers % len(windows) or not all(type(size) is int and size > 0 for size in sizes):
        params.reject(
            "sliding_window", f"a number, or a list of one number and nulls that repeats to {layers} layers"
        )
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"sliding_window": sizes.pop(), "layer_types": kinds * (layers // len(windows))}
