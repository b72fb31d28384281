"""Meta's and Mistral AI's models, written out as functions of dictionaries of whole, unfused tensors.

They are the reference of the converters' tests, so they use neither llamoe nor transformers. Weights have the names of
Meta's modules (`layers.0.attention.wq.weight`), sizes come from a dictionary with the keys of params.json. Whole
sequences are computed without a cache, in the dtype of the weights (float32, or float64 for a reference).

Sources: meta-llama/llama (`llama/model.py`), meta-llama/llama-models (`models/llama4/model.py`, `moe.py`,
`vision/encoder.py`, `vision/embedding.py`), mistralai/mistral-inference (`transformer.py`, `transformer_layers.py`,
`rope.py`, `moe.py`, `cache.py`).
"""

import math

import torch
from torch.nn.functional import gelu, layer_norm, silu, softmax


def decoder_logits(
    weights: dict[str, torch.Tensor],
    params: dict,
    ids: torch.Tensor,
    tiles: torch.Tensor | None = None,
    patch_id: int | None = None,
    windows: tuple[int | None, ...] | None = None,
) -> torch.Tensor:
    """Compute logits `[batch, tokens, vocabulary]` for ids `[batch, tokens]`.

    Args:
        weights: tensors by Meta's names; a layer is a mixture if it has a router.
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
    positions = torch.arange(ids.shape[1])
    turns = rotations(params, positions)
    back = positions[:, None] - positions
    chunk, nope_interval = params.get("attention_chunk_size"), params.get("nope_layer_interval")
    eps = params.get("norm_eps", 1e-5)
    for layer in range(params["n_layers"]):
        own = part(weights, f"layers.{layer}.")
        is_nope = bool(nope_interval) and (layer + 1) % nope_interval == 0
        is_hidden = back < 0
        if windows and windows[layer]:
            is_hidden = is_hidden | (back >= windows[layer])
        if chunk and not is_nope:
            is_hidden = is_hidden | (positions[:, None] // chunk != positions // chunk)
        normed = rms_norm(x, eps) * own["attention_norm.weight"]
        x = x + attention(
            part(own, "attention."),
            params,
            normed,
            is_hidden,
            None if is_nope else turns,
            temperatures(params, positions, x.dtype) if is_nope else None,
        )
        x = x + feed_forward(part(own, "feed_forward."), params, rms_norm(x, eps) * own["ffn_norm.weight"])
    return (rms_norm(x, eps) * weights["norm.weight"]) @ weights["output.weight"].T


def part(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the weights whose names begin with a prefix, by their names without the prefix."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide `x` by the root of its mean square over the last axis, without a weight."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotations(params: dict, positions: torch.Tensor) -> torch.Tensor:
    """Return the complex factors of the rotary embedding, `[positions, head_dim / 2]`."""
    head_dim = params.get("head_dim") or params["dim"] // params["n_heads"]
    # Defaults for what params.json may leave out: the base, and two factors of `use_scaled_rope`.
    theta, factor, high = (500000.0, 16.0, 1.0) if "moe_args" in params else (10000.0, 8.0, 4.0)
    theta = params.get("rope_theta") or theta
    frequencies = [theta ** (-2 * j / head_dim) for j in range(head_dim // 2)]
    if params.get("use_scaled_rope"):
        factor = params.get("rope_scaling_factor") or factor
        high = params.get("rope_high_freq_factor") or high
        frequencies = [scaled_frequency(f, factor, high) for f in frequencies]
    angles = positions[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    return torch.polar(torch.ones_like(angles), angles)


def scaled_frequency(frequency: float, factor: float, high: float, old_length: float = 8192.0) -> float:
    """Divide low frequencies by `factor`, keep high ones, and blend those between (with a low factor of 1)."""
    wavelength = 2 * math.pi / frequency
    if wavelength < old_length / high:
        return frequency
    if wavelength > old_length:
        return frequency / factor
    share = (old_length / wavelength - 1) / (high - 1)
    return (1 - share) * frequency / factor + share * frequency


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate adjacent channels (2j, 2j + 1) of `x` `[batch, tokens, heads, head_dim]` as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, None, :].to(pairs.dtype)).flatten(-2)


def temperatures(params: dict, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the factors of queries in layers without rotary embedding, `[positions]`; None if tuning is off."""
    if not params.get("attn_temperature_tuning"):
        return None
    floor_scale, scale = params.get("floor_scale", 8192.0), params.get("attn_scale", 0.1)
    return 1 + scale * torch.log(1 + torch.floor((positions.to(dtype) + 1) / floor_scale))


