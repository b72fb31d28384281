"""Folders of Meta's with tensors in which every number is another; `hugging_face` says where each has to end.

Nothing here knows the tables of `llamoe.conversion`.
"""

import io
import json
import re
from dataclasses import dataclass, field

import torch
from support.meta_releases import fuse, make_weights, split

DIM, HEADS, HEAD, LAYERS, SENTENCEPIECE = 72, 12, 6, 2, 132


@dataclass
class Case:
    """A model in Meta's unfused names, whole, and how a release would hold it."""

    name: str
    params: dict
    files: tuple[int, ...]
    family: str = "llama4"
    split_embedding_columns: bool = False
    extra: dict = field(default_factory=dict)

    @property
    def vocab(self):
        """Rows of the embedding, also where params.json leaves them out."""
        return max(self.params["vocab_size"], SENTENCEPIECE)


def dense_params(**more):
    return {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "vocab_size": SENTENCEPIECE,
        "multiple_of": 12,
        "norm_eps": 1e-5,
    } | more


def llama4_params(**more):
    return {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": 4,
        "head_dim": HEAD,
        "vocab_size": 2304,
        "multiple_of": 12,
        "ffn_dim_multiplier": 0.7,
        "ffn_exp": 2.5,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_scaled_rope": True,
        "attention_chunk_size": 16,
        "nope_layer_interval": 2,
        "use_qk_norm": True,
        "moe_args": {"num_experts": 5, "interleave_moe_layer_step": 2, "top_k": 2},
        "vision_args": None,
    } | more


VISION = {
    "image_size": {"height": 56, "width": 56},
    "patch_size": {"height": 14, "width": 14},
    "dim": 96,
    "n_layers": 1,
    "n_heads": 12,
    "mlp_ratio": 4.0,
    "output_dim": 60,
    "pixel_shuffle_ratio": 0.5,
}

CASES = [
    Case("llama-1", dense_params(vocab_size=-1), (1, 2, 3, 4), "llama", True, {"rope": "layers"}),
    Case("llama-2", dense_params(vocab_size=-1), (2,), "llama", True, {"rope": "top"}),
    Case(
        "llama-2-gqa",
        dense_params(n_kv_heads=4, ffn_dim_multiplier=1.3),
        (1, 2, 4),
        "llama",
        True,
        {"rope": "top"},
    ),
    Case("llama-2-gqa-of-3", dense_params(n_kv_heads=3), (1, 3), "llama", True),
    Case(
        "llama-3",
        dense_params(n_kv_heads=4, vocab_size=512, rope_theta=5e5, use_scaled_rope=True),
        (1, 2, 4),
        "llama",
    ),
    Case("llama-4-text", llama4_params(), (1, 2, 4)),
    Case("llama-4-text-of-3", llama4_params(n_kv_heads=3), (1, 3)),
    Case("llama-4-dense", llama4_params(moe_args=None, ffn_exp=None), (1, 4)),
    Case("llama-4", llama4_params(vision_args=VISION), (1, 2, 4)),
    Case(
        "llama-4-all-mixtures",
        llama4_params(
            vision_args=VISION, moe_args={"num_experts": 3}, use_scaled_rope=False, use_qk_norm=False
        ),
        (1, 2),
    ),
]
BY_NAME = {case.name: case for case in CASES}


def whole_model(case):
    """Full tensors by Meta's unfused names, of which no number comes twice; all are exact in float32.

    Feed-forwards are larger than by the formula of Meta's code: files show their sizes, params.json does not.
    """
    full, number = make_weights(case.params | {"multiple_of": 132}, case.vocab), 1
    for name, tensor in full.items():
        end = number + tensor.numel()
        full[name] = torch.arange(number, end, dtype=torch.float32).view(tensor.shape)
        number = end
    assert number < 2**24
    return full


