"""Meta's `params.json` to our configurations and back.

What is absent means what Meta's code takes for it, which differs between LLaMA 1/2, Llama 3 and Llama 4. The
way back proves itself: the parameters that are about to be written are read again as Meta's code reads them,
hidden sizes by its formulas, and each field that would then differ and changes what the model computes is
refused by its name. Fields that change no number (context length, token ids, what concerns training) have no
place in `params.json`; LLaMA's own code refuses keys that it does not know. They go into `llamoe.json` beside
it, which Meta's code never opens.

Sources: `ModelArgs` and the feed-forwards of meta-llama/llama (LLaMA 1 and 2) and meta-llama/llama-models
(Llama 3 and 4).
"""

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, get_origin

from ..configuration import (
    LlamoeConfig,
    LlamoeDenseConfig,
    LlamoeTextConfig,
    LlamoeVisionConfig,
)
from ..configuration._base import LlamoeBaseConfig
from ..configuration._checks import fail
from ..modeling.weights import CheckpointError

# The length that Meta's code scales rotary embeddings from, and its factor for low frequencies: both are constants there.
_SCALED_FROM = 8192
_LOW_FACTOR = 1.0
# Scaling and high-frequency factors where the keys are absent: constants in Llama 3's code, defaults in Llama 4's.
_SCALING = {3: (8.0, 4.0), 4: (16.0, 1.0)}
# Tokens after the ranks of a tiktoken vocabulary, and the places of those that a configuration names among them.
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

# Fields that change no number of a forward pass in evaluation; they are kept in llamoe.json.
_FREE = frozenset(
    "max_position_embeddings initializer_range use_cache pad_token_id bos_token_id eos_token_id pretraining_tp "
    "attention_dropout projector_dropout no_rope_layer_interval interleave_moe_layer_step output_router_logits "
    "router_aux_loss_coef router_jitter_noise router_z_loss_coef router_dropout expert_capacity_factor "
    "output_expert_load boi_token_index eoi_token_index image_token_index".split()
)

# Published pairs of multiple_of and ffn_dim_multiplier, tried first so that a published size gets its own file back.
_PUBLISHED = ((256, None), (4096, 1.3), (1024, 1.3))
_PUBLISHED_LLAMA4 = ((2048, 1.2),)
_POWERS = tuple(2**n for n in range(13))


