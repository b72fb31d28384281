"""Draw random configurations of every family, in stock's fields."""

import random
from typing import Any

from .reference import DENSE


def chance(rng: random.Random, share: float) -> bool:
    """Return True with this probability."""
    return rng.random() < share


def draw_heads(rng: random.Random, step: int = 2) -> dict[str, int]:
    """Draw numbers of heads, and a head size that is a multiple of `step`."""
    kv_heads = rng.choice([1, 1, 2, 3])
    return dict(
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * rng.choice([1, 1, 2, 3, 5]),
        head_dim=step * rng.choice([1, 2, 3, 4, 5, 7, 8, 10, 13]),
    )


def draw_rope(rng: random.Random, head_dim: int, by_length: bool) -> dict[str, Any]:
    """Draw the fields of a rotary embedding; `by_length` adds the types that depend on the length of a forward."""
    pairs = head_dim // 2
    theta = rng.choice([10000.0, 500000.0, 100.0, 7.5, 1000000.0])
    kinds = ["linear", "yarn", "llama3", "proportional"] + ["dynamic", "longrope"] * by_length
    kind = rng.choice(kinds) if chance(rng, 0.4) else "default"
    factor = rng.choice([1.0, 2.0, 4.0, 3.7])
    original = rng.choice([16, 32, 64])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    longest = rng.choice([128, 256])
    match kind:
        case "linear":
            rope |= dict(factor=factor)
        case "dynamic":
            rope |= dict(factor=factor)
            longest = rng.choice([16, 32, 128])
            if head_dim == 2:
                # The type divides by the head size minus two.
                rope["rope_type"] = "default"
        case "yarn":
            rope |= dict(factor=factor, original_max_position_embeddings=original)
            if chance(rng, 0.5):
                rope |= dict(beta_fast=rng.choice([4.0, 16.0, 32.0]), beta_slow=rng.choice([1.0, 0.5]))
            if chance(rng, 0.4):
                rope |= dict(mscale=rng.choice([0.7, 1.0]), mscale_all_dim=rng.choice([0.4, 1.0]))
            if chance(rng, 0.3):
                rope |= dict(truncate=False)
            if chance(rng, 0.2):
                rope |= dict(attention_factor=rng.choice([0.8, 1.3]))
        case "longrope":
            longest = 128
            short = [1.0 + 0.3 * rng.random() for _ in range(pairs)]
            long = [1.0 + 3 * rng.random() for _ in range(pairs)]
            rope |= dict(
                factor=factor, original_max_position_embeddings=original, short_factor=short, long_factor=long
            )
        case "llama3":
            rope |= dict(factor=factor, original_max_position_embeddings=original)
            rope |= dict(low_freq_factor=1.0, high_freq_factor=rng.choice([2.0, 4.0]))
        case "proportional":
            rope |= dict(partial_rotary_factor=rng.choice([0.25, 0.5, 1.0]), factor=factor)
    return dict(rope_parameters=rope, max_position_embeddings=longest)


def _common(rng: random.Random, heads: dict[str, int], by_length: bool) -> dict[str, Any]:
    return {
        **heads,
        "vocab_size": rng.choice([11, 37, 53, 101]),
        "hidden_size": rng.choice([6, 9, 16, 24, 33, 40, 72]),
        "num_hidden_layers": rng.choice([1, 2, 2, 3, 3, 4, 5]),
        "hidden_act": rng.choice(["silu"] * 6 + ["gelu", "relu", "gelu_pytorch_tanh"]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6, 1e-3]),
        "tie_word_embeddings": chance(rng, 0.3),
        "attention_bias": chance(rng, 0.3),
        "pad_token_id": rng.choice([None, 0, 0, 5]),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **draw_rope(rng, heads["head_dim"], by_length),
    }


def draw_dense(rng: random.Random, by_length: bool, for_stock: bool, model_type: str) -> dict[str, Any]:
    """Draw the fields of a dense decoder's stock configuration; `for_stock` draws only values that stock accepts.

    `model_type` is "llama", "mistral" (a window in all layers) or "ministral" (a window in some layers).
    """
    heads = draw_heads(rng)
    fields = {"model_type": model_type, **_common(rng, heads, by_length)}
    fields["intermediate_size"] = rng.choice([1, 7, 16, 30, 92])
    fields["mlp_bias"] = chance(rng, 0.3)
    # Stock's llama requires the hidden size to be a multiple of the number of heads.
    if (for_stock and model_type == "llama") or chance(rng, 0.7):
        fields["hidden_size"] = heads["num_attention_heads"] * rng.choice([2, 4, 7, 8])
    if model_type != "llama":
        fields["sliding_window"] = draw_window(rng) if model_type == "ministral" or chance(rng, 0.9) else None
        if for_stock:
            fields |= {"attention_bias": False, "mlp_bias": False}
    if model_type == "ministral":
        fields["layer_types"] = draw_layer_types(rng, fields["num_hidden_layers"])
    return fields