def attention(
    weights: dict[str, torch.Tensor],
    params: dict,
    x: torch.Tensor,
    is_hidden: torch.Tensor,
    turns: torch.Tensor | None,
    temperature: torch.Tensor | None,
) -> torch.Tensor:
    """Apply grouped-query attention: rotary embedding, then the norm of q and k, then the temperature."""
    heads = params["n_heads"]
    counts = heads, *[params.get("n_kv_heads") or heads] * 2
    q, k, v = (
        linear(weights, name, x).unflatten(-1, (count, -1))
        for name, count in zip(("wq", "wk", "wv"), counts, strict=True)
    )
    if turns is not None:
        q, k = rotate(q, turns), rotate(k, turns)
        if params.get("use_qk_norm"):
            eps = params.get("norm_eps", 1e-5)
            q, k = rms_norm(q, eps), rms_norm(k, eps)
    if temperature is not None:
        q = q * temperature[:, None, None]
    return linear(weights, "wo", attended(q, k, v, is_hidden))


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_hidden: torch.Tensor | None = None
) -> torch.Tensor:
    """Return attended values `[batch, tokens, heads * head_dim]` for q, k and v `[batch, tokens, heads, head_dim]`.

    `is_hidden` `[tokens, tokens]` is True where a query (row) must not attend to a key (column).
    """
    outputs = []
    for head in range(q.shape[2]):
        group = head // (q.shape[2] // k.shape[2])
        scores = q[:, :, head] @ k[:, :, group].mT / math.sqrt(q.shape[-1])
        if is_hidden is not None:
            scores = scores.masked_fill(is_hidden, -math.inf)
        outputs.append(softmax(scores, -1) @ v[:, :, group])
    return torch.cat(outputs, -1)


def feed_forward(weights: dict[str, torch.Tensor], params: dict, x: torch.Tensor) -> torch.Tensor:
    """Apply Llama 4's mixture, Mixtral's, or a dense feed-forward, chosen by the names of the weights."""
    if "router_DE" in weights:
        return mixture_of_llama4(weights, params["moe_args"].get("top_k", 1), x)
    if "gate.weight" in weights:
        return mixture_of_mixtral(weights, params["num_experts_per_tok"], x)
    return swiglu(weights, x)


def swiglu(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply the gated feed-forward: w1 is the gate, w3 the up and w2 the down projection."""
    return linear(weights, "w2", silu(linear(weights, "w1", x)) * linear(weights, "w3", x))


def mixture_of_llama4(weights: dict[str, torch.Tensor], top_k: int, x: torch.Tensor) -> torch.Tensor:
    """Add the outputs of the shared expert for `x` and of each chosen expert for `x` times sigmoid(its logit)."""
    result = swiglu(part(weights, "shared_expert."), x)
    logits = x @ weights["router_DE"]
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    chosen.scatter_(-1, logits.topk(top_k, -1).indices, True)
    for expert in range(logits.shape[-1]):
        w1, w2, w3 = (weights[f"experts.{name}"][expert] for name in ("w1", "w2", "w3"))  # [in, out]
        scaled = x * torch.sigmoid(logits[..., expert, None])
        output = (silu(scaled @ w1) * (scaled @ w3)) @ w2
        result = result + torch.where(chosen[..., expert, None], output, torch.zeros_like(output))
    return result


def mixture_of_mixtral(weights: dict[str, torch.Tensor], top_k: int, x: torch.Tensor) -> torch.Tensor:
    """Choose the experts with the largest logits, and add their outputs weighted by the softmax of those logits."""
    logits = linear(weights, "gate", x)
    kept, chosen = logits.topk(top_k)
    scores = torch.zeros_like(logits).scatter(-1, chosen, softmax(kept, -1))
    results = [swiglu(part(weights, f"experts.{expert}."), x) for expert in range(logits.shape[-1])]
    return (torch.stack(results, -1) * scores[..., None, :]).sum(-1)


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
    turns = patch_rotations(rows, columns, args["dim"] // heads)
    for layer in range(args["n_layers"]):
        own = part(encoder, f"transformer.resblocks.{layer}.")
        normed = norm_with_bias(own, "ln_1", x)
        q, k, v = (
            linear(own, f"attn.{name}", normed).unflatten(-1, (heads, -1)) for name in ("wq", "wk", "wv")
        )
        x = x + linear(own, "attn.wo", attended(rotate(q, turns), rotate(k, turns), v))
        inner = gelu(linear(own, "mlp.c_fc", norm_with_bias(own, "ln_2", x)))
        x = x + linear(own, "mlp.c_proj", inner)
    x = norm_with_bias(encoder, "ln_post", x)[:, :-1]
    x = pixel_shuffle(x.unflatten(1, (rows, columns)), round(1 / args["pixel_shuffle_ratio"])).flatten(1, 2)
    adapter = part(weights, "vision_embeddings.vision_adapter.mlp.")
    return gelu(linear(adapter, "c_proj", gelu(linear(adapter, "c_fc", x))))


def linear(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """Multiply `x` by the transposed weight, and add the bias if the layer has one."""
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def norm_with_bias(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply layer norm with weight and bias, and an epsilon of 1e-5."""
    return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def patch_rotations(rows: int, columns: int, head_dim: int) -> torch.Tensor:
    """Return complex rotary factors `[patches + 1, head_dim / 2]`: half of the pairs by column, half by row."""
    frequencies = [10000.0 ** (-2 * j / (head_dim // 2)) for j in range(head_dim // 4)]
    angles = [
        [(column + 1) * f for f in frequencies] + [(row + 1) * f for f in frequencies]
        for row in range(rows)
        for column in range(columns)
    ]
    angles.append([0.0] * (head_dim // 2))  # the class token is the last
    angles = torch.tensor(angles, dtype=torch.float64)
    return torch.polar(torch.ones_like(angles), angles)


def pixel_shuffle(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Join the channels of each `factor` x `factor` square of patches; `x` is `[tiles, rows, columns, channels]`."""
    shifted = [x[:, row::factor, column::factor] for row in range(factor) for column in range(factor)]
    return torch.cat(shifted, -1)
