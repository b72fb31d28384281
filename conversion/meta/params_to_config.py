"""Meta's `params.json` as our configurations.

An absent key has the default of Meta's code, which differs between LLaMA 1/2, Llama 3 and Llama 4. Sizes that tensors
show are read off the tensors.

Sources: `ModelArgs` and the feed-forwards of meta-llama/llama (LLaMA 1 and 2) and meta-llama/llama-models
(Llama 3 and 4).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ...configuration import LlamoeConfig, LlamoeDenseConfig, LlamoeTextConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.errors import CheckpointError

# Original context length of Llama 3's rotary scaling: a constant in Meta's code, as is the factor for low frequencies.
_SCALED_FROM = 8192
_LOW_FACTOR = 1.0
# Defaults of (scaling factor, high-frequency factor): constants in Llama 3's code, default values in Llama 4's.
SCALING = {3: (8.0, 4.0), 4: (16.0, 1.0)}
# Width, heads and key-value heads of Llama 3.2 1B and 3B. Their params.json say nothing of the factor, and Llama 3's
# code has a constant; their published configurations have this one.
_LLAMA_32, _FACTOR_OF_LLAMA_32 = ((2048, 32, 8), (3072, 24, 8)), 32.0
# Larger vocabularies are tiktoken's (Llama 3: 128256); SentencePiece's have 32000 to 32016 pieces.
LARGEST_SENTENCEPIECE = 65536
# The rotary base of Llama 3 and 4; no earlier dense model has it.
LLAMA3_THETA = 500000.0
# Number of special tokens after the ranks of a tiktoken vocabulary; below, the offsets of those that a config names.
_SPECIALS = {3: 256, 4: 2048}
_LLAMA4_IDS = {"bos": 0, "eos": (1, 7, 8), "pad": 18, "boi": 80, "eoi": 81, "image": 92}

_LLAMA_KEYS = frozenset(
    "dim n_layers n_heads n_kv_heads head_dim vocab_size multiple_of ffn_dim_multiplier norm_eps rope_theta "
    "use_scaled_rope rope_scaling_factor rope_high_freq_factor max_seq_len max_batch_size".split()
)
_LLAMA4_ONLY = frozenset(
    "ffn_exp attention_chunk_size nope_layer_interval use_qk_norm attn_temperature_tuning floor_scale attn_scale "
    "moe_args vision_args".split()
)
_REFUSED = ("quantization_args", "lora_args")


@dataclass(frozen=True)
class Seen:
    """What the tensors, not `params.json`, show about a folder.

    Attributes:
        generation: 1 to 4; 0 for a model of Mistral AI's.
        vocab_size: Rows of the whole embedding.
        inner: Hidden size of the dense feed-forwards; None means Meta's formula.
        expert_inner: Hidden size of an expert; None likewise.
        vision_inner: Hidden size of the tower's feed-forwards; None means `mlp_ratio`.
        dtype: Dtype of the weights, such as "bfloat16".
        instruct: Whether the folder's name shows that the model was tuned to follow instructions.
    """

    generation: int
    vocab_size: int
    inner: int | None = None
    expert_inner: int | None = None
    vision_inner: int | None = None
    dtype: str | None = None
    instruct: bool = False


@dataclass(frozen=True)
class Params:
    """The content of a `params.json` without its nulls, with checks that name a wrong entry and its file."""

    entries: Mapping[str, Any]
    origin: str

    @classmethod
    def of(cls, content: Mapping[str, Any], origin: str) -> "Params":
        """Wrap the content of a file; some files nest it under "model"."""
        nested = content.get("model")
        content = nested if isinstance(nested, Mapping) else content
        return cls(_without_nulls(content), origin)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def reject(self, name: str, expected: str) -> NoReturn:
        """Raise the error for a wrong or missing entry."""
        given = f"{name} = {self.entries[name]!r}" if name in self.entries else f"{name} is missing"
        raise CheckpointError(f"{self.origin}: {given}; expected: {expected}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.entries.get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.reject(name, "a whole number of at least 1")
        return value

    def optional_integer(self, name: str) -> int | None:
        """A whole number of at least 1, or None where it is absent or 0."""
        return self.integer(name) if self.entries.get(name) else None

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.entries.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.reject(name, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """A truth value, false by default; the first releases wrote some as integers."""
        value = self.entries.get(name, False)
        if not isinstance(value, (bool, int)):
            self.reject(name, "true or false")
        return bool(value)

    def part(self, name: str) -> "Params | None":
        """A nested object; None where there is none."""
        value = self.entries.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.reject(name, "an object")
        return Params(_without_nulls(value), f"{self.origin}: {name}")

    def side(self, name: str) -> int:
        """The side of a square that is written as {"height", "width"}, or as a number."""
        if (size := self.part(name) if isinstance(self.entries.get(name), Mapping) else None) is None:
            return self.integer(name)
        if size.integer("height") != size.integer("width"):
            self.reject(name, "a square: the tower's rotary embedding and pixel shuffle need one")
        return size.integer("height")


def _without_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not None}


def says_llama4(params: Params) -> bool:
    """Whether the parameters alone identify a Llama 4."""
    return any(name in params for name in _LLAMA4_ONLY)


def check_entries(params: Params, is_llama4: bool) -> dict[str, str]:
    """Refuse quantized releases, and return each key that Meta's code ignores, with the reason."""
    for name in _REFUSED:
        part = params.entries.get(name)
        if part and (not isinstance(part, Mapping) or any(value for value in part.values())):
            params.reject(
                name, "none: quantised and adapted releases are not converted, only the original weights"
            )
    known = _LLAMA_KEYS | _LLAMA4_ONLY | set(_REFUSED)
    reason = f"no key that Meta's Llama{' 4' if is_llama4 else ''} reads"
    return {f"params.json: {name}": reason for name in params.entries if name not in known}


