"""Name tables of CLIP's towers, from the keys of open_clip and of transformers to those of `LlamoeVisionModel`.

Towers are not written in these formats, so the operations have no inverse. Shapes: D width, P side of a patch in
pixels, C color channels, G patches along a side of the picture.

Sources: open_clip's `transformer.py`; transformers' CLIP and MetaCLIP 2.
"""

from math import prod

import torch

from ..io import TRANSPOSED, Drop, FusedRows, Operation, Row


class _ClassLast(Operation):
    """Moves the class token's row of the position embeddings `[1 + G * G, D]` from the beginning to the end."""

    def convert(self, tensors, sizes):
        return [tensors[0].map(lambda rows: torch.cat([rows[1:], rows[:1]]))]


class _Flatten(Operation):
    """Views the weight of a strided convolution `[D, C, P, P]` as that of a linear layer `[D, C * P * P]`."""

    def convert(self, tensors, sizes):
        return [tensors[0].view(tensors[0].shape[0], prod(tensors[0].shape[1:]))]


def _pairs(source: str, target: str) -> list[Row]:
    return [Row(f"{source}.{kind}", f"{target}.{kind}") for kind in ("weight", "bias")]


# Query, key and value, each a third of one tensor's rows.
_THIRDS = FusedRows(lambda sizes: [1, 1, 1])
_TEXT = "part of the text tower, which an image encoder does not need"
_SCALE = "scales only the contrastive loss"
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
    *(
        Drop(pattern, _TEXT)
        for pattern in "text.* transformer.resblocks.* token_embedding.* positional_embedding ln_final.* "
        "text_projection* attn_mask".split()
    ),
    Drop("logit_scale", _SCALE),
    Drop("logit_bias", _SCALE),
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
    Drop("text_model.*", _TEXT),
    Drop("text_projection.*", _TEXT),
    Drop("logit_scale", _SCALE),
    Drop("vision_model.embeddings.position_ids", "a buffer that counts the positions"),
]
