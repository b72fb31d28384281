"""Draw weights of small models, split them into files as Meta distributes them, and join such files.

This module follows Meta's code, not the tables of llamoe's converters, which it tests. Whole weights have the unfused
names of `meta_reference`; a release of Llama 4 fuses some of the tensors in each file.
"""

import io
from functools import cache
from pathlib import Path

import torch
from support.tokenizer_files import rank_table, sentencepiece_model

# Two or three query heads share a key/value head. No two sizes are equal, so that a confused axis fails.
LLAMA_1 = dict(dim=60, n_heads=6, n_layers=2, norm_eps=1e-6, vocab_size=-1, multiple_of=9)
LLAMA_2 = dict(
    dim=60,
    n_heads=6,
    n_kv_heads=2,
    n_layers=3,
    norm_eps=1e-5,
    vocab_size=-1,
    multiple_of=28,
    ffn_dim_multiplier=1.3,
)
LLAMA_3 = {**LLAMA_2, "n_layers": 2, "rope_theta": 500000.0, "use_scaled_rope": True}
VISION = dict(
    image_size=dict(height=24, width=24),
    patch_size=dict(height=6, width=6),
    dim=72,
    n_layers=2,
    n_heads=6,
    mlp_ratio=4.0,
    output_dim=44,
    pixel_shuffle_ratio=0.5,
)
SCOUT = dict(
    dim=60,
    n_layers=5,
    n_heads=6,
    n_kv_heads=2,
    head_dim=10,
    vocab_size=-1,
    multiple_of=14,
    ffn_dim_multiplier=1.2,
    ffn_exp=4.0,
    norm_eps=1e-5,
    rope_theta=500000,
    use_scaled_rope=True,
    attention_chunk_size=8,
    nope_layer_interval=4,
    use_qk_norm=True,
    moe_args=dict(
        num_experts=5, capacity_factor=1.0, auto_scale_F=True, top_k=1, interleave_moe_layer_step=1
    ),
    vision_args=VISION,
)
MAVERICK = {
    **SCOUT,
    "n_kv_heads": 3,
    "multiple_of": 33,
    "use_scaled_rope": False,
    "use_qk_norm": False,
    "attn_temperature_tuning": True,
    "floor_scale": 8.0,
    "attn_scale": 0.1,
    "moe_args": dict(
        num_experts=7, capacity_factor=1.0, auto_scale_F=True, top_k=2, interleave_moe_layer_step=2
    ),
    "vision_args": None,
}
SPECIAL_TOKENS = {"Llama 3": 256, "Llama 4": 2048}
# Place of <|patch|> among Llama 4's special tokens.
PATCH_OFFSET = 92

# The last words of the names of matrices `[out, in]` that model-parallel ranks split by outputs, with their biases, or
# by inputs. Each rank has a copy of all other tensors.
BY_OUTPUTS = ("output", "wq", "wk", "wv", "w1", "w3", "_linear", "c_fc", "vision_projection")
BY_INPUTS = ("wo", "w2", "c_proj")
# Names in releases of Llama 4 that differ from those of Meta's modules for the same tensor.
RELEASE_NAMES = {
    "feed_forward.shared_expert.w1.weight": "feed_forward.w_in_shared_FD.weight",
    "feed_forward.shared_expert.w2.weight": "feed_forward.w_out_shared_DF.weight",
    "feed_forward.shared_expert.w3.weight": "feed_forward.w_swiglu_FD.weight",
    "feed_forward.experts.w1": "feed_forward.experts.moe_w_in_eD_F",
    "feed_forward.experts.w2": "feed_forward.experts.moe_w_out_eF_D",
    "feed_forward.experts.w3": "feed_forward.experts.moe_w_swiglu_eD_F",
    "feed_forward.w2.weight": "feed_forward.mlp.fc2_weight",
    "attention_norm.weight": "attention.wqkv.layer_norm_weight",
}


def hidden_size(params: dict) -> int:
    """Return the intermediate size of a dense feed-forward, which params.json lacks, by Meta's rule."""
    return _round_up(_widened(4 * params["dim"], params), params)


def expert_size(params: dict) -> int:
    """Return the intermediate size of Llama 4's routed and shared experts, by Meta's rule."""
    mixture = params["moe_args"]
    hidden = _widened(int(params["ffn_exp"] * params["dim"]), params)
    if mixture.get("auto_scale_F", True):
        hidden = int(hidden / (mixture.get("capacity_factor", 1.0) + 1))
    return _round_up(hidden, params)