def note_defaults(params: Params, config: LlamoeBaseConfig) -> list[str]:
    """Notes on absent keys whose default in Meta's code differs from Hugging Face's published configuration."""
    if isinstance(config, LlamoeDenseConfig):
        scaled = (config.rope_parameters or {}).get("rope_type") == "llama3"
        if scaled and "rope_scaling_factor" not in params and config.hidden_size < 4096:
            taken = "as in Meta's code; --rope-scaling factor=32 (rope_scaling) gives that of Llama 3.2"
            if is_llama_32(params):
                taken = "as in the published configurations of Llama 3.2 1B and 3B; Meta's code has 8"
            factor, _ = scaling_factors(params, 3)
            return [f"{params.origin} has no rope_scaling_factor: {factor:g}, {taken}"]
    elif 0 in config.get_text_config().no_rope_layers and "attn_temperature_tuning" not in params:
        return [
            f"{params.origin} has no attn_temperature_tuning: off, as in Meta's code; Hugging Face's configurations of "
            "Llama 4 have it on, which changes positions from floor_scale - 1 = 8191"
        ]
    return []


def feed_forward_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Hidden size of a dense feed-forward by Meta's formula, which rounds down at each step."""
    inner = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        inner = int(multiplier * inner)
    return multiple_of * math.ceil(inner / multiple_of)


def expert_size(
    dim: int,
    multiple_of: int,
    multiplier: float,
    ffn_exp: float,
    capacity_factor: float = 1.0,
    auto_scale=True,
) -> int:
    """Hidden size of routed and shared experts by the formula of Llama 4's `MoE`."""
    inner = int(multiplier * int(2 * int(ffn_exp * dim) / 3))
    if auto_scale:
        inner = int(inner / (capacity_factor + 1))
    return inner + -inner % multiple_of


