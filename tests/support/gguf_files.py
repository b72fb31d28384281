"""Write GGUF files of small models with the package gguf, as llama.cpp's converter writes them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from .published import STOCK, stock_config

gguf = pytest.importorskip("gguf")

# Blocks have 32 or 256 numbers. 256 does not divide the inputs of the experts' down projections, so those matrices need
# another type. No two sizes are equal.
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
# The bytes of a block, and the offsets of its float16 scales with the largest values that are drawn for them.
_K_TYPES = {
    "Q4_K": (144, {0: 4e-4, 2: 3e-3}),
    "Q5_K": (176, {0: 2e-4, 2: 3e-3}),
    "Q6_K": (210, {208: 1e-4}),
}


class GgufFile(NamedTuple):
    """A GGUF file, and transformers' model with the dequantized weights in float32.

    Attributes:
        path: of the file.
        stock: transformers' model.
        stored: each tensor's stored array and type, by its name in the file.
    """

    path: Path
    stock: torch.nn.Module
    stored: dict[str, tuple[np.ndarray, str]]


def pack(weight, kind):
    """Quantize a matrix or stack to a type; for the K types, which gguf cannot write, return random blocks."""
    if kind in ("F32", "F16"):
        return weight.numpy().astype(np.float32 if kind == "F32" else np.float16)
    if kind not in _K_TYPES:
        return gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    size, halves = _K_TYPES[kind]
    blocks = torch.randint(0, 256, (weight.numel() // 256, size), dtype=torch.uint8).numpy()
    for offset, scale in halves.items():
        scales = (scale * (0.3 + torch.rand(len(blocks), 1))).half().numpy()
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(*weight.shape[:-1], -1)


def unpack(data, kind):
    """Dequantize stored numbers to float32 with the package gguf."""
    return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(data, gguf.GGMLQuantizationType[kind])))


def swapped(weight, heads):
    """Permute each head's rows from rotated halves to adjacent pairs, the order in which GGUF stores LLaMA."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@torch.no_grad()
def write_gguf(
    path, family, kind="Q4_0", others=(), config=None, keys=None, vocabulary=None, parts=0, change=None
):
    """Write a GGUF file of a model with random weights; return a `GgufFile`.

    Args:
        path: of the file; for a split file, without the suffix that numbers its parts.
        family: "llama", "mixtral" or "llama4".
        kind: GGUF type of the matrices.
        others: pairs of a part of a tensor's name in the file, and the type of tensors with such names.
        config: fields of the model's configuration.
        keys: metadata to add, by key.
        vocabulary: a function of the `GGUFWriter` and the number of tokens, which writes a tokenizer.
        parts: number of tensors in each part of a split file; 0 for one file.
        change: a function that may change the dictionary of stored tensors, as in `GgufFile.stored`.
    """
    stock = STOCK[family](stock_config(family, SIZES | (config or {}))).float().eval()
    architecture = gguf.MODEL_ARCH.LLAMA4 if family == "llama4" else gguf.MODEL_ARCH.LLAMA
    fields = stock.config
    names = gguf.get_tensor_name_map(architecture, fields.num_hidden_layers)
    tensors = {}

    def put(name, weight):
        """Quantize and store a tensor under its name in the file; return the dequantized tensor."""
        target = names.get_name(name, (".weight", ".bias"))
        chosen = next((other for part, other in others if part in target), kind)
        if weight.ndim == 1 or "gate_inp" in target:
            chosen = "F32"
        elif weight.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[chosen]][0]:
            chosen = "Q5_0"
        tensors[target] = pack(weight, chosen), chosen
        return unpack(*tensors[target])

    for name, weight in stock.state_dict().items():
        if name == "lm_head.weight" and fields.tie_word_embeddings:
            continue
        weight.copy_((torch.randn_like(weight) * 0.1 + ("norm" in name)).bfloat16())
        if ".experts." in name:
            stack = weight.mT if family == "llama4" else weight
            halves = stack.chunk(2, 1) if "gate_up" in name else [stack]
            parts_of = ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",)
            for part, half in zip(parts_of, halves, strict=True):
                half.copy_(put(f"{name.rpartition('.')[0]}.{part}.weight", half.contiguous()))
        elif family != "llama4" and ("q_proj" in name or "k_proj" in name):
            heads = fields.num_attention_heads if "q_proj" in name else fields.num_key_value_heads
            dequantized = put(name, swapped(weight, heads))
            weight.copy_(dequantized.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2))
        else:
            weight.copy_(put(name, weight))
    if change is not None:
        change(tensors)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=parts)
    _write_keys(writer, fields, family)
    for name, value in (keys or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    if vocabulary is not None:
        vocabulary(writer, fields.vocab_size)
    for name, (data, chosen) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path, stock, tensors)


def _write_keys(writer, fields, family):
    writer.add_block_count(fields.num_hidden_layers)
    writer.add_context_length(fields.max_position_embeddings)
    writer.add_embedding_length(fields.hidden_size)
    writer.add_feed_forward_length(
        fields.intermediate_size_mlp if family == "llama4" else fields.intermediate_size
    )
    writer.add_head_count(fields.num_attention_heads)
    writer.add_head_count_kv(fields.num_key_value_heads)
    writer.add_key_length(fields.head_dim)
    writer.add_value_length(fields.head_dim)
    writer.add_rope_dimension_count(fields.head_dim)
    writer.add_rope_freq_base(fields.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(fields.rms_norm_eps)
    writer.add_vocab_size(fields.vocab_size)
    writer.add_file_type(2)
    if family != "llama":
        writer.add_expert_count(fields.num_local_experts)
        writer.add_expert_used_count(fields.num_experts_per_tok)
    if family == "llama4":
        writer.add_interleave_moe_layer_step(fields.interleave_moe_layer_step)
        writer.add_expert_feed_forward_length(fields.intermediate_size)
