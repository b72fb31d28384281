"""Our configurations as Meta's `params.json`, and as `llamoe.json` for fields that have no key there.

The new `params.json` is read again as Meta's code reads it, with its formulas for hidden sizes. A field that would then
differ and changes what the model computes is refused by name. Fields that do not change the output (context length,
token ids, training options) have no place in `params.json`, since LLaMA's own code refuses unknown keys. They go into
`llamoe.json` beside it, which Meta's code never opens.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...configuration import LlamoeConfig, LlamoeDenseConfig, LlamoeTextConfig, LlamoeVisionConfig
from ...configuration.base import LlamoeBaseConfig
from ...configuration.checks import fail
from ...configuration.effects import NO_EFFECT, declared_fields, fields_without_effect
from ...configuration.errors import CheckpointError
from .params_to_config import (
    LARGEST_SENTENCEPIECE,
    SCALING,
    Params,
    Seen,
    expert_size,
    feed_forward_size,
    read_config,
    scaling_factors,
)

# Fields without effect that a reader would otherwise guess from the folder's name or from the LLaMA generation.
_ALWAYS_KEPT = frozenset(
    "max_position_embeddings pad_token_id bos_token_id eos_token_id boi_token_index eoi_token_index "
    "image_token_index".split()
)

# Published pairs of multiple_of and ffn_dim_multiplier. Tried first, so that published sizes get their own values back.
_PUBLISHED = ((256, None), (4096, 1.3), (1024, 1.3))
_PUBLISHED_LLAMA4 = ((2048, 1.2),)
_POWERS = tuple(2**n for n in range(13))
_FACTORS = {"rope_scaling_factor": "factor", "rope_high_freq_factor": "high_freq_factor"}


def write_params(config: LlamoeBaseConfig, generation: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of `params.json` and of `llamoe.json` for a configuration.

    `generation` is 2 or 3 for the dense family, 4 otherwise.

    Raises:
        ValueError: a field has a value that Meta's code cannot compute; the message names it.
    """
    if isinstance(config, LlamoeDenseConfig):
        params = _write_dense(config, generation)
    else:
        assert isinstance(config, (LlamoeTextConfig, LlamoeConfig))
        assert generation == 4
        params = _write_text(config)
    vocab_size = config.get_text_config().vocab_size
    again = read_config(Params.of(params, "params.json"), Seen(generation, vocab_size))
    return params, compare_fields(config, again)


def _write_decoder(config: LlamoeDenseConfig | LlamoeTextConfig) -> dict[str, Any]:
    assert config.head_dim is not None
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
        # LLaMA 1's code does not have this key.
        del params["n_kv_heads"]
    params["multiple_of"], multiplier = _fit_dense(config)
    if multiplier is not None:
        params["ffn_dim_multiplier"] = multiplier
    rope = config.rope_parameters or {}
    # Without a tokenizer, a reader assumes Llama 3 and its default base for a large vocabulary.
    if generation == 3 or rope.get("rope_theta") != 10000.0 or config.vocab_size > LARGEST_SENTENCEPIECE:
        params["rope_theta"] = rope.get("rope_theta")
    if rope.get("rope_type") == "llama3":
        params["use_scaled_rope"] = True
        # Written where they are not the constants of Meta's code, and where a reader would take others.
        taken = scaling_factors(Params(dict(params), "params.json"), 3)
        for (name, key), *defaults in zip(_FACTORS.items(), SCALING[3], taken, strict=True):
            if any(rope.get(key) != default for default in defaults):
                params[name] = rope.get(key)
    return params


def needs_own_scaling(params: Mapping[str, Any]) -> bool:
    """Whether a dense model's rotary scaling differs from the constants in Llama 3's code."""
    given = (params.get(name, default) for name, default in zip(_FACTORS, SCALING[3], strict=True))
    return "moe_args" not in params and tuple(given) != SCALING[3]


def _write_text(config: LlamoeTextConfig | LlamoeConfig) -> dict[str, Any]:
    text = config.text_config if isinstance(config, LlamoeConfig) else config
    assert text.layer_types is not None
    assert text.no_rope_layers is not None
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
        # So that the product is `inner` after rounding down.
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


def _multipliers(dim: int, inner: int, multiple_of: int) -> Iterable[float]:
    """Multipliers for which Meta's formula gives `inner`, those with few decimals first."""
    base = int(2 * (4 * dim) / 3)
    for decimals in range(1, 10):
        lowest = math.ceil((inner - multiple_of + 1) / base * 10**decimals)
        for candidate in (lowest, lowest + 1):
            multiplier = candidate / 10**decimals
            if multiplier > 0 and feed_forward_size(dim, multiple_of, multiplier) == inner:
                yield multiplier


def _pairs(dim: int, inner: int, powers: Iterable[int]) -> list[tuple[int, float]]:
    """Pairs of multiple_of, one of the powers, and multiplier; those with the fewest decimals first."""
    pairs = ((power, found) for power in powers for found in _multipliers(dim, inner, power))
    return sorted(pairs, key=lambda pair: (len(str(pair[1])), pair[0]))