def read_config(params: Params, seen: Seen, is_tied: bool = False) -> LlamoeBaseConfig:
    """The configuration of a Meta folder; sizes that the tensors do not show follow Meta's formulas.

    `is_tied` says that the head is the embedding.

    Returns:
        A `LlamoeDenseConfig` for LLaMA 1, 2 and 3, else a `LlamoeTextConfig`, inside a `LlamoeConfig` if there are
        `vision_args`.

    Raises:
        CheckpointError: an entry is missing or impossible, or contradicts the tensors.
    """
    if seen.generation < 4:
        config = _read_dense(params, seen)
        config.tie_word_embeddings = is_tied
        return config
    text = _read_text(params, seen)
    vision = params.part("vision_args")
    if vision is None:
        return LlamoeTextConfig(**text, **_common(seen, "LlamoeForCausalLM"))
    ids = _special_ids(seen)
    parts: dict[str, Any] = {
        "text_config": text | _dtype(seen),
        "vision_config": _read_vision(vision, seen) | _dtype(seen),
    }
    return LlamoeConfig(
        **parts,
        **{f"{name}_token_index": ids[name] for name in ("boi", "eoi", "image") if ids},
        **_common(seen, "LlamoeForConditionalGeneration"),
    )


def _dtype(seen: Seen) -> dict[str, Any]:
    return {} if seen.dtype is None else {"dtype": seen.dtype}


def _common(seen: Seen, architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture], "tie_word_embeddings": False, **_dtype(seen)}


