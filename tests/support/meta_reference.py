"""Compute Meta's and Mistral AI's models in float64, from dictionaries of whole, unfused tensors.

The results are the reference of the converters' tests. The fuzzer's decoder, which uses nothing of llamoe, computes the
layers; Meta's rotary frequencies and vision encoder are written out here. Weights have the names of Meta's modules
(`layers.0.attention.wq.weight`), sizes come from a dictionary with the keys of params.json.

Sources: meta-llama/llama (`llama/model.py`), meta-llama/llama-models (`models/llama4/model.py`, `moe.py`,
`vision/encoder.py`, `vision/embedding.py`), mistralai/mistral-inference (`transformer.py`, `transformer_layers.py`,
`rope.py`, `moe.py`, `cache.py`).
"""

import math
import re

import torch
from fuzz.reference import Decoder, rotate
from torch.nn.functional import gelu, layer_norm, softmax

# Patterns in Meta's names, with what replaces them in the names of the fuzzer's decoder.
NAMES = {
    r"^tok_embeddings": "model.embed_tokens",
    r"^output": "lm_head",
    r"^(norm|layers)": r"model.\1",
    r"attention_norm": "input_layernorm",
    r"ffn_norm": "post_attention_layernorm",
    r"attention\.w(.)": r"self_attn.\1_proj",
    r"\bw1\b": "gate_proj",
    r"\bw3\b": "up_proj",
    r"\bw2\b": "down_proj",
    r"router_DE": "router.weight",
}