def _fit_dense(config: LlamoeDenseConfig | LlamoeTextConfig) -> tuple[int, float | None]:
    """multiple_of and ffn_dim_multiplier for which Meta's formula gives the dense hidden size.

    Tried in this order: published pairs; the smallest power of two that needs no multiplier; the multiplier with the
    fewest decimals and the smallest power of two.
    """
    dim = config.hidden_size
    inner = (
        config.intermediate_size if isinstance(config, LlamoeDenseConfig) else config.intermediate_size_mlp
    )
    for pair in (*_PUBLISHED, *((power, None) for power in _POWERS)):
        if feed_forward_size(dim, *pair) == inner:
            return pair
    return _pairs(dim, inner, [power for power in _POWERS if inner % power == 0])[0]


def _fit_mixture(config: LlamoeTextConfig) -> tuple[int, float, float, float]:
    """multiple_of, ffn_dim_multiplier, ffn_exp and capacity_factor for which Meta's formula gives both hidden sizes.

    The capacity factor has no other effect: Meta's code limits no expert. It differs from the releases' 1.0 only
    where the multiplier is so large that the formula would skip sizes.
    """
    dim, inner, expert = config.hidden_size, config.intermediate_size_mlp, config.intermediate_size
    pairs = [pair for pair in _PUBLISHED_LLAMA4 if feed_forward_size(dim, *pair) == inner]
    shared = [power for power in _POWERS if math.gcd(inner, expert) % power == 0]
    for multiple_of, multiplier in pairs + _pairs(dim, inner, shared):
        capacity = float(max(1, math.ceil(multiplier) - 1))
        for ffn_exp in _expansions(dim, expert, multiple_of, multiplier, capacity):
            if expert_size(dim, multiple_of, multiplier, ffn_exp, capacity) == expert:
                return multiple_of, multiplier, ffn_exp, capacity
    raise AssertionError(f"no parameters for sizes {dim}, {inner}, {expert}")


def _expansions(
    dim: int, expert: int, multiple_of: int, multiplier: float, capacity: float
) -> Iterable[float]:
    # The releases' value.
    yield 4.0
    scale = 1.5 * (capacity + 1) / multiplier / dim
    for decimals in range(1, 5):
        yield round((expert - multiple_of // 2) * scale, decimals)
    # The formula first rounds down to an integer, so try the values around the quotient, to its last digit.
    middle = int(expert * scale * dim)
    reach = math.ceil(3 * scale * dim) + 3
    yield from ((middle + step + 0.5) / dim for step in range(-reach, reach))


def compare_fields(config: Any, again: Any, whose: str = "Meta's") -> dict[str, Any]:
    """Fields of `config` that `again`, read from its parameters, lacks; those that change the output are refused.

    `whose` says in messages whose params.json it is.
    """
    kept: dict[str, Any] = {}
    free = NO_EFFECT | fields_without_effect(config)
    for name in declared_fields(type(config)):
        value, read = getattr(config, name), getattr(again, name)
        if isinstance(value, LlamoeBaseConfig):
            if part := compare_fields(value, read, whose):
                kept[name] = part
        elif name in free or (name == "attn_temperature_tuning" and bool(value) == bool(read)):
            if value != read or name in _ALWAYS_KEPT:
                kept[name] = value
        elif name == "rope_parameters":
            mine, its = _rope_content(value), _rope_content(read)
            for key in ("rope_type", *sorted(mine | its)):
                if mine.get(key) != its.get(key):
                    problem = f"{whose} code cannot compute it"
                    fail(config, f"{name}[{key!r}]", mine.get(key), problem, repr(its.get(key)))
        elif value != read:
            problem = f"{whose} params.json cannot express it, its code would compute with another"
            fail(config, name, value, problem, repr(read))
    return kept


def _rope_content(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The rotary parameters that the rotation depends on."""
    parameters = dict(parameters or {})
    names = {"rope_type", "rope_theta"}
    if parameters.get("rope_type") != "default":
        names |= parameters.keys() - {"type"}
    # 1 means the whole head, as in all these models.
    if parameters.get("partial_rotary_factor") in (None, 1):
        names.discard("partial_rotary_factor")
    return {name: parameters.get(name) for name in sorted(names)}


def add_kept(config: LlamoeBaseConfig, kept: Mapping[str, Any], origin: str) -> None:
    """Add the content of `llamoe.json` to a configuration that was read from `params.json`.

    Raises:
        CheckpointError: the file holds fields that it may not set.
    """
    free = NO_EFFECT | fields_without_effect(config)
    for name, part in kept.items():
        if name in getattr(config, "sub_configs", {}) and isinstance(part, Mapping):
            add_kept(getattr(config, name), part, f"{origin}: {name}")
            continue
        same = name == "attn_temperature_tuning" and bool(part) == bool(getattr(config, name, None))
        if name not in declared_fields(type(config)) or not (name in free or same):
            raise CheckpointError(
                f"{origin}: {name} = {part!r} is not a field that this file may hold; params.json and the tensors "
                f"decide what the model computes."
            )
        try:
            setattr(config, name, part)
        except ValueError as error:
            raise CheckpointError(f"{origin}: {error}") from None