def read_decoder(params: Params, seen: Seen) -> dict[str, Any]:
    """Fields that all families have."""
    dim, heads = params.integer("dim"), params.integer("n_heads")
    if "head_dim" not in params and dim % heads:
        params.reject("n_heads", f"a divisor of dim = {dim}")
    if params.entries.get("vocab_size", -1) not in (-1, seen.vocab_size):
        params.reject("vocab_size", f"-1, or the {seen.vocab_size} rows of tok_embeddings.weight")
    return {
        "vocab_size": seen.vocab_size,
        "hidden_size": dim,
        "num_hidden_layers": params.integer("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": params.integer("n_kv_heads", heads),
        "head_dim": params.integer("head_dim", dim // heads),
        "hidden_act": "silu",
        "rms_norm_eps": params.number("norm_eps", 1e-5),
        "attention_bias": False,
        "mlp_bias": False,
    }


def is_llama_32(params: Params) -> bool:
    """Whether these are the sizes of Llama 3.2 1B or 3B, with scaled rotary embeddings."""
    sizes = tuple(params.entries.get(name) for name in ("dim", "n_heads", "n_kv_heads"))
    return params.flag("use_scaled_rope") and not says_llama4(params) and sizes in _LLAMA_32


def scaling_factors(params: Params, generation: int) -> tuple[float, float]:
    """The scaling factor and the high-frequency factor where `params.json` has none."""
    factor, high = SCALING[max(generation, 3)]
    return (_FACTOR_OF_LLAMA_32 if generation < 4 and is_llama_32(params) else factor), high


def _read_rope(params: Params, generation: int) -> dict[str, Any]:
    scaled = params.flag("use_scaled_rope")
    # Llama 2's code does not have this key, but Code Llama's files do. Llama 3 and 4 have their own default.
    theta = params.number("rope_theta", LLAMA3_THETA if scaled or generation > 2 else 10000.0)
    if not scaled:
        return {"rope_type": "default", "rope_theta": theta}
    factor, high = scaling_factors(params, generation)
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": params.number("rope_scaling_factor", factor),
        "low_freq_factor": _LOW_FACTOR,
        "high_freq_factor": params.number("rope_high_freq_factor", high),
        "original_max_position_embeddings": _SCALED_FROM,
    }


def _read_dense(params: Params, seen: Seen) -> LlamoeDenseConfig:
    fields = read_decoder(params, seen)
    rope = _read_rope(params, seen.generation)
    length = {1: 2048, 2: 4096, 3: 8192}[seen.generation]
    if rope["rope_type"] == "llama3":
        length = 131072
    elif seen.generation == 2 and rope["rope_theta"] == 1e6:
        # Code Llama.
        length = 16384
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    if seen.generation == 3:
        base = seen.vocab_size - _SPECIALS[3]
        # end_of_text; tuned models also end their turns with eom and eot.
        eos = [base + 1, base + 8, base + 9] if seen.instruct else base + 1
        ids = {"bos_token_id": base, "eos_token_id": eos} if base > 0 else dict.fromkeys(ids)
    return LlamoeDenseConfig(
        **fields,
        **ids,
        intermediate_size=_inner(params, seen, fields["hidden_size"]),
        max_position_embeddings=params.integer("max_seq_len", length),
        rope_parameters=rope,
        **_common(seen, "LlamoeDenseForCausalLM"),
    )


def _inner(params: Params, seen: Seen, dim: int) -> int:
    multiplier = params.number("ffn_dim_multiplier") if "ffn_dim_multiplier" in params else None
    return seen.inner or feed_forward_size(dim, params.integer("multiple_of", 256), multiplier)


def _special_ids(seen: Seen) -> dict[str, Any]:
    """Ids of Llama 4's special tokens, the last 2048; none where the vocabulary is too small for them."""
    base = seen.vocab_size - _SPECIALS[4]
    if base <= 0:
        return {}
    return {
        name: [base + n for n in place] if isinstance(place, tuple) else base + place
        for name, place in _LLAMA4_IDS.items()
    }


def _read_text(params: Params, seen: Seen) -> dict[str, Any]:
    fields = read_decoder(params, seen)
    dim, layers = fields["hidden_size"], fields["num_hidden_layers"]
    ids = _special_ids(seen)
    fields |= {f"{name}_token_id": ids.get(name) for name in ("bos", "eos", "pad")}
    rope = _read_rope(params, 4)
    length = 262144
    if seen.instruct:
        length = 10485760 if rope["rope_type"] == "llama3" else 1048576
    multiple_of = params.integer("multiple_of", 256)
    fields |= {
        "rope_parameters": rope,
        "max_position_embeddings": params.integer("max_seq_len", length),
        "attention_chunk_size": params.optional_integer("attention_chunk_size"),
        "no_rope_layer_interval": params.optional_integer("nope_layer_interval"),
        "use_qk_norm": params.flag("use_qk_norm"),
        "attn_temperature_tuning": params.flag("attn_temperature_tuning"),
        "floor_scale": params.integer("floor_scale", 8192),
        "attn_scale": params.number("attn_scale", 0.1),
        "intermediate_size_mlp": _inner(params, seen, dim),
    }
    experts = params.part("moe_args")
    if experts is None:
        return fields | {"moe_layers": []}
    inner = seen.expert_inner
    if inner is None:
        auto = "auto_scale_F" not in experts or experts.flag("auto_scale_F")
        factors = params.number("ffn_dim_multiplier"), params.number("ffn_exp")
        inner = expert_size(dim, multiple_of, *factors, experts.number("capacity_factor", 1.0), auto)
    step = experts.integer("interleave_moe_layer_step", 1)
    return fields | {
        "num_local_experts": experts.integer("num_experts"),
        "num_experts_per_tok": experts.integer("top_k", 1),
        "interleave_moe_layer_step": step,
        "moe_layers": list(range(step - 1, layers, step)),
        "intermediate_size": inner,
    }


def _read_vision(params: Params, seen: Seen) -> dict[str, Any]:
    dim, out = params.integer("dim"), params.integer("output_dim")
    return {
        "hidden_size": dim,
        "num_hidden_layers": params.integer("n_layers"),
        "num_attention_heads": params.integer("n_heads"),
        "intermediate_size": seen.vision_inner or int(params.number("mlp_ratio") * dim),
        "image_size": params.side("image_size"),
        "patch_size": params.side("patch_size"),
        "vision_output_dim": out,
        "projector_input_dim": out,
        "projector_output_dim": out,
        "pixel_shuffle_ratio": params.number("pixel_shuffle_ratio"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