@dataclass(frozen=True)
class Seen:
    """What the tensors, and not `params.json`, say of a folder.

    Attributes:
        generation: 1 to 4.
        vocab_size: Rows of the whole embedding.
        inner: Hidden size of the dense feed-forwards; None means Meta's formula.
        expert_inner: The same of an expert.
        vision_inner: The same of the tower's blocks; None means `mlp_ratio`.
        dtype: Of the weights, as "bfloat16".
        instruct: Whether the folder's name says that the model was tuned to follow instructions.
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
    """The content of a `params.json` without its nulls, which says what is wrong with an entry, and where."""

    entries: Mapping[str, Any]
    origin: str

    @classmethod
    def of(cls, content: Mapping[str, Any], origin: str) -> "Params":
        """Take the content of a file; some are nested under "model"."""
        nested = content.get("model")
        content = nested if isinstance(nested, Mapping) else content
        return cls({name: value for name, value in content.items() if value is not None}, origin)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def reject(self, name: str, expected: str) -> NoReturn:
        """Say that an entry is wrong, or missing."""
        given = f"{name} = {self.entries[name]!r}" if name in self.entries else f"{name} is missing"
        raise CheckpointError(f"{self.origin}: {given}; expected: {expected}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Get a whole number of at least 1."""
        value = self.entries.get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.reject(name, "a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Get a finite number above 0."""
        value = self.entries.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.reject(name, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """Get a truth value, false by default; the first releases wrote some as integers."""
        value = self.entries.get(name, False)
        if not isinstance(value, (bool, int)):
            self.reject(name, "true or false")
        return bool(value)

    def part(self, name: str) -> "Params | None":
        """Get a nested object, None where there is none."""
        value = self.entries.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.reject(name, "an object")
        return Params.of({"model": value}, f"{self.origin}: {name}")

    def side(self, name: str) -> int:
        """Get the side of a square that is written as {"height", "width"}, or as a number."""
        if (size := self.part(name) if isinstance(self.entries.get(name), Mapping) else None) is None:
            return self.integer(name)
        if size.integer("height") != size.integer("width"):
            self.reject(name, "a square: the tower's rotary embedding and pixel shuffle need one")
        return size.integer("height")


def says_llama4(params: Params) -> bool:
    """Whether the parameters alone show a Llama 4."""
    return any(name in params for name in _LLAMA4_ONLY)


def check_entries(params: Params, is_llama4: bool) -> dict[str, str]:
    """Refuse quantised releases; list the keys that mean nothing to Meta's code, each with that reason."""
    for name in _REFUSED:
        part = params.entries.get(name)
        if part and (not isinstance(part, Mapping) or any(value for value in part.values())):
            params.reject(
                name, "none: quantised and adapted releases are not converted, only the original weights"
            )
    known = _LLAMA_KEYS | _LLAMA4_ONLY | set(_REFUSED)
    reason = f"no key that Meta's Llama{' 4' if is_llama4 else ''} reads"
    return {f"params.json: {name}": reason for name in params.entries if name not in known}


def feed_forward_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Hidden size of a dense feed-forward by Meta's formula, which truncates at each step."""
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
    """Hidden size of an expert, and of the shared one, by the formula of Llama 4's `MoE`."""
    inner = int(multiplier * int(2 * int(ffn_exp * dim) / 3))
    if auto_scale:
        inner = int(inner / (capacity_factor + 1))
    return inner + -inner % multiple_of


def read_config(params: Params, seen: Seen) -> LlamoeBaseConfig:
    """The configuration that a Meta folder stands for.

    Args:
        params: Its parameters.
        seen: What its tensors say; sizes that they do not show follow Meta's formulas.

    Returns:
        A `LlamoeDenseConfig` for LLaMA 1, 2 and 3, else a `LlamoeTextConfig`, in a `LlamoeConfig` where there
        are `vision_args`.

    Raises:
        CheckpointError: an entry is missing or impossible, or contradicts the tensors.
    """
    if seen.generation < 4:
        return _read_dense(params, seen)
    text = _read_text(params, seen)
    vision = params.part("vision_args")
    if vision is None:
        return LlamoeTextConfig(**text, **_common(seen, "LlamoeForCausalLM"))
    ids = _special_ids(seen)
    return LlamoeConfig(
        text_config=text | _dtype(seen),
        vision_config=_read_vision(vision, seen) | _dtype(seen),
        **{f"{name}_token_index": ids[name] for name in ("boi", "eoi", "image") if ids},
        **_common(seen, "LlamoeForConditionalGeneration"),
    )


def _dtype(seen: Seen) -> dict[str, Any]:
    return {} if seen.dtype is None else {"dtype": seen.dtype}


def _common(seen: Seen, architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture], "tie_word_embeddings": False, **_dtype(seen)}


def _read_decoder(params: Params, seen: Seen) -> dict[str, Any]:
    """Fields that both families have."""
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


def _read_rope(params: Params, generation: int) -> dict[str, Any]:
    scaled = params.flag("use_scaled_rope")
    # Llama 2's code has no such key; Code Llama's and Llama 3's files always have it.
    theta = params.number("rope_theta", 500000.0 if scaled or generation == 4 else 10000.0)
    if not scaled:
        return {"rope_type": "default", "rope_theta": theta}
    factor, high = _SCALING[max(generation, 3)]
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": params.number("rope_scaling_factor", factor),
        "low_freq_factor": _LOW_FACTOR,
        "high_freq_factor": params.number("rope_high_freq_factor", high),
        "original_max_position_embeddings": _SCALED_FROM,
    }


