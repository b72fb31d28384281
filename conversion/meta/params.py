"""Meta's `params.json` as our configurations, and back.

An absent key has the default of Meta's code, which differs between LLaMA 1/2, Llama 3 and Llama 4. Sizes that the
tensors show were added to the parameters before.

Source: `ModelArgs` of meta-llama/llama (LLaMA 1 and 2) and meta-llama/llama-models (Llama 3 and 4).
"""

from collections.abc import Mapping
from typing import Any

from ...configuration import LlamoeConfig, LlamoeDenseConfig, LlamoeTextConfig, LlamoeVisionConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.checks import fail
from ..consolidated import Params, kept_fields, read_decoder, read_dtype
from .hidden_sizes import expert_size, feed_forward_size, fit_dense, fit_mixture

# Constants of Meta's code for Llama 3's rotary scaling: the original context length, and the low-frequency factor.
_SCALED_FROM, _LOW_FACTOR = 8192, 1.0
# Entries of params.json for rotary scaling, and their names in `rope_parameters`.
_FACTORS = {"rope_scaling_factor": "factor", "rope_high_freq_factor": "high_freq_factor"}
# Values of the entries, by generation, if params.json lacks them. Llama 3's code always uses its two values.
_SCALING = {3: (8.0, 4.0), 4: (16.0, 1.0)}
# Width, heads and key-value heads of Llama 3.2 1B and 3B. Their params.json has no factor, and Llama 3's code takes 8,
# but their published configurations have 32.
_LLAMA_32, _FACTOR_OF_LLAMA_32 = ((2048, 32, 8), (3072, 24, 8)), 32.0
# SentencePiece's vocabularies have 32000 to 32016 pieces; larger vocabularies are tiktoken's (Llama 3: 128256).
LARGEST_SENTENCEPIECE = 65536
# The rotary base of Llama 3 and 4, which no earlier model has.
LLAMA3_THETA = 500000.0
# Number of special tokens by generation; they have the last ids of the vocabulary. And the special tokens of Llama 4
# that its configuration names, counted from the first special token.
_SPECIALS = {3: 256, 4: 2048}
_LLAMA4_IDS = {"bos": 0, "eos": (1, 7, 8), "pad": 18, "boi": 80, "eoi": 81, "image": 92}

_LLAMA4_ONLY = frozenset(
    "ffn_exp attention_chunk_size nope_layer_interval use_qk_norm attn_temperature_tuning floor_scale attn_scale "
    "moe_args vision_args".split()
)


# Reading


def says_llama4(params: Params) -> bool:
    """Return True if the parameters have a key that only Llama 4 has."""
    return any(name in params for name in _LLAMA4_ONLY)


def is_llama_32(params: Params) -> bool:
    """Return True for the sizes of Llama 3.2 1B or 3B with scaled rotary embeddings."""
    sizes = tuple(params.entries.get(name) for name in ("dim", "n_heads", "n_kv_heads"))
    return params.flag("use_scaled_rope") and not says_llama4(params) and sizes in _LLAMA_32


def note_defaults(params: Params, config: LlamoeBaseConfig) -> list[str]:
    """Return notes on absent keys whose defaults differ between Meta's code and Hugging Face's configurations."""
    if isinstance(config, LlamoeDenseConfig):
        scaled = (config.rope_parameters or {}).get("rope_type") == "llama3"
        if scaled and "rope_scaling_factor" not in params and config.hidden_size < 4096:
            taken = "as in Meta's code; rope_scaling={'factor': 32} (--rope-scaling) gives that of Llama 3.2"
            if is_llama_32(params):
                taken = "as in the published configurations of Llama 3.2 1B and 3B; Meta's code has 8"
            return [f"{params.origin} has no rope_scaling_factor: {_scaling(params, 3)[0]:g}, {taken}"]
    elif 0 in config.get_text_config().no_rope_layers and "attn_temperature_tuning" not in params:
        return [
            f"{params.origin} has no attn_temperature_tuning: off, as in Meta's code; Hugging Face's configurations of "
            "Llama 4 have it on, which changes positions from floor_scale - 1 = 8191"
        ]
    return []


