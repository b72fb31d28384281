"""MetaCLIP towers as data: keys in open_clip and transformers, published sizes and activations.

The right side of a row holds our keys, those of `LlamoeVisionModel`. Shapes: D width, M inner width, P patch side,
C channels, G patches a side, E width of the joint space.

Sources: open_clip's `transformer.py`, `pretrained.py` and `model_configs`; transformers' CLIP and MetaCLIP 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..io import TRANSPOSED, Drop, FusedRows, Operation, Row, Slot


class _ClassLast(Operation):
    """Positions `[1 + G * G, D]`: the class token's row moves from the first place to the last."""

    def convert(self, tensors, sizes):
        return [tensors[0].map(lambda rows: torch.cat([rows[1:], rows[:1]]))]

    def revert(self, tensors, sizes):
        return [tensors[0].map(lambda rows: torch.cat([rows[-1:], rows[:-1]]))]


class _Flatten(Operation):
    """A strided convolution `[D, C, P, P]` as a linear layer `[D, C * P * P]`: same elements, same order."""

    def convert(self, tensors, sizes):
        return [tensors[0].view(tensors[0].shape[0], prod(tensors[0].shape[1:]))]

    def revert(self, tensors, sizes):
        side = sizes.patch_size
        # Rows are read one by one; without `remember`, each would compute the whole matrix anew.
        whole = tensors[0].remember(Slot())
        return [whole.view(whole.shape[0], sizes.num_channels, side, side)]


def _pairs(source: str, target: str) -> list[Row]:
    return [Row(f"{source}.{kind}", f"{target}.{kind}") for kind in ("weight", "bias")]


# Query, key and value in one tensor.
_THIRDS = FusedRows(lambda sizes: [1, 1, 1])
# Reason for dropping the text tower of whole models.
_TEXT = "part of the text tower, which an image encoder does without"
_SCALE = "scales the contrastive loss only"
OPEN_CLIP_DROPS = [
    *(
        Drop(pattern, _TEXT)
        for pattern in (
            "text.*",
            "transformer.resblocks.*",
            "token_embedding.*",
            "positional_embedding",
            "ln_final.*",
            "text_projection*",
            "attn_mask",
        )
    ),
    Drop("logit_scale", _SCALE),
    Drop("logit_bias", _SCALE),
]
CLIP_DROPS = [
    Drop("text_model.*", _TEXT),
    Drop("text_projection.*", _TEXT),
    Drop("logit_scale", _SCALE),
    Drop("vision_model.embeddings.position_ids", "a buffer that counts the positions"),
]

_OURS = "model.layers.{i}"
_PROJECTIONS = tuple(f"{_OURS}.self_attn.{name}_proj" for name in "qkv")

_BLOCK = "visual.transformer.resblocks.{i}"
OPEN_CLIP = [
    Row("visual.class_embedding", "class_embedding"),
    Row("visual.positional_embedding", "positional_embedding_vlm", _ClassLast()),
    Row("visual.conv1.weight", "patch_embedding.linear.weight", _Flatten()),
    *_pairs("visual.ln_pre", "layernorm_pre"),
    *_pairs(f"{_BLOCK}.ln_1", f"{_OURS}.input_layernorm"),
    *(
        Row(f"{_BLOCK}.attn.in_proj_{kind}", tuple(f"{p}.{kind}" for p in _PROJECTIONS), _THIRDS, axis=0)
        for kind in ("weight", "bias")
    ),
    *_pairs(f"{_BLOCK}.attn.out_proj", f"{_OURS}.self_attn.o_proj"),
    *_pairs(f"{_BLOCK}.ln_2", f"{_OURS}.post_attention_layernorm"),
    *_pairs(f"{_BLOCK}.mlp.c_fc", f"{_OURS}.mlp.fc1"),
    *_pairs(f"{_BLOCK}.mlp.c_proj", f"{_OURS}.mlp.fc2"),
    *_pairs("visual.ln_post", "layernorm_post"),
    Row("visual.proj", "visual_projection.weight", TRANSPOSED),
    *OPEN_CLIP_DROPS,
]

_LAYER = "vision_model.encoder.layers.{i}"
CLIP = [
    Row("vision_model.embeddings.class_embedding", "class_embedding"),
    Row("vision_model.embeddings.position_embedding.weight", "positional_embedding_vlm", _ClassLast()),
    Row("vision_model.embeddings.patch_embedding.weight", "patch_embedding.linear.weight", _Flatten()),
    # "layrnorm" is transformers' own spelling.
    *_pairs("vision_model.pre_layrnorm", "layernorm_pre"),
    *_pairs(f"{_LAYER}.layer_norm1", f"{_OURS}.input_layernorm"),
    *(
        row
        for name, target in zip("qkv", _PROJECTIONS, strict=True)
        for row in _pairs(f"{_LAYER}.self_attn.{name}_proj", target)
    ),
    *_pairs(f"{_LAYER}.self_attn.out_proj", f"{_OURS}.self_attn.o_proj"),
    *_pairs(f"{_LAYER}.layer_norm2", f"{_OURS}.post_attention_layernorm"),
    *_pairs(f"{_LAYER}.mlp.fc1", f"{_OURS}.mlp.fc1"),
    *_pairs(f"{_LAYER}.mlp.fc2", f"{_OURS}.mlp.fc2"),
    *_pairs("vision_model.post_layernorm", "layernorm_post"),
    Row("visual_projection.weight", "visual_projection.weight"),
    *CLIP_DROPS,
]