def _read_dense(params: Params, seen: Seen) -> LlamoeDenseConfig:
    fields = _read_decoder(params, seen)
    rope = _read_rope(params, seen.generation)
    length = {1: 2048, 2: 4096, 3: 8192}[seen.generation]
    if rope["rope_type"] == "llama3":
        length = 131072
    elif seen.generation == 2 and rope["rope_theta"] == 1e6:
        length = 16384  # Code Llama
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    if seen.generation == 3:
        base = seen.vocab_size - _SPECIALS[3]
        # end_of_text; after it eom and eot, which end the turns of tuned models.
        eos = [base + 1, base + 8, base + 9] if seen.instruct else base + 1
        ids = {"bos_token_id": base, "eos_token_id": eos} if base > 0 else dict.fromkeys(ids)
    multiplier = params.number("ffn_dim_multiplier") if "ffn_dim_multiplier" in params else None
    inner = seen.inner or feed_forward_size(
        fields["hidden_size"], params.integer("multiple_of", 256), multiplier
    )
    return LlamoeDenseConfig(
        **fields,
        **ids,
        intermediate_size=inner,
        max_position_embeddings=params.integer("max_seq_len", length),
        rope_parameters=rope,
        **_common(seen, "LlamoeDenseForCausalLM"),
    )


def _special_ids(seen: Seen) -> dict[str, Any]:
    """Ids of Llama 4's special tokens, the last 2048; none in a vocabulary that has no room for them."""
    base = seen.vocab_size - _SPECIALS[4]
    if base <= 0:
        return {}
    return {
        name: [base + n for n in place] if isinstance(place, tuple) else base + place
        for name, place in _LLAMA4_IDS.items()
    }


def _read_text(params: Params, seen: Seen) -> dict[str, Any]:
    fields = _read_decoder(params, seen)
    dim, layers = fields["hidden_size"], fields["num_hidden_layers"]
    ids = _special_ids(seen)
    fields |= {f"{name}_token_id": ids.get(name) for name in ("bos", "eos", "pad")}
    rope = _read_rope(params, 4)
    length = 262144
    if seen.instruct:
        length = 10485760 if rope["rope_type"] == "llama3" else 1048576
    multiple_of = params.integer("multiple_of", 256)
    multiplier = params.number("ffn_dim_multiplier") if "ffn_dim_multiplier" in params else None
    fields |= {
        "rope_parameters": rope,
        "max_position_embeddings": params.integer("max_seq_len", length),
        "attention_chunk_size": params.integer("attention_chunk_size")
        if params.flag("attention_chunk_size")
        else None,
        "no_rope_layer_interval": params.integer("nope_layer_interval")
        if params.flag("nope_layer_interval")
        else None,
        "use_qk_norm": params.flag("use_qk_norm"),
        "attn_temperature_tuning": params.flag("attn_temperature_tuning"),
        "floor_scale": _whole(params, "floor_scale", 8192.0),
        "attn_scale": params.number("attn_scale", 0.1),
        "intermediate_size_mlp": seen.inner or feed_forward_size(dim, multiple_of, multiplier),
    }
    experts = params.part("moe_args")
    if experts is None:
        return fields | {"moe_layers": []}
    if seen.expert_inner is None:
        auto = "auto_scale_F" not in experts or experts.flag("auto_scale_F")
        inner = expert_size(
            dim,
            multiple_of,
            params.number("ffn_dim_multiplier"),
            params.number("ffn_exp"),
            experts.number("capacity_factor", 1.0),
            auto,
        )
    else:
        inner = seen.expert_inner
    step = experts.integer("interleave_moe_layer_step", 1)
    return fields | {
        "num_local_experts": experts.integer("num_experts"),
        "num_experts_per_tok": experts.integer("top_k", 1),
        "interleave_moe_layer_step": step,
        "moe_layers": list(range(step - 1, layers, step)),
        "intermediate_size": inner,
    }