def _widened(hidden: int, params: dict) -> int:
    return int((params.get("ffn_dim_multiplier") or 1.0) * int(2 * hidden / 3))


def _round_up(hidden: int, params: dict) -> int:
    multiple = params.get("multiple_of", 256)
    return -(-hidden // multiple) * multiple


def is_mixture(params: dict, layer: int) -> bool:
    """Return True if a layer has experts."""
    mixture = params.get("moe_args")
    return bool(mixture) and (layer + 1) % mixture.get("interleave_moe_layer_step", 1) == 0


class _Draw:
    """Draws weights whose columns grow in scale, so that a wrong split, order or transpose changes results."""

    def __init__(self, dtype: torch.dtype, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def matrix(self, *shape: int, fan_in: int | None = None) -> torch.Tensor:
        noise = torch.randn(shape, generator=self.generator) * (fan_in or shape[-1]) ** -0.5
        return (noise * torch.linspace(0.7, 1.3, shape[-1])).to(self.dtype)

    def vector(self, size: int, middle: float) -> torch.Tensor:
        return (middle + 0.1 * torch.randn(size, generator=self.generator)).to(self.dtype)


def make_weights(
    params: dict, vocabulary: int, dtype=torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Draw whole, unfused weights for the content of a params.json of Meta's or Mistral AI's."""
    draw = _Draw(dtype, seed)
    dim, heads = params["dim"], params["n_heads"]
    head_dim = params.get("head_dim") or dim // heads
    rows, kv_rows = heads * head_dim, (params.get("n_kv_heads") or heads) * head_dim
    mixtral = params.get("moe") or params
    experts_of_mixtral = mixtral.get("num_experts") or mixtral.get("num_local_experts") or 0
    weights = {"tok_embeddings.weight": draw.matrix(vocabulary, dim, fan_in=1)}
    for layer in range(params["n_layers"]):
        inner = params.get("hidden_dim") or hidden_size(params)
        own = {
            "attention.wq.weight": draw.matrix(rows, dim),
            "attention.wk.weight": draw.matrix(kv_rows, dim),
            "attention.wv.weight": draw.matrix(kv_rows, dim),
            "attention.wo.weight": draw.matrix(dim, rows),
            "attention_norm.weight": draw.vector(dim, 1.0),
            "ffn_norm.weight": draw.vector(dim, 1.0),
        }
        if is_mixture(params, layer):
            experts, inner = params["moe_args"]["num_experts"], expert_size(params)
            own["feed_forward.router_DE"] = draw.matrix(dim, experts, fan_in=dim)
            own["feed_forward.experts.w1"] = draw.matrix(experts, dim, inner, fan_in=dim)
            own["feed_forward.experts.w2"] = draw.matrix(experts, inner, dim, fan_in=inner)
            own["feed_forward.experts.w3"] = draw.matrix(experts, dim, inner, fan_in=dim)
        branches = ["feed_forward.shared_expert" if is_mixture(params, layer) else "feed_forward"]
        if experts_of_mixtral:
            own["feed_forward.gate.weight"] = draw.matrix(experts_of_mixtral, dim)
            branches = [f"feed_forward.experts.{expert}" for expert in range(experts_of_mixtral)]
        for branch in branches:
            own[f"{branch}.w1.weight"] = draw.matrix(inner, dim)
            own[f"{branch}.w2.weight"] = draw.matrix(dim, inner)
            own[f"{branch}.w3.weight"] = draw.matrix(inner, dim)
        weights.update({f"layers.{layer}.{name}": value for name, value in own.items()})
    weights["norm.weight"] = draw.vector(dim, 1.0)
    weights["output.weight"] = draw.matrix(vocabulary, dim)
    if params.get("vision_args"):
        weights.update(_vision_weights(params, draw))
    return weights


def _vision_weights(params: dict, draw: _Draw) -> dict[str, torch.Tensor]:
    args = params["vision_args"]
    dim, inner = args["dim"], int(args["mlp_ratio"] * args["dim"])
    size, patch = args["image_size"], args["patch_size"]
    patches = (size["height"] // patch["height"]) * (size["width"] // patch["width"])
    encoder = {
        "conv1._linear.weight": draw.matrix(dim, 3 * patch["height"] * patch["width"]),
        "class_embedding": draw.vector(dim, 0.0),
        "positional_embedding_vlm": draw.matrix(patches + 1, dim, fan_in=4),
    }
    for name in ("ln_pre", "ln_post"):
        encoder |= {f"{name}.weight": draw.vector(dim, 1.0), f"{name}.bias": draw.vector(dim, 0.0)}
    for layer in range(args["n_layers"]):
        shapes = {f"attn.{name}": (dim, dim) for name in ("wq", "wk", "wv", "wo")}
        shapes |= {"mlp.c_fc": (inner, dim), "mlp.c_proj": (dim, inner)}
        own = {}
        for name, shape in shapes.items():
            own |= {f"{name}.weight": draw.matrix(*shape), f"{name}.bias": draw.vector(shape[0], 0.0)}
        for name in ("ln_1", "ln_2"):
            own |= {f"{name}.weight": draw.vector(dim, 1.0), f"{name}.bias": draw.vector(dim, 0.0)}
        encoder |= {f"transformer.resblocks.{layer}.{name}": value for name, value in own.items()}
    merged = round(dim / args["pixel_shuffle_ratio"] ** 2)
    width = args["output_dim"]
    return {f"vision_embeddings.vision_encoder.{name}": value for name, value in encoder.items()} | {
        "vision_embeddings.vision_adapter.mlp.c_fc.weight": draw.matrix(width, merged),
        "vision_embeddings.vision_adapter.mlp.c_proj.weight": draw.matrix(width, width),
        "vision_projection.weight": draw.matrix(params["dim"], width),
    }


def _axis(name: str, embedding_axis: int) -> int | None:
    """Return the axis along which ranks split a tensor; None if each has a copy."""
    if name == "tok_embeddings.weight":
        return embedding_axis
    if ".experts." in name:
        # [E, in, out]
        return 1 if name.endswith("w2") else 2
    *_, word, kind = name.split(".")
    if word in BY_INPUTS:
        return 1 if kind == "weight" else None
    return 0 if word in BY_OUTPUTS else None


def split(weights: dict[str, torch.Tensor], files: int, embedding_axis: int) -> list[dict[str, torch.Tensor]]:
    """Split whole weights over `files` model-parallel ranks; return each rank's tensors by unfused names.

    LLaMA 1 and 2 split the embedding along its channels (axis 1), Llama 3 and 4 along the vocabulary (axis 0).
    """
    ranks = [{} for _ in range(files)]
    for name, value in weights.items():
        axis = _axis(name, embedding_axis)
        if axis is not None and value.shape[axis] % files:
            raise ValueError(f"{name} of shape {tuple(value.shape)} has no {files} equal parts")
        parts = [value] * files if axis is None else value.chunk(files, axis)
        for rank, piece in zip(ranks, parts, strict=True):
            rank[name] = piece.clone()
    return ranks


def fuse(rank: dict[str, torch.Tensor], params: dict) -> dict[str, torch.Tensor]:
    """Fuse and rename one rank's tensors as releases of Llama 4 do."""
    fused = dict(rank)
    for layer in range(params["n_layers"]):
        own = f"layers.{layer}."
        query, key, value = (fused.pop(f"{own}attention.{name}.weight") for name in ("wq", "wk", "wv"))
        fused[f"{own}attention.wqkv.weight"] = torch.cat([query, key, value])
        if is_mixture(params, layer):
            fused[f"{own}feed_forward.norm.weight"] = fused.pop(f"{own}ffn_norm.weight")
            for name in (f"{own}feed_forward.experts.{part}" for part in ("w1", "w2", "w3")):
                fused[name] = fused[name].flatten(0, 1)
        else:
            fused[f"{own}feed_forward.mlp.layer_norm_weight"] = fused.pop(f"{own}ffn_norm.weight")
            gate, up = (fused.pop(f"{own}feed_forward.{name}.weight") for name in ("w1", "w3"))
            fused[f"{own}feed_forward.mlp.fc1_weight"] = torch.cat([gate, up])
        for unfused, release in RELEASE_NAMES.items():
            if own + unfused in fused:
                fused[own + release] = fused.pop(own + unfused)
    return fused


def make_extras(params: dict) -> dict:
    """Return what Meta's files hold beside weights: rotary frequencies, Llama 4's router statistics and fp8 data."""
    frequencies = torch.rand(params["dim"] // params["n_heads"] // 2)
    names = ["rope.freqs", "freqs_cis"]
    if "n_kv_heads" not in params:
        names[:1] = [f"layers.{i}.attention.inner_attention.rope.freqs" for i in range(params["n_layers"])]
    extras = {name: frequencies.clone() for name in names}
    if "moe_args" not in params:
        return extras
    for layer in range(params["n_layers"]):
        own = f"layers.{layer}."
        extras[f"{own}attention.wqkv._extra_state"] = io.BytesIO(b"fp8 scales")
        if is_mixture(params, layer):
            experts = params["moe_args"]["num_experts"]
            extras[f"{own}feed_forward.expert_activation_DE"] = torch.rand(params["dim"], experts)
            extras[f"{own}feed_forward.global_gate_stats_3E"] = torch.rand(3, experts)
            extras[f"{own}feed_forward.running_gate_stats_3E"] = torch.rand(3, experts)
        else:
            extras[f"{own}feed_forward.mlp._extra_state"] = io.BytesIO(b"")
    return extras


def in_one_storage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same tensors as slices of one storage, as in the oldest files."""
    whole = torch.cat([value.flatten() for value in tensors.values()])
    slices = whole.split([value.numel() for value in tensors.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(tensors.items(), slices, strict=True)}


def read_ranks(folder: Path) -> list[dict]:
    """Read a folder's files with `torch.load`, in order of rank."""
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("*.pth"))]


def unfuse(rank: dict, params: dict, files: int) -> dict[str, torch.Tensor]:
    """Return one rank's weights by unfused names, without the entries that are not weights; undo `fuse`."""
    head_dim = params["dim"] // params["n_heads"]
    key_rows = (params.get("n_kv_heads") or params["n_heads"]) // files * head_dim
    releases = {release: unfused for unfused, release in RELEASE_NAMES.items()}
    unfused = {}
    for name, value in rank.items():
        own, ending = ".".join(name.split(".")[:2]) + ".", name.split(".", 2)[-1]
        if not name.startswith("layers."):
            own, ending = "", name
        if "_extra_state" in name or any(word in name for word in ("freqs", "stats_3E", "activation")):
            continue
        if ending == "attention.wqkv.weight":
            sizes = [len(value) - 2 * key_rows, key_rows, key_rows]
            for letter, piece in zip("qkv", value.split(sizes), strict=True):
                unfused[f"{own}attention.w{letter}.weight"] = piece
        elif ending == "feed_forward.mlp.fc1_weight":
            unfused[f"{own}feed_forward.w1.weight"], unfused[f"{own}feed_forward.w3.weight"] = value.chunk(2)
        elif ending in ("feed_forward.norm.weight", "feed_forward.mlp.layer_norm_weight"):
            unfused[f"{own}ffn_norm.weight"] = value
        else:
            ending = releases.get(ending, ending)
            if ending.startswith("feed_forward.experts.") and value.ndim == 2:
                value = value.unflatten(0, (params["moe_args"]["num_experts"], -1))
            unfused[own + ending] = value
    return unfused


def join(ranks: list[dict[str, torch.Tensor]], embedding_axis: int) -> dict[str, torch.Tensor]:
    """Join the ranks' tensors to whole weights, and check that copies are equal; undo `split`."""
    weights = {}
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        axis = _axis(name, embedding_axis)
        if axis is None:
            assert all(torch.equal(piece, parts[0]) for piece in parts), name
        weights[name] = parts[0] if axis is None else torch.cat(parts, axis)
    assert all(rank.keys() == ranks[0].keys() for rank in ranks)
    return weights


@cache
def small_sentencepiece_model(vocabulary: int) -> bytes:
    """Train a small SentencePiece model as LLaMA's: BPE, byte fallback, unk/bos/eos 0/1/2, no padding."""
    words = "the quick brown fox jumps over lazy dog weights in and out llama".split()
    lines = [" ".join(words[i % 13] for i in range(start, start + 9)) for start in range(40)]
    return sentencepiece_model(lines, vocabulary, split_digits=True)


def tiktoken_model(ranks: int) -> bytes:
    """Return the bytes of a tiktoken file of `ranks` tokens: the 256 bytes, then pairs of letters."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes([97 + i % 26, 97 + (3 * i + 1) % 26]) for i in range(26)][: ranks - 256]
    assert len(tokens) == ranks == len(set(tokens))
    return rank_table(tokens)