def read_config(
    params: Params, generation: int, is_tuned: bool = False, is_tied: bool = False
) -> LlamoeBaseConfig:
    """Make the configuration of a folder from its parameters.

    Args:
        params: the content of params.json, with sizes of tensors added. An absent `hidden_dim` follows Meta's formula.
        generation: of LLaMA, 1 to 4.
        is_tuned: the model was tuned for conversations, which changes token ids and context length.
        is_tied: the embedding is also the output head.
    """
    fields = read_decoder(params) | {"rope_parameters": _read_rope(params, generation)}
    if generation < 4:
        fields |= _read_dense(params, fields, generation, is_tuned)
        return LlamoeDenseConfig(
            **fields, tie_word_embeddings=is_tied, architectures=["LlamoeDenseForCausalLM"]
        )
    # The id of the first special token; a vocabulary that is too small has none.
    base = fields["vocab_size"] - _SPECIALS[4]
    ids = {
        name: [base + n for n in offset] if isinstance(offset, tuple) else base + offset
        for name, offset in _LLAMA4_IDS.items()
        if base > 0
    }
    fields |= {f"{name}_token_id": ids.get(name) for name in ("bos", "eos", "pad")}
    fields |= _read_text(params, fields, is_tuned)
    vision = params.part("vision_args")
    if vision is None:
        return LlamoeTextConfig(**fields, architectures=["LlamoeForCausalLM"], tie_word_embeddings=False)
    dtype = read_dtype(params)
    parts: dict[str, Any] = {"text_config": fields, "vision_config": _read_vision(vision) | dtype}
    return LlamoeConfig(
        **parts,
        **{f"{name}_token_index": ids[name] for name in ("boi", "eoi", "image") if ids},
        architectures=["LlamoeForConditionalGeneration"],
        tie_word_embeddings=False,
        **dtype,
    )


def _scaling(params: Params, generation: int) -> tuple[float, float]:
    """Return the scaling factor and the high-frequency factor for a `params.json` that lacks them."""
    factor, high = _SCALING[max(generation, 3)]
    return (_FACTOR_OF_LLAMA_32 if generation < 4 and is_llama_32(params) else factor), high


def _read_rope(params: Params, generation: int) -> dict[str, Any]:
    scaled = params.flag("use_scaled_rope")
    # Llama 2's code does not have the key rope_theta, but Code Llama's files do.
    theta = params.number("rope_theta", LLAMA3_THETA if scaled or generation > 2 else 10000.0)
    if not scaled:
        return {"rope_type": "default", "rope_theta": theta}
    factor, high = _scaling(params, generation)
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": params.number("rope_scaling_factor", factor),
        "low_freq_factor": _LOW_FACTOR,
        "high_freq_factor": params.number("rope_high_freq_factor", high),
        "original_max_position_embeddings": _SCALED_FROM,
    }


def _read_dense(params: Params, fields: Mapping[str, Any], generation: int, is_tuned: bool) -> dict[str, Any]:
    rope = fields["rope_parameters"]
    length = {1: 2048, 2: 4096, 3: 8192}[generation]
    if rope["rope_type"] == "llama3":
        length = 131072
    elif generation == 2 and rope["rope_theta"] == 1e6:
        # Code Llama.
        length = 16384
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    if generation == 3:
        base = fields["vocab_size"] - _SPECIALS[3]
        # end_of_text; a tuned model also ends its answers with eom and eot.
        eos = [base + 1, base + 8, base + 9] if is_tuned else base + 1
        ids = {"bos_token_id": base, "eos_token_id": eos} if base > 0 else dict.fromkeys(ids)
    return {
        **ids,
        "intermediate_size": _inner(params),
        "max_position_embeddings": params.integer("max_seq_len", length),
    }


def _inner(params: Params) -> int:
    multiplier = params.number("ffn_dim_multiplier") if "ffn_dim_multiplier" in params else None
    computed = feed_forward_size(params.integer("dim"), params.integer("multiple_of", 256), multiplier)
    return params.integer("hidden_dim", computed)