def draw_window(rng: random.Random) -> int:
    return rng.choice([1, 2, 2, 3, 4, 5, 7, 8, 15, 16, 17, 18, 33, 4096])


def draw_layer_types(rng: random.Random, count: int, local: str = "sliding_attention") -> list[str]:
    return [rng.choice(["full_attention", local]) for _ in range(count)]


def draw_experts(rng: random.Random) -> dict[str, Any]:
    count = rng.choice([1, 2, 3, 4, 5, 7, 8, 16])
    return {
        "intermediate_size": rng.choice([1, 5, 8, 16, 24, 52]),
        "num_local_experts": count,
        "num_experts_per_tok": rng.choice([1, 1, min(2, count), rng.randint(1, count), count]),
    }


def draw_rule(rng: random.Random) -> dict[str, Any]:
    """Draw the fields of a routing rule, which stock does not have."""
    function = rng.choice(["softmax", "softmax", "sigmoid"])
    return {
        "router_score_function": function,
        "router_pre_softmax": function == "softmax" and chance(rng, 0.5),
        "norm_topk_prob": chance(rng, 0.5),
        "apply_router_weight_on_input": chance(rng, 0.5),
        "use_shared_expert": chance(rng, 0.5),
    }


def draw_mixtral(rng: random.Random, by_length: bool, for_stock: bool) -> dict[str, Any]:
    """Draw the fields of a `MixtralConfig`; `for_stock` draws only values that stock accepts."""
    fields = {"model_type": "mixtral", **_common(rng, draw_heads(rng), by_length)}
    del fields["attention_bias"]
    fields |= draw_experts(rng)
    fields["sliding_window"] = draw_window(rng) if chance(rng, 0.5) else None
    if not for_stock:
        if fields["sliding_window"] is not None and chance(rng, 0.3):
            fields["layer_types"] = draw_layer_types(rng, fields["num_hidden_layers"])
        if chance(rng, 0.4):
            fields |= draw_rule(rng)
    return fields


def draw_text(rng: random.Random, by_length: bool, for_stock: bool) -> dict[str, Any]:
    """Draw the fields of a `Llama4TextConfig`; `for_stock` draws only values that stock accepts."""
    never_rotates = chance(rng, 0.05)
    heads = draw_heads(rng, 1 if never_rotates and not for_stock else 2)
    fields = {"model_type": "llama4_text", **_common(rng, heads, by_length and not never_rotates)}
    if never_rotates:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    count = fields["num_hidden_layers"]
    fields |= draw_experts(rng)
    fields |= dict(
        intermediate_size_mlp=rng.choice([3, 16, 30, 92]),
        interleave_moe_layer_step=rng.choice([1, 1, 2, 3]),
        no_rope_layer_interval=rng.choice([2, 2, 3, 4]),
        attention_chunk_size=rng.choice([1, 2, 3, 5, 8, 16, 16, 40, 8192]),
        use_qk_norm=chance(rng, 0.6),
        attn_temperature_tuning=chance(rng, 0.7),
        floor_scale=rng.choice([1, 2, 3, 8, 8, 8192]),
        attn_scale=rng.choice([0.1, 0.1, 0.5, 0.0]),
    )
    if chance(rng, 0.3):
        fields["moe_layers"] = sorted(rng.sample(range(count), rng.randint(0, count)))
    if never_rotates:
        fields["no_rope_layers"] = [0] * count
    elif chance(rng, 0.35):
        fields["no_rope_layers"] = [rng.choice([0, 1, 1]) for _ in range(count)]
    if chance(rng, 0.3):
        fields["layer_types"] = draw_layer_types(rng, count, "chunked_attention")
    if not for_stock:
        if chance(rng, 0.1):
            fields["attention_chunk_size"] = None
        if chance(rng, 0.1):
            fields["no_rope_layer_interval"] = rng.choice([None, 0])
        if chance(rng, 0.15):
            fields["mlp_bias"] = True
        if chance(rng, 0.3):
            fields |= draw_rule(rng)
    return fields


def draw_fields(rng: random.Random, family: str, by_length: bool, for_stock: bool) -> dict[str, Any]:
    """Draw the fields of a family's stock configuration."""
    if family in DENSE:
        fields = draw_dense(rng, by_length, for_stock, family)
    else:
        fields = (draw_mixtral if family == "mixtral" else draw_text)(rng, by_length, for_stock)
    if not for_stock and chance(rng, 0.15):
        fields["rope_interleave"] = family != "llama4_text"
    return fields