def hugging_face(case, full):
    """What the tensors are called, and how they lie, in stock: written out by hand."""

    def rotated(weight, heads):
        order = [h * HEAD + 2 * j + part for h in range(heads) for part in (0, 1) for j in range(HEAD // 2)]
        return weight[order]

    kv = case.params.get("n_kv_heads") or HEADS
    text = "language_model." if case.params.get("vision_args") else ""
    of_llama = case.family == "llama"
    result = {
        text + "model.embed_tokens.weight": full["tok_embeddings.weight"],
        text + "model.norm.weight": full["norm.weight"],
        text + "lm_head.weight": full["output.weight"],
    }
    for i in range(LAYERS):
        meta, hf = f"layers.{i}.", f"{text}model.layers.{i}."
        forward = "mlp." if of_llama else "feed_forward."
        result[hf + "input_layernorm.weight"] = full[meta + "attention_norm.weight"]
        result[hf + "post_attention_layernorm.weight"] = full[meta + "ffn_norm.weight"]
        q, k = full[meta + "attention.wq.weight"], full[meta + "attention.wk.weight"]
        result[hf + "self_attn.q_proj.weight"] = rotated(q, HEADS) if of_llama else q
        result[hf + "self_attn.k_proj.weight"] = rotated(k, kv) if of_llama else k
        result[hf + "self_attn.v_proj.weight"] = full[meta + "attention.wv.weight"]
        result[hf + "self_attn.o_proj.weight"] = full[meta + "attention.wo.weight"]
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        if meta + "feed_forward.router_DE" in full:
            experts = meta + "feed_forward.experts."
            result[hf + "feed_forward.router.weight"] = full[meta + "feed_forward.router_DE"].T
            gate_up = torch.cat([full[experts + "w1"], full[experts + "w3"]], dim=2)
            result[hf + "feed_forward.experts.gate_up_proj"] = gate_up
            result[hf + "feed_forward.experts.down_proj"] = full[experts + "w2"]
            for ours, its in names.items():
                shared = full[f"{meta}feed_forward.shared_expert.{its}.weight"]
                result[f"{hf}feed_forward.shared_expert.{ours}.weight"] = shared
        else:
            for ours, its in names.items():
                result[f"{hf}{forward}{ours}.weight"] = full[f"{meta}feed_forward.{its}.weight"]
    if text:
        for name, tensor in full.items():
            if name.startswith("vision"):
                result[tower_name(name)] = tensor
    return result


def tower_name(name):
    for pattern, replacement in (
        (r"vision_projection", "multi_modal_projector.linear_1"),
        (r"vision_embeddings\.vision_encoder\.transformer\.resblocks", "vision_model.model.layers"),
        (
            r"vision_embeddings\.vision_(encoder|adapter)",
            lambda m: "vision_model" + {"adapter": ".vision_adapter"}.get(m[1], ""),
        ),
        (r"conv1\._linear", "patch_embedding.linear"),
        (r"ln_p(re|ost)", r"layernorm_p\1"),
        (r"attn\.w([qkvo])", r"self_attn.\1_proj"),
        (r"ln_1", "input_layernorm"),
        (r"ln_2", "post_attention_layernorm"),
        (r"mlp\.c_fc", "mlp.fc1"),
        (r"mlp\.c_proj", "mlp.fc2"),
    ):
        name = re.sub(pattern, replacement, name)
    return name


def cut(case, full, count, style="release"):
    """The files that `count` model-parallel processes would save."""
    files = split(full, count, 1 if case.split_embedding_columns else 0)
    is_fused = style == "release" and case.family == "llama4"
    return [fuse(part, case.params) for part in files] if is_fused else files


def add_ballast(case, files):
    """What real files hold besides weights."""
    for part in files:
        if case.extra.get("rope") == "layers":
            for i in range(LAYERS):
                part[f"layers.{i}.attention.inner_attention.rope.freqs"] = torch.ones(HEAD // 2)
        if case.extra.get("rope") == "top" or case.family == "llama4":
            part["rope.freqs"] = torch.ones(HEAD // 2)
        if case.family == "llama4":
            part["freqs_cis"] = torch.ones(3)
            part["layers.0.attention.wqkv._extra_state"] = io.BytesIO()
            part["layers.0.attention.wo._extra_state"] = torch.zeros(3, dtype=torch.uint8)
            if case.params["moe_args"]:
                part["layers.1.feed_forward.experts.mlp._extra_state"] = io.BytesIO(b"state")
                part["layers.1.feed_forward.expert_activation_DE"] = torch.ones(DIM, 5)
                part["layers.1.feed_forward.global_gate_stats_3E"] = torch.ones(3, 5)
                part["layers.1.feed_forward.running_gate_stats_3E"] = torch.ones(3, 5)
        else:
            part["freqs_cis"] = torch.ones(3)
    return files


def write_folder(folder, params, files, single=False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    for rank, part in enumerate(files):
        torch.save(part, folder / ("consolidated.pth" if single else f"consolidated.{rank:02d}.pth"))
    return folder


def make_folder(folder, case, count=1, style="release"):
    full = whole_model(case)
    write_folder(folder, case.params, add_ballast(case, cut(case, full, count, style)))
    return full


def assert_same(tensors, expected):
    assert sorted(tensors) == sorted(expected)
    for name, tensor in expected.items():
        given = tensors[name].read() if hasattr(tensors[name], "read") else tensors[name]
        assert given.dtype == tensor.dtype, name
        assert torch.equal(given, tensor), name


def load_files(folder):
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("consolidated.*.pth"))]