# Fragments of open_clip keys that ours cannot express, most specific first, each with its reason.
OPEN_CLIP_REFUSED = {
    "visual.trunk.": "a tower of timm (as SigLIP's, EVA's and ConvNeXt's are)",
    "visual.attnpool.": "a ResNet tower",
    "visual.layer1.": "a ResNet tower",
    "visual.attn_pool": "an attentional pool",
    "visual.head.": "a head besides the projection",
    ".ls_1.gamma": "LayerScale",
    ".ls_2.gamma": "LayerScale",
    ".attn.ln_q.": "norms of queries and keys (qk_norm)",
    ".attn.ln_k.": "norms of queries and keys (qk_norm)",
    ".attn.logit_scale": "scaled cosine attention",
    ".attn.head_scale": "scales for each attention head",
    ".attn.ln_inner.": "a norm inside of the attention (scale_attn_inner)",
    ".ln_attn.": "a norm behind the attention (scale_attn)",
    ".mlp.ln.": "a norm inside of the feed-forward (scale_fc)",
}
# open_clip vision_cfg fields that must have their defaults, and what other values would mean.
OPEN_CLIP_DEFAULTS = {
    "ls_init_value": (None, "LayerScale"),
    "attentional_pool": (False, "an attentional pool"),
    "no_ln_pre": (False, "no norm in front of the blocks"),
    "pos_embed_type": ("learnable", "fixed sine and cosine positions"),
    "final_ln_after_pool": (False, "the last norm behind the pooling"),
    "pool_type": ("tok", "pooling by another token than the class token"),
    "block_type": (None, "another kind of block"),
    "qk_norm": (False, "norms of queries and keys"),
    "scaled_cosine_attn": (False, "scaled cosine attention"),
    "scale_heads": (False, "scales for each attention head"),
    "scale_attn_inner": (False, "a norm inside of the attention"),
    "scale_attn": (False, "a norm behind the attention"),
    "scale_fc": (False, "a norm inside of the feed-forward"),
    "timm_model_name": (None, "a tower of timm"),
}

# Published (width, layers, inner width) to heads. No two published towers differ in the heads alone.
HEADS = {
    (384, 12, 1536): 6,  # S
    (512, 12, 2048): 8,  # M
    (768, 12, 3072): 12,  # B
    (1024, 24, 4096): 16,  # L
    (1280, 32, 5120): 16,  # H
    (1408, 40, 6144): 16,  # g
    (1664, 48, 8192): 16,  # bigG
}


@dataclass(frozen=True)
class Release:
    """A release of MetaCLIP weights in open_clip.

    Attributes:
        tag: the name that open_clip loads it by.
        sizes: tower name to width and patch side.
        image_size: in pixels.
        activation: activation that the weights were trained with, by transformers' name.
        resize_mode: how open_clip resizes its pictures.
    """

    tag: str
    sizes: Sequence[str]
    image_size: int
    activation: str
    resize_mode: str = "shortest"


# Tower name to width, layers and patch side.
TOWERS = {
    "ViT-B-32": (768, 12, 32),
    "ViT-B-16": (768, 12, 16),
    "ViT-L-14": (1024, 24, 14),
    "ViT-H-14": (1280, 32, 14),
    "ViT-bigG-14": (1664, 48, 14),
}
RELEASES = [
    Release("metaclip_400m", ("ViT-B-32", "ViT-B-16", "ViT-L-14"), 224, "quick_gelu"),
    Release("metaclip_fullcc", tuple(TOWERS), 224, "quick_gelu"),
    Release("metaclip_altogether", ("ViT-H-14",), 224, "gelu"),
    Release("metaclip2_worldwide", ("ViT-H-14",), 224, "quick_gelu"),
    Release("metaclip2_worldwide", ("ViT-H-14",), 378, "gelu", "squash"),
    Release("metaclip2_worldwide", ("ViT-bigG-14",), 224, "gelu"),
    Release("metaclip2_worldwide", ("ViT-bigG-14",), 378, "gelu", "squash"),
]


def describe_releases() -> str:
    """Each release with its activation, for messages."""
    lines = [
        f"{release.tag} ({', '.join(release.sizes)} at {release.image_size} pixels): {release.activation}"
        for release in RELEASES
    ]
    return "; ".join(lines)