def _read_text(params: Params, fields: Mapping[str, Any], is_tuned: bool) -> dict[str, Any]:
    length = 262144
    if is_tuned:
        length = 10485760 if fields["rope_parameters"]["rope_type"] == "llama3" else 1048576
    text = {
        "max_position_embeddings": params.integer("max_seq_len", length),
        "attention_chunk_size": params.optional_integer("attention_chunk_size"),
        "no_rope_layer_interval": params.optional_integer("nope_layer_interval"),
        "use_qk_norm": params.flag("use_qk_norm"),
        "attn_temperature_tuning": params.flag("attn_temperature_tuning"),
        "floor_scale": params.integer("floor_scale", 8192),
        "attn_scale": params.number("attn_scale", 0.1),
        "intermediate_size_mlp": _inner(params),
    }
    experts = params.part("moe_args")
    if experts is None:
        return text | {"moe_layers": []}
    inner = experts.optional_integer("hidden_dim")
    if inner is None:
        inner = expert_size(
            fields["hidden_size"],
            params.integer("multiple_of", 256),
            params.number("ffn_dim_multiplier"),
            params.number("ffn_exp"),
            experts.number("capacity_factor", 1.0),
            experts.flag("auto_scale_F", True),
        )
    return text | {
        "num_local_experts": experts.integer("num_experts"),
        "num_experts_per_tok": experts.integer("top_k", 1),
        "interleave_moe_layer_step": experts.integer("interleave_moe_layer_step", 1),
        "intermediate_size": inner,
    }


