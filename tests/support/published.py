"""Write folders with packed weights as they are published: compressed-tensors, GPTQ, AWQ and float8.

Tensors are packed by the format's own tool, or here by the format's description. A weight is (code - zero) * scale,
with codes `[out, in]`, and zeros and scales `[out, groups]`.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file

import llamoe

from .few_bits import SIZES
from .models import stock_multimodal_config

# The `quantization_config` of each 4-bit format, without the group size.
CONFIGS = {
    "symmetric": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "asymmetric": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
}
KINDS = tuple(CONFIGS)
# Formats with numbers of float8 or int8, and what has one scale: each output ("channel"), the matrix, or each block.
# Their zeros are 0.
EIGHT_BITS = {
    "float8": "channel",
    "float8 whole": "tensor",
    "float8 block": "block",
    "int8": "channel",
    "fp8": "block",
}
# Outputs and inputs of a block with one scale.
BLOCK = (48, 80)
# AWQ's order of eight codes in a word of 32 bits.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def config_of(kind, group_size):
    """Return the `quantization_config` of a folder; with `group_size` None each output has one scale."""
    if kind == "fp8":
        return {"quant_method": "fp8", "weight_block_size": BLOCK, "activation_scheme": "dynamic"}
    if kind in EIGHT_BITS:
        number = "int" if kind == "int8" else "float"
        scheme = {"num_bits": 8, "type": number, "symmetric": True, "strategy": EIGHT_BITS[kind]}
        scheme["block_structure"] = BLOCK if EIGHT_BITS[kind] == "block" else None
        activations = {"num_bits": 8, "type": number, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": scheme, "input_activations": activations}
        fields = {"quant_method": "compressed-tensors", "format": f"{number}-quantized"}
        return {**fields, "config_groups": {"group_0": group}}
    if CONFIGS[kind]["quant_method"] != "compressed-tensors":
        return {**CONFIGS[kind], "group_size": group_size or -1}
    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": kind == "symmetric",
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
    }
    return {**CONFIGS[kind], "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}


def numbers(kind, num_out, num_in, group_size):
    """Draw codes `[out, in]`, zeros and scales `[out, groups]` of a matrix; outputs and groups differ."""
    groups = -(-num_in // group_size) if group_size else 1
    if kind in EIGHT_BITS:
        # torch 2.11 casts numbers beyond 448, the largest of float8, to NaN.
        codes = (100 * torch.randn(num_out, num_in)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        codes = codes.round().clamp(-128, 127) if kind == "int8" else codes
        block = {"channel": (1, num_in), "tensor": (num_out, num_in), "block": BLOCK}[EIGHT_BITS[kind]]
        shape = [-(-size // step) for size, step in zip((num_out, num_in), block, strict=True)]
        scale = (0.2 + torch.rand(shape)).bfloat16() / num_in**0.5 / 100
        scale = scale.repeat_interleave(block[0], 0)[:num_out]
        return codes, torch.zeros_like(scale), scale
    codes = torch.randint(0, 16, (num_out, num_in))
    # The first version of GPTQ's format cannot store a zero point of 0.
    zero = torch.randint(1, 16, (num_out, groups))
    if kind == "symmetric":
        zero = torch.full_like(zero, 8)
    return codes, zero, (0.2 + torch.rand(num_out, groups)).half() / num_in**0.5 / 8


def weight_of(codes, zero, scale, group_size):
    """Dequantize a matrix to float32, `[out, in]`."""
    groups = torch.arange(codes.shape[1]) // (
        group_size or (BLOCK[1] if scale.shape[1] > 1 else codes.shape[1])
    )
    return (codes - zero[:, groups]) * scale.float()[:, groups]


def pack(kind, codes, zero, scale, group_size):
    """Pack a matrix; return the tensors of its linear layer by the last part of their names."""
    if kind in EIGHT_BITS:
        step = {"channel": 1, "tensor": len(scale), "block": BLOCK[0]}[EIGHT_BITS[kind]]
        # compressed-tensors stores a single scale in the shape [1].
        scales = scale[0] if EIGHT_BITS[kind] == "tensor" else scale[::step].contiguous()
        codes = codes.to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv" if kind == "fp8" else "weight_scale": scales}
    if kind in ("symmetric", "asymmetric"):
        return _by_compressed_tensors(kind, codes, zero, scale, group_size)
    if kind == "awq":
        tensors = {"qweight": _words(codes.T, _AWQ_ORDER), "qzeros": _words(zero.T, _AWQ_ORDER)}
        return tensors | {"scales": scale.T.contiguous()}
    stored = zero if kind == "gptq_v2" else zero - 1
    groups = torch.arange(codes.shape[1]) // (group_size or codes.shape[1])
    return {
        "qweight": _words(codes).T.contiguous(),
        "qzeros": _words(stored.T),
        "scales": scale.T.contiguous(),
        "g_idx": groups.int(),
        # AutoGPTQ writes zeros for layers without a bias.
        "bias": torch.zeros(len(codes), dtype=torch.float16),
    }


def _words(codes, order=range(8)):
    """Pack each eight codes of a row into a word `[rows, columns / 8]`; code `order[0]` is in the lowest bits."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for position, number in enumerate(order):
        words |= codes[:, number::8] << 4 * position
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def _by_compressed_tensors(kind, codes, zero, scale, group_size):
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="needs compressed-tensors")
    from compressed_tensors.quantization import QuantizationScheme

    [group] = config_of(kind, group_size)["config_groups"].values()
    tensors = {
        "weight": weight_of(codes, zero, scale, group_size),
        "weight_scale": scale,
        "weight_zero_point": (zero - 8).to(torch.int8),
    }
    return compressors.PackedQuantizationCompressor.compress(tensors, QuantizationScheme(**group))