def _whole(params: Params, name: str, default: float) -> int:
    value = params.number(name, default)
    if not value.is_integer():
        params.reject(name, "a whole number")
    return int(value)


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


def write_params(config: LlamoeBaseConfig, generation: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `params.json` of a configuration, and the content of `llamoe.json`.

    Args:
        config: A `LlamoeDenseConfig`, `LlamoeTextConfig` or `LlamoeConfig`.
        generation: 2 or 3 for the dense family, whichever is meant; 4 else.

    Returns:
        Two dictionaries for JSON; the second is empty where the first says everything.

    Raises:
        ValueError: a field has a value that Meta's code cannot compute; the message names it.
    """
    params = _write_dense(config, generation) if generation < 4 else _write_text(config)
    vocab_size = config.get_text_config().vocab_size
    again = read_config(Params.of(params, "params.json"), Seen(generation, vocab_size))
    return params, _compare(config, again)


def _write_decoder(config: LlamoeDenseConfig | LlamoeTextConfig) -> dict[str, Any]:
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        problem = "Meta's code takes hidden_size / num_attention_heads for it"
        valid = f"{config.hidden_size / config.num_attention_heads:g}"
        fail(config, "head_dim", config.head_dim, problem, valid)
    return {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
    }


def _write_dense(config: LlamoeDenseConfig, generation: int) -> dict[str, Any]:
    params = _write_decoder(config)
    if generation < 3 and params["n_kv_heads"] == params["n_heads"]:
        del params["n_kv_heads"]  # LLaMA 1's code does not know it
    params["multiple_of"], multiplier = _fit_dense(config)
    if multiplier is not None:
        params["ffn_dim_multiplier"] = multiplier
    rope = config.rope_parameters or {}
    if generation == 3 or rope.get("rope_theta") != 10000.0:
        params["rope_theta"] = rope.get("rope_theta")
    if rope.get("rope_type") == "llama3":
        params["use_scaled_rope"] = True
        for (name, key), default in zip(_FACTORS.items(), _SCALING[3], strict=True):
            if rope.get(key) != default:
                params[name] = rope.get(key)
    return params


_FACTORS = {"rope_scaling_factor": "factor", "rope_high_freq_factor": "high_freq_factor"}


def needs_own_scaling(params: Mapping[str, Any]) -> bool:
    """Whether a dense model scales its rotary embedding otherwise than Llama 3's code, which has constants there."""
    return "moe_args" not in params and any(name in params for name in _FACTORS)


def _write_text(config: LlamoeTextConfig | LlamoeConfig) -> dict[str, Any]:
    text = config.get_text_config()
    rope = text.rope_parameters or {}
    scaled = rope.get("rope_type") == "llama3"
    chunked = "chunked_attention" in text.layer_types
    count = text.num_hidden_layers
    interval = text.no_rope_layer_interval
    if not interval or text.no_rope_layers != [int((idx + 1) % interval != 0) for idx in range(count)]:
        interval = text.no_rope_layers.index(0) + 1 if 0 in text.no_rope_layers else None
    params = _write_decoder(text) | {
        "head_dim": text.head_dim,
        "rope_theta": rope.get("rope_theta"),
        "use_scaled_rope": scaled,
        **({name: rope.get(key) for name, key in _FACTORS.items()} if scaled else {}),
        "attention_chunk_size": text.attention_chunk_size if chunked else None,
        "nope_layer_interval": interval,
        "use_qk_norm": text.use_qk_norm,
        "attn_temperature_tuning": bool(text.attn_temperature_tuning),
        "floor_scale": float(text.floor_scale),
        "attn_scale": text.attn_scale,
        "ffn_exp": None,
        "moe_args": None,
        "vision_args": None,
    }
    if not text.moe_layers:
        params["multiple_of"], params["ffn_dim_multiplier"] = _fit_dense(text)
    else:
        step = text.interleave_moe_layer_step
        if text.moe_layers != list(range(step - 1, count, step)):
            step = min(text.moe_layers) + 1
        multiple_of, multiplier, ffn_exp, capacity = _fit_mixture(text)
        params |= {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier, "ffn_exp": ffn_exp}
        params["moe_args"] = {
            "num_experts": text.num_local_experts,
            "capacity_factor": capacity,
            "auto_scale_F": True,
            "top_k": text.num_experts_per_tok,
            "interleave_moe_layer_step": step,
        }
    if isinstance(config, LlamoeConfig):
        params["vision_args"] = _write_vision(config.vision_config)
    return params


def _write_vision(config: LlamoeVisionConfig) -> dict[str, Any]:
    dim, inner = config.hidden_size, config.intermediate_size
    ratio = inner / dim
    if int(ratio * dim) != inner:
        ratio = (inner + 0.5) / dim  # the quotient rounded down
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


def _multipliers(dim: int, inner: int, multiple_of: int) -> Iterable[float]:
    """Factors that bring Meta's formula to `inner`, those of few decimals first."""
    base = int(2 * (4 * dim) / 3)
    for decimals in range(1, 10):
        lowest = math.ceil((inner - multiple_of + 1) / base * 10**decimals)
        for candidate in (lowest, lowest + 1):
            multiplier = candidate / 10**decimals
            if multiplier > 0 and feed_forward_size(dim, multiple_of, multiplier) == inner:
                yield multiplier


def _fit_dense(config: LlamoeDenseConfig | LlamoeTextConfig) -> tuple[int, float | None]:
    """A pair of multiple_of and ffn_dim_multiplier by which Meta's formula gives the dense hidden size.

    In order: published pairs, the smallest power of two that needs no multiplier, the multiplier of fewest
    decimals with the smallest power of two.
    """
    dim = config.hidden_size
    inner = (
        config.intermediate_size if isinstance(config, LlamoeDenseConfig) else config.intermediate_size_mlp
    )
    for pair in (*_PUBLISHED, *((power, None) for power in _POWERS)):
        if feed_forward_size(dim, *pair) == inner:
            return pair
    pairs = (
        (power, found) for power in _POWERS for found in _multipliers(dim, inner, power) if inner % power == 0
    )
    return min(pairs, key=lambda pair: (len(str(pair[1])), pair[0]))


def _fit_mixture(config: LlamoeTextConfig) -> tuple[int, float, float, float]:
    """multiple_of, ffn_dim_multiplier, ffn_exp and capacity_factor that give both hidden sizes.

    The capacity factor matters for nothing else: Meta's code limits no expert. It leaves the 1.0 of the
    releases only where the multiplier is so large that the formula would step over sizes.
    """
    dim, inner, expert = config.hidden_size, config.intermediate_size_mlp, config.intermediate_size
    pairs = [pair for pair in _PUBLISHED_LLAMA4 if feed_forward_size(dim, *pair) == inner]
    shared = [power for power in _POWERS if math.gcd(inner, expert) % power == 0]
    pairs += sorted(
        ((power, found) for power in shared for found in _multipliers(dim, inner, power)),
        key=lambda pair: (len(str(pair[1])), pair[0]),
    )
    for multiple_of, multiplier in pairs:
        capacity = float(max(1, math.ceil(multiplier) - 1))
        for ffn_exp in _expansions(dim, expert, multiple_of, multiplier, capacity):
            if expert_size(dim, multiple_of, multiplier, ffn_exp, capacity) == expert:
                return multiple_of, multiplier, ffn_exp, capacity
    raise AssertionError(f"no parameters for sizes {dim}, {inner}, {expert}")


def _expansions(
    dim: int, expert: int, multiple_of: int, multiplier: float, capacity: float
) -> Iterable[float]:
    yield 4.0  # the releases'
    scale = 1.5 * (capacity + 1) / multiplier / dim
    for decimals in range(1, 5):
        yield round((expert - multiple_of // 2) * scale, decimals)
    # The formula's first step makes an integer of it; the neighbours of the quotient, to its last digit.
    middle = int(expert * scale * dim)
    reach = math.ceil(3 * scale * dim) + 3
    yield from ((middle + step + 0.5) / dim for step in range(-reach, reach))


def _compare(config: Any, again: Any) -> dict[str, Any]:
    """Fields of `config` that `again`, read from its parameters, lacks; those that matter are refused."""
    kept: dict[str, Any] = {}
    free = _FREE | _without_effect(config)
    for name in _fields(type(config)):
        value, read = getattr(config, name), getattr(again, name)
        if isinstance(value, LlamoeBaseConfig):
            if part := _compare(value, read):
                kept[name] = part
        elif name in free or (name == "attn_temperature_tuning" and bool(value) == bool(read)):
            if value != read:
                kept[name] = value
        elif name == "tie_word_embeddings":
            pass  # written as a copy; the caller says so
        elif name == "rope_parameters":
            if _rope_content(value) != _rope_content(read):
                fail(config, name, value, "Meta's code cannot compute it", repr(_rope_content(read)))
        elif value != read:
            fail(
                config,
                name,
                value,
                "Meta's params.json cannot express it, its code would compute with another",
                repr(read),
            )
    return kept


def _fields(config_class: type) -> list[str]:
    annotations = inspect.get_annotations(config_class)
    names = [
        name
        for name, kind in annotations.items()
        if get_origin(kind) is not ClassVar and kind is not ClassVar
    ]
    return names + [name for name in getattr(config_class, "sub_configs", {}) if name not in names]


def _without_effect(config: Any) -> set[str]:
    """Fields of a Llama 4 decoder that none of its layers uses."""
    if not isinstance(config, LlamoeTextConfig):
        return set()
    plans = [config.layer_plan(idx) for idx in range(config.num_hidden_layers)]
    fields = set()
    if not any(plan.is_moe for plan in plans):
        fields |= {"intermediate_size", "num_local_experts", "num_experts_per_tok"}
    if all(plan.is_moe for plan in plans):
        fields.add("intermediate_size_mlp")
    if "chunked_attention" not in config.layer_types:
        fields.add("attention_chunk_size")
    if not any(plan.use_rope for plan in plans):
        fields |= {"use_qk_norm", "rope_parameters"}
    if all(plan.use_rope for plan in plans):
        fields |= {"attn_temperature_tuning"}
    if not any(plan.use_temperature_tuning for plan in plans):
        fields |= {"floor_scale", "attn_scale"}
    return fields


def _rope_content(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """What of rotary parameters the rotation depends on."""
    parameters = dict(parameters or {})
    names = ["rope_type", "rope_theta"]
    if parameters.get("rope_type") != "default":
        names += [name for name in parameters if name not in ("rope_type", "rope_theta", "type")]
    return {name: parameters.get(name) for name in sorted(names)}


def add_kept(config: LlamoeBaseConfig, kept: Mapping[str, Any], origin: str) -> LlamoeBaseConfig:
    """Put the content of `llamoe.json` into a configuration that was read from `params.json`.

    Raises:
        CheckpointError: the file holds what it may not decide.
    """
    kept = dict(kept)
    for name, part in kept.items():
        if name in getattr(config, "sub_configs", {}) and isinstance(part, Mapping):
            add_kept(getattr(config, name), part, f"{origin}: {name}")
            continue
        if name not in _fields(type(config)) or name not in (_FREE | _KEPT_WITHOUT_EFFECT):
            raise CheckpointError(
                f"{origin}: {name} = {part!r} is no field that this file may hold; params.json and the tensors "
                f"decide what the model computes"
            )
        try:
            setattr(config, name, part)
        except ValueError as error:
            raise CheckpointError(f"{origin}: {error}") from None
    return config


_KEPT_WITHOUT_EFFECT = frozenset(
    "intermediate_size num_local_experts num_experts_per_tok intermediate_size_mlp attention_chunk_size use_qk_norm "
    "rope_parameters attn_temperature_tuning floor_scale attn_scale".split()
)