def _read_vision(params: Params) -> dict[str, Any]:
    dim, out = params.integer("dim"), params.integer("output_dim")
    return {
        "hidden_size": dim,
        "num_hidden_layers": params.integer("n_layers"),
        "num_attention_heads": params.integer("n_heads"),
        "intermediate_size": params.optional_integer("hidden_dim") or int(params.number("mlp_ratio") * dim),
        "image_size": _side(params, "image_size"),
        "patch_size": _side(params, "patch_size"),
        "vision_output_dim": out,
        "projector_input_dim": out,
        "projector_output_dim": out,
        "pixel_shuffle_ratio": params.number("pixel_shuffle_ratio"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _side(params: Params, name: str) -> int:
    """Read the side of a square, which is written as {"height": side, "width": side} or as a number."""
    if not isinstance(params.entries.get(name), Mapping) or (size := params.part(name)) is None:
        return params.integer(name)
    if size.integer("height") != size.integer("width"):
        params.reject(name, "a square: the tower's rotary embedding and pixel shuffle need one")
    return size.integer("height")


# Writing


def write_params(config: LlamoeBaseConfig, generation: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the contents of `params.json` and `llamoe.json`; `generation` is 2 or 3 for the dense family, else 4.

    Raises:
        ValueError: Meta's code cannot compute the value of a field.
    """
    text: Any = config.get_text_config()
    assert text.head_dim is not None
    if text.head_dim * text.num_attention_heads != text.hidden_size:
        problem = "Meta's code takes hidden_size / num_attention_heads"
        fail(text, "head_dim", text.head_dim, problem, f"{text.hidden_size / text.num_attention_heads:g}")
    params = {
        "dim": text.hidden_size,
        "n_layers": text.num_hidden_layers,
        "n_heads": text.num_attention_heads,
        "n_kv_heads": text.num_key_value_heads,
        "vocab_size": text.vocab_size,
        "norm_eps": text.rms_norm_eps,
    }
    if isinstance(text, LlamoeDenseConfig):
        _add_dense(params, text, generation)
    else:
        _add_text(params, text)
    if isinstance(config, LlamoeConfig):
        params["vision_args"] = _write_vision(config.vision_config)
    again = read_config(Params.of(params, "params.json"), generation)
    return params, kept_fields(config, again)


def _add_dense(params: dict[str, Any], config: LlamoeDenseConfig, generation: int) -> None:
    if generation < 3 and params["n_kv_heads"] == params["n_heads"]:
        # LLaMA 1's code does not have this key.
        del params["n_kv_heads"]
    params["multiple_of"], multiplier = fit_dense(config.hidden_size, config.intermediate_size)
    if multiplier is not None:
        params["ffn_dim_multiplier"] = multiplier
    rope = config.rope_parameters or {}
    # Needed also for a large vocabulary: without a tokenizer, a reader takes the model for Llama 3, with its base.
    if generation == 3 or rope.get("rope_theta") != 10000.0 or config.vocab_size > LARGEST_SENTENCEPIECE:
        params["rope_theta"] = rope.get("rope_theta")
    if rope.get("rope_type") == "llama3":
        params["use_scaled_rope"] = True
        # Written if they differ from Llama 3's constants, or from what is read without them.
        taken = _scaling(Params(dict(params), "params.json"), 3)
        for (name, key), *defaults in zip(_FACTORS.items(), _SCALING[3], taken, strict=True):
            if any(rope.get(key) != default for default in defaults):
                params[name] = rope.get(key)


def needs_own_scaling(params: Mapping[str, Any]) -> bool:
    """Return True if a dense model's rotary scaling differs from the constants in Llama 3's code."""
    scaling = (params.get(name, default) for name, default in zip(_FACTORS, _SCALING[3], strict=True))
    return "moe_args" not in params and tuple(scaling) != _SCALING[3]


def _add_text(params: dict[str, Any], text: LlamoeTextConfig) -> None:
    assert text.layer_types is not None
    assert text.no_rope_layers is not None
    rope, count = text.rope_parameters or {}, text.num_hidden_layers
    scaled = rope.get("rope_type") == "llama3"
    interval = text.no_rope_layer_interval
    if not interval or text.no_rope_layers != [int((idx + 1) % interval != 0) for idx in range(count)]:
        interval = text.no_rope_layers.index(0) + 1 if 0 in text.no_rope_layers else None
    params |= {
        "head_dim": text.head_dim,
        "rope_theta": rope.get("rope_theta"),
        "use_scaled_rope": scaled,
        **({name: rope.get(key) for name, key in _FACTORS.items()} if scaled else {}),
        "attention_chunk_size": text.attention_chunk_size
        if "chunked_attention" in text.layer_types
        else None,
        "nope_layer_interval": interval,
        "use_qk_norm": text.use_qk_norm,
        "attn_temperature_tuning": bool(text.attn_temperature_tuning),
        "floor_scale": float(text.floor_scale),
        "attn_scale": text.attn_scale,
        "ffn_exp": None,
        "moe_args": None,
        "vision_args": None,
    }
    sizes = text.hidden_size, text.intermediate_size_mlp
    if not text.moe_layers:
        params["multiple_of"], params["ffn_dim_multiplier"] = fit_dense(*sizes)
        return
    step = text.interleave_moe_layer_step
    if text.moe_layers != list(range(step - 1, count, step)):
        step = min(text.moe_layers) + 1
    multiple_of, multiplier, ffn_exp, capacity = fit_mixture(*sizes, text.intermediate_size)
    params |= {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier, "ffn_exp": ffn_exp}
    params["moe_args"] = {
        "num_experts": text.num_local_experts,
        "capacity_factor": capacity,
        "auto_scale_F": True,
        "top_k": text.num_experts_per_tok,
        "interleave_moe_layer_step": step,
    }


def _write_vision(config: LlamoeVisionConfig) -> dict[str, Any]:
    dim, inner = config.hidden_size, config.intermediate_size
    ratio = inner / dim
    if int(ratio * dim) != inner:
        # Aim for half a channel more, so that Meta's code, which rounds the product down, gets `inner`.
        ratio = (inner + 0.5) / dim
    return {
        "image_size": {"height": config.image_size, "width": config.image_size},
        "patch_size": {"height": config.patch_size, "width": config.patch_size},
        "dim": dim,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "mlp_ratio": ratio,
        "output_dim": config.vision_output_dim,
        "pixel_shuffle_ratio": config.pixel_shuffle_ratio,
    }