class MetaDecoder(Decoder):
    """The fuzzer's decoder with the weights, parameters and rotary frequencies of Meta's models."""

    def __init__(self, weights: dict[str, torch.Tensor], params: dict, windows: tuple[int | None, ...]):
        self.params = params
        is_llama4, is_mixtral = "moe_args" in params, "layers.0.feed_forward.gate.weight" in weights
        mixture, count = params.get("moe_args") or {}, params["n_layers"]
        config = {
            "model_type": "llama4_text" if is_llama4 else "mixtral" if is_mixtral else "mistral",
            "num_hidden_layers": count,
            "head_dim": params.get("head_dim") or params["dim"] // params["n_heads"],
            "hidden_act": "silu",
            "rms_norm_eps": params.get("norm_eps", 1e-5),
            # Meta rotates adjacent channels.
            "rope_interleave": True,
            "no_rope_layer_interval": params.get("nope_layer_interval"),
            "attention_chunk_size": params.get("attention_chunk_size"),
            "use_qk_norm": params.get("use_qk_norm"),
            "attn_temperature_tuning": params.get("attn_temperature_tuning"),
            "floor_scale": params.get("floor_scale", 8192.0),
            "attn_scale": params.get("attn_scale", 0.1),
            "moe_layers": [i for i in range(count) if f"layers.{i}.feed_forward.router_DE" in weights],
            "num_experts_per_tok": params.get("num_experts_per_tok") or mixture.get("top_k", 1),
        }
        if any(windows):
            types = ["sliding_attention" if window else "full_attention" for window in windows]
            config |= {"sliding_window": max(filter(None, windows)), "layer_types": types}
        super().__init__({}, config, None)
        self.weights = self.renamed(weights)

    def renamed(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights under the names of the fuzzer's decoder, with its stacks of experts."""
        result = {}
        for name, tensor in weights.items():
            for pattern, replacement in NAMES.items():
                name = re.sub(pattern, replacement, name)
            name = name.replace("feed_forward", self.feed_forward_name)
            result[name] = tensor.T if name.endswith("router.weight") else tensor
        for layer in range(self.params["n_layers"]):
            mixture = f"model.layers.{layer}.{self.feed_forward_name}."
            if f"{mixture}gate.weight" in result:
                experts = range(len(result[f"{mixture}gate.weight"]))
                for part in ("gate", "up", "down"):
                    names = [f"{mixture}experts.{expert}.{part}_proj.weight" for expert in experts]
                    result[f"{mixture}experts.{part}_proj"] = torch.stack([result[name] for name in names])
            if f"{mixture}experts.gate_proj" in result:
                pair = [result[f"{mixture}experts.{part}_proj"] for part in ("gate", "up")]
                # Stacks are [E, out, in] or [E, in, out].
                axis = 1 if self.experts_are_output_first else 2
                result[f"{mixture}experts.gate_up_proj"] = torch.cat(pair, axis)
        return result

    def frequencies(self, reach: int | None) -> tuple[torch.Tensor, float]:
        """Return Meta's rotary frequencies `[d / 2]`, and 1, the factor of cosine and sine."""
        params, dim = self.params, self.config["head_dim"]
        # Defaults for what params.json may leave out: the base, and two factors of `use_scaled_rope`.
        theta, factor, high = (500000.0, 16.0, 1.0) if "moe_args" in params else (10000.0, 8.0, 4.0)
        theta = params.get("rope_theta") or theta
        frequencies = [theta ** (-2 * j / dim) for j in range(dim // 2)]
        if params.get("use_scaled_rope"):
            factor = params.get("rope_scaling_factor") or factor
            high = params.get("rope_high_freq_factor") or high
            frequencies = [scaled_frequency(f, factor, high) for f in frequencies]
        return torch.tensor(frequencies, dtype=torch.float64), 1.0


def decoder_logits(
    weights: dict[str, torch.Tensor],
    params: dict,
    ids: torch.Tensor,
    tiles: torch.Tensor | None = None,
    patch_id: int | None = None,
    windows: tuple[int | None, ...] = (),
) -> torch.Tensor:
    """Compute logits `[batch, tokens, vocabulary]` for ids `[batch, tokens]`.

    Args:
        weights: tensors in float64 by Meta's names.
        params: content of params.json; Llama 4's has "moe_args".
        ids: tokens.
        tiles: `[tiles, 3, height, width]`, whose features replace the embeddings of the `patch_id` tokens.
        patch_id: id of the image token.
        windows: for each layer the number of tokens that a token attends to, itself included; None: no limit.
    """
    x = weights["tok_embeddings.weight"][ids]
    if tiles is not None:
        features = encode_tiles(weights, params["vision_args"], tiles) @ weights["vision_projection.weight"].T
        x[ids == patch_id] = features.flatten(0, 1)
    decoder, positions = MetaDecoder(weights, params, windows), torch.arange(ids.shape[1])
    return torch.stack([decoder(row, positions).logits for row in x])


def scaled_frequency(frequency: float, factor: float, high: float, old_length: float = 8192.0) -> float:
    """Divide low frequencies by `factor`, keep high ones, and blend those between (with a low factor of 1)."""
    wavelength = 2 * math.pi / frequency
    if wavelength < old_length / high:
        return frequency
    if wavelength > old_length:
        return frequency / factor
    share = (old_length / wavelength - 1) / (high - 1)
    return (1 - share) * frequency / factor + share * frequency


def part(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the weights whose names begin with a prefix, by their names without the prefix."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def encode_tiles(weights: dict[str, torch.Tensor], args: dict, tiles: torch.Tensor) -> torch.Tensor:
    """Return the vision encoder's features after its adapter, before the projection, `[tiles, tokens, output_dim]`."""
    encoder = part(weights, "vision_embeddings.vision_encoder.")
    patch_height, patch_width = args["patch_size"]["height"], args["patch_size"]["width"]
    count, channels, height, width = tiles.shape
    rows, columns = height // patch_height, width // patch_width
    patches = tiles.reshape(count, channels, rows, patch_height, columns, patch_width)
    # Flatten each patch by channel, row and column.
    patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(count, rows * columns, -1)
    x = linear(encoder, "conv1._linear", patches)
    x = torch.cat([x, encoder["class_embedding"].expand(count, 1, -1)], 1)
    x = norm_with_bias(encoder, "ln_pre", x + encoder["positional_embedding_vlm"])
    heads = args["n_heads"]
    angles = patch_angles(rows, columns, args["dim"] // heads)
    for layer in range(args["n_layers"]):
        block = part(encoder, f"transformer.resblocks.{layer}.")
        normed = norm_with_bias(block, "ln_1", x)
        q, k, v = (
            linear(block, f"attn.{name}", normed).unflatten(-1, (heads, -1)) for name in ("wq", "wk", "wv")
        )
        x = x + linear(block, "attn.wo", attend(*(rotate(y, angles, 1.0, True) for y in (q, k)), v))
        inner = gelu(linear(block, "mlp.c_fc", norm_with_bias(block, "ln_2", x)))
        x = x + linear(block, "mlp.c_proj", inner)
    x = norm_with_bias(encoder, "ln_post", x)[:, :-1]
    x = pixel_shuffle(x.unflatten(1, (rows, columns)), round(1 / args["pixel_shuffle_ratio"])).flatten(1, 2)
    adapter = part(weights, "vision_embeddings.vision_adapter.mlp.")
    return gelu(linear(adapter, "c_proj", gelu(linear(adapter, "c_fc", x))))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend from every query to every key: map q, k, v `[batch, tokens, heads, d]` to `[batch, tokens, heads * d]`."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bkhd->bqhd", softmax(scores, -1), v).flatten(2)


def linear(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """Multiply `x` by the transposed weight, and add the bias if the layer has one."""
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def norm_with_bias(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply layer norm with weight and bias, and an epsilon of 1e-5."""
    return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def patch_angles(rows: int, columns: int, head_dim: int) -> torch.Tensor:
    """Return rotary angles `[patches + 1, head_dim / 2]`: half by column, half by row; the class token is the last."""
    frequencies = [10000.0 ** (-2 * j / (head_dim // 2)) for j in range(head_dim // 4)]
    angles = [
        [(column + 1) * f for f in frequencies] + [(row + 1) * f for f in frequencies]
        for row in range(rows)
        for column in range(columns)
    ]
    angles.append([0.0] * (head_dim // 2))
    return torch.tensor(angles, dtype=torch.float64)


def pixel_shuffle(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Join the channels of each `factor` x `factor` square of patches; `x` is `[tiles, rows, columns, channels]`."""
    shifted = [x[:, row::factor, column::factor] for row in range(factor) for column in range(factor)]
    return torch.cat(shifted, -1)
