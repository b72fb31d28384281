"""Name tables from Meta's formats to Hugging Face's: LLaMA 1, 2 and 3, and Llama 4 with its vision tower.

A row's axis is the one along which model-parallel files hold slices of a tensor. If a matrix has the rows of all
experts, each file holds a slice of every expert's rows. Meta's code accepts Llama 4 under two sets of names: those of
the releases, with fused projections and with all experts in one matrix, and those of its modules. A file may mix both
sets, so the table for reading has both.

Sources: the modules and load hooks of meta-llama/llama (LLaMA 1 and 2) and of meta-llama/llama-models (Llama 3 and 4),
and the axes in its `reshard_mp`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...configuration import LlamoeConfig
from ...configuration.base import LlamoeBaseConfig
from ..io import (
    KEEP,
    TRANSPOSED,
    Drop,
    FusedRows,
    Operation,
    Row,
    Table,
    by_expert,
    join,
    permute_pairs,
    split,
)


class _Rotated(Operation):
    """Permutes the rows of a query or key projection.

    Meta's rotary embedding pairs neighbouring channels, Hugging Face's pairs channels half a head apart. A file holds
    whole heads, so each file's rows are permuted separately.
    """

    def __init__(self, heads: str):
        self.heads = heads

    def forward(self, parts, axis, sizes):
        assert axis is not None
        heads = getattr(sizes, self.heads) // len(parts[0])
        return [join([permute_pairs(part, heads, to_halves=True) for part in parts[0]], axis)]

    def inverse(self, targets, axis, files, sizes):
        assert axis is not None
        heads = getattr(sizes, self.heads) // files
        return [[permute_pairs(part, heads, to_halves=False) for part in split(targets[0], axis, files)]]


class _Experts(Operation):
    """Makes a stack of a layer's experts: of their down projections, or of gate and up projections side by side.

    With `flat`, Meta's tensors are matrices with the rows of all experts, else stacks of the experts' matrices.
    """

    def __init__(self, flat: bool):
        self.flat = flat

    def forward(self, parts, axis, sizes):
        assert axis is not None
        experts = sizes.get_text_config().num_local_experts
        if self.flat:
            parts = [[by_expert(part, experts) for part in files] for files in parts]
        return [join([join(files, axis + self.flat) for files in parts], 2)]

    def inverse(self, targets, axis, files, sizes):
        assert axis is not None
        tensor, axis = targets[0], axis + self.flat
        columns = tensor.shape[2]
        halves = [tensor]
        if axis == 2:
            halves = [tensor.cut(2, 0, columns // 2), tensor.cut(2, columns // 2, columns)]
        slices = [split(half, axis, files) for half in halves]
        if self.flat:
            return [
                [part.view(part.shape[0] * part.shape[1], part.shape[2]) for part in half] for half in slices
            ]
        return slices


def _qkv_shares(sizes: Any) -> list[int]:
    text = sizes.get_text_config()
    return [text.num_attention_heads, text.num_key_value_heads, text.num_key_value_heads]


_FLAT, _STACKED = _Experts(flat=True), _Experts(flat=False)
_QKV = FusedRows(_qkv_shares)
_GATE_AND_UP = FusedRows(lambda sizes: [1, 1])

_COMPUTED = "computed from the configuration"
_OTHER_STATE = "no weight: state of a layer in training"
_STATISTICS = "no weight: statistics of the router's choices in training"

_VE = "vision_embeddings.vision_encoder."
_BLOCK, _LAYER = f"{_VE}transformer.resblocks.{{j}}.", "vision_model.model.layers.{j}."


def _layer(
    meta: str | Sequence[str], hf: str | Sequence[str], operation: Operation = KEEP, axis: int | None = None
) -> Row:
    """Make a table row from names inside a decoder layer."""
    metas, hfs = (
        tuple(prefix + name for name in ([names] if isinstance(names, str) else names))
        for prefix, names in (("layers.{i}.", meta), ("model.layers.{i}.", hf))
    )
    return Row(metas, hfs, operation, axis)


def _weights(pairs: Mapping[str, str], axis: int | None = None) -> list[Row]:
    """Make table rows for weights of a decoder layer that are only renamed: Meta's name to Hugging Face's."""
    return [_layer(f"{meta}.weight", f"{hf}.weight", axis=axis) for meta, hf in pairs.items()]


_ENDS = (Row("norm.weight", "model.norm.weight"), Row("output.weight", "lm_head.weight", axis=0))
_NORMS = _weights({"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
_OUT = _weights({"attention.wo": "self_attn.o_proj"}, axis=1)

# LLaMA 1, 2 and 3 without the embedding, which the generations slice along different axes.
_LLAMA = (
    *_ENDS,
    *_NORMS,
    _layer("attention.wq.weight", "self_attn.q_proj.weight", _Rotated("num_attention_heads"), axis=0),
    _layer("attention.wk.weight", "self_attn.k_proj.weight", _Rotated("num_key_value_heads"), axis=0),
    *_weights({"attention.wv": "self_attn.v_proj"}, axis=0),
    *_OUT,
    *_weights({"feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj"}, axis=0),
    *_weights({"feed_forward.w2": "mlp.down_proj"}, axis=1),
    Drop("rope.freqs", _COMPUTED),
    Drop("freqs_cis", _COMPUTED),
    Drop("layers.{i}.attention.inner_attention.rope.freqs", _COMPUTED),
)

# The decoder of Llama 4: names that the releases and Meta's modules share.
_LLAMA4_SHARED = (
    Row("tok_embeddings.weight", "model.embed_tokens.weight", axis=0),
    *_ENDS,
    *_OUT,
    _layer("feed_forward.router_DE", "feed_forward.router.weight", TRANSPOSED),
)
_GATE_UP, _DOWN = "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"
_DENSE_GATE_AND_UP = ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight")
_SHARED = "feed_forward.shared_expert."
# The decoder of Llama 4: names of the releases.
_LLAMA4_RELEASE = (
    _layer("attention.wqkv.layer_norm_weight", "input_layernorm.weight"),
    _layer("attention.wqkv.weight", [f"self_attn.{name}_proj.weight" for name in "qkv"], _QKV, axis=0),
    _layer("feed_forward.mlp.layer_norm_weight", "post_attention_layernorm.weight"),
    _layer("feed_forward.mlp.fc1_weight", _DENSE_GATE_AND_UP, _GATE_AND_UP, axis=0),
    _layer("feed_forward.mlp.fc2_weight", "feed_forward.down_proj.weight", axis=1),
    _layer([f"feed_forward.experts.moe_w_{name}_eD_F" for name in ("in", "swiglu")], _GATE_UP, _FLAT, axis=1),
    _layer("feed_forward.experts.moe_w_out_eF_D", _DOWN, _FLAT, axis=0),
    *_weights({"feed_forward.w_in_shared_FD": f"{_SHARED}gate_proj"}, axis=0),
    *_weights({"feed_forward.w_swiglu_FD": f"{_SHARED}up_proj"}, axis=0),
    *_weights({"feed_forward.w_out_shared_DF": f"{_SHARED}down_proj"}, axis=1),
)
# The decoder of Llama 4: names of Meta's modules.
_LLAMA4_UNFUSED = (
    *_NORMS,
    *_weights({f"attention.w{name}": f"self_attn.{name}_proj" for name in "qkv"}, axis=0),
    *_weights(
        {"feed_forward.w1": "feed_forward.gate_proj", "feed_forward.w3": "feed_forward.up_proj"}, axis=0
    ),
    *_weights({"feed_forward.w2": "feed_forward.down_proj"}, axis=1),
    _layer(("feed_forward.experts.w1", "feed_forward.experts.w3"), _GATE_UP, _STACKED, axis=2),
    _layer("feed_forward.experts.w2", _DOWN, _STACKED, axis=1),
    *_weights({f"{_SHARED}w1": f"{_SHARED}gate_proj", f"{_SHARED}w3": f"{_SHARED}up_proj"}, axis=0),
    *_weights({f"{_SHARED}w2": f"{_SHARED}down_proj"}, axis=1),
)
_LLAMA4_DROPPED = (
    Drop("rope.freqs", _COMPUTED),
    Drop("freqs_cis", _COMPUTED),
    Drop("*._extra_state", _OTHER_STATE),
    *(
        Drop(f"layers.{{i}}.feed_forward.{name}", _STATISTICS)
        for name in ("expert_activation_DE", "global_gate_stats_3E", "running_gate_stats_3E")
    ),
)

# The tower, its adapter and the projector. Only linear layers inside the blocks have biases.
_VISION = (
    Row(_VE + "conv1._linear.weight", "vision_model.patch_embedding.linear.weight", axis=0),
    Row(_VE + "class_embedding", "vision_model.class_embedding"),
    Row(_VE + "positional_embedding_vlm", "vision_model.positional_embedding_vlm"),
    *(
        Row(_VE + f"{meta}.{kind}", f"vision_model.{hf}.{kind}")
        for meta, hf in (("ln_pre", "layernorm_pre"), ("ln_post", "layernorm_post"))
        for kind in ("weight", "bias")
    ),
    *(
        Row(_BLOCK + f"{meta}.{kind}", _LAYER + f"{hf}.{kind}", axis=axis)
        for meta, hf, axes in (
            ("ln_1", "input_layernorm", (None, None)),
            ("attn.wq", "self_attn.q_proj", (0, 0)),
            ("attn.wk", "self_attn.k_proj", (0, 0)),
            ("attn.wv", "self_attn.v_proj", (0, 0)),
            ("attn.wo", "self_attn.o_proj", (1, None)),
            ("ln_2", "post_attention_layernorm", (None, None)),
            ("mlp.c_fc", "mlp.fc1", (0, 0)),
            ("mlp.c_proj", "mlp.fc2", (1, None)),
        )
        for kind, axis in zip(("weight", "bias"), axes, strict=True)
    ),
    *(
        Row(
            f"vision_embeddings.vision_adapter.mlp.{meta}.weight",
            f"vision_model.vision_adapter.mlp.{hf}.weight",
            axis=axis,
        )
        for meta, hf, axis in (("c_fc", "fc1", 0), ("c_proj", "fc2", 1))
    ),
    Row("vision_projection.weight", "multi_modal_projector.linear_1.weight", axis=0),
)


def llama_table(embedding_axis: int) -> Table:
    """Return the table of LLaMA 1, 2 and 3.

    Files slice the embedding along axis 1 in LLaMA 1 and 2 (fairscale's `ParallelEmbedding`), 0 in Llama 3
    (`VocabParallelEmbedding`).
    """
    return (Row("tok_embeddings.weight", "model.embed_tokens.weight", axis=embedding_axis), *_LLAMA)


def llama4_table(config: LlamoeBaseConfig, to_write: bool = False) -> Table:
    """Return the table of Llama 4: of a decoder alone, or of a multimodal model with its tower.

    The table for writing has the releases' names, that for reading also those of Meta's modules.
    """
    # In the releases this norm is named so in layers with experts, and as in `_LLAMA4_RELEASE` in dense layers. If
    # several rows fit a name, the first is taken.
    norm = "feed_forward.norm.weight", "post_attention_layernorm.weight"
    if to_write:
        mixtures = config.get_text_config().moe_layers
        norms = [Row(f"layers.{i}.{norm[0]}", f"model.layers.{i}.{norm[1]}") for i in mixtures]
        chosen = (*norms, *_LLAMA4_SHARED, *_LLAMA4_RELEASE)
    else:
        chosen = (_layer(*norm), *_LLAMA4_SHARED, *_LLAMA4_RELEASE, *_LLAMA4_UNFUSED)
    if not isinstance(config, LlamoeConfig):
        return chosen + _LLAMA4_DROPPED
    prefixed = tuple(
        replace(row, target=tuple(f"language_model.{name}" for name in row.targets)) for row in chosen
    )
    return prefixed + _VISION + _LLAMA4_DROPPED