_SIZES = SIZES | {"head_dim": 32}
# The 192 outputs of gate and up together make whole blocks of 64, the 96 of each alone do not. Each token takes all
# experts: else the order of sums, which differs between processors, could change the choice of experts.
_MIXTURE = dict(intermediate_size=96, num_local_experts=3, num_experts_per_tok=3)


def stock_config(family, changes):
    if family == "llama":
        return transformers.LlamaConfig(**_SIZES | {"intermediate_size": 320} | changes)
    fields = _SIZES | _MIXTURE | changes
    if family == "mixtral":
        return transformers.MixtralConfig(**fields)
    fields = dict(intermediate_size_mlp=320, interleave_moe_layer_step=2, attention_chunk_size=16) | fields
    return transformers.Llama4TextConfig(**fields) if family == "llama4" else stock_multimodal_config(fields)


STOCK = {
    "llama": transformers.LlamaForCausalLM,
    "mixtral": transformers.MixtralForCausalLM,
    "llama4": transformers.Llama4ForCausalLM,
    "multimodal": transformers.Llama4ForConditionalGeneration,
}
OURS = {
    "llama": llamoe.LlamoeDenseForCausalLM,
    "mixtral": llamoe.LlamoeMixtralForCausalLM,
    "llama4": llamoe.LlamoeForCausalLM,
    "multimodal": llamoe.LlamoeForConditionalGeneration,
}


class Published(NamedTuple):
    """A folder with packed weights, and transformers' model with the dequantized weights in float32.

    Attributes:
        path: of the folder.
        stock: transformers' model.
        numbers: codes, zeros and scales of the packed linear layers, by the layers' names in the folder.
    """

    path: Path
    stock: torch.nn.Module
    numbers: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@torch.no_grad()
def publish(path, family, kind, group_size=32, kept=(), packs=(), spelling="stock", config=None, **fields):
    """Write a folder of a small model with packed weights; return a `Published`.

    Args:
        path: of the new folder.
        family: a key of `STOCK`.
        kind: a key of `CONFIGS` or `EIGHT_BITS`.
        group_size: inputs of a group; None for one scale an output.
        kept: parts of the names of linear layers that stay in bfloat16.
        packs: endings of the names of other matrices that are packed, as heads and routers.
        spelling: names of Mixtral's experts: "stock" as in transformers 4, or "mlp".
        config: fields of the model's configuration.
        fields: more fields of `quantization_config`.
    """
    stock = STOCK[family](stock_config(family, config or {})).float().eval()
    plain, numbers_by_name = {}, {}
    for name, weight in stock.state_dict().items():
        weight.copy_((torch.randn_like(weight) * 0.1 + ("norm" in name)).bfloat16())
        for layer, matrix in named_matrices(family, name, weight, spelling):
            is_packed = layer.endswith(packs) if packs and not _is_linear(name) else _is_linear(name)
            if not is_packed or any(part in layer for part in kept):
                plain[f"{layer}.weight" if layer != name else name] = matrix.bfloat16().contiguous()
                continue
            drawn = numbers_by_name[layer] = numbers(kind, *matrix.shape, group_size)
            matrix.copy_(weight_of(*drawn, group_size))
            plain |= {f"{layer}.{part}": t for part, t in pack(kind, *drawn, group_size).items()}
    content = stock.config.to_dict() | {"dtype": "bfloat16", "architectures": [type(stock).__name__]}
    content["quantization_config"] = config_of(kind, group_size) | fields
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(content))
    save_file(plain, path / "model.safetensors", {"format": "pt"})
    return Published(path, stock, numbers_by_name)


def _is_linear(name):
    return "_proj." in name or ".experts." in name


def named_matrices(family, name, weight, spelling="stock"):
    """Yield the matrices `[out, in]` of a stock parameter with their names in a published folder, without `.weight`."""
    is_stock = family == "mixtral" and spelling == "stock"
    if is_stock:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." not in name:
        yield name.removesuffix(".weight"), weight
        return
    names = ("w1", "w3", "w2") if is_stock else ("gate_proj", "up_proj", "down_proj")
    path, _, stack = name.rpartition(".")
    for number, matrix in enumerate(weight if family == "mixtral" else weight.mT):
        halves = matrix.chunk(2) if stack == "gate_up_proj" else [matrix]
        for part, half in zip(names[:2] if len(halves) == 2 else names[2:], halves, strict=True):
            yield f"{path}.{number}.{part}", half
