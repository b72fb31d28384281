"""Linear layers as published folders pack them in 4 bits: by a format's own tool, or written out from its description.

A weight is (code - zero) * scale, with codes `[out, in]`, zeros and scales `[out, groups]`.
"""

import pytest
import torch

# What stands in the config.json of a folder, beside the size of groups.
CONFIGS = {
    "symmetric": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "asymmetric": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
}
KINDS = tuple(CONFIGS)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def config_of(kind, group_size):
    """The `quantization_config` of a folder; `group_size` None is one scale an output."""
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
    """Codes, zeros and scales of a matrix; no two outputs or groups are alike, and every code occurs."""
    groups = -(-num_in // group_size) if group_size else 1
    codes = torch.randint(0, 16, (num_out, num_in))
    # The first version of GPTQ's format cannot say 0.
    zero = torch.randint(1, 16, (num_out, groups))
    if kind == "symmetric":
        zero = torch.full_like(zero, 8)
    return codes, zero, (0.2 + torch.rand(num_out, groups)).half() / num_in**0.5 / 8


def weight_of(codes, zero, scale, group_size):
    """What the numbers mean, in float32."""
    groups = torch.arange(codes.shape[1]) // (group_size or codes.shape[1])
    return (codes - zero[:, groups]) * scale.float()[:, groups]


def pack(kind, codes, zero, scale, group_size):
    """The tensors of a linear layer, by the last part of their names."""
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
        # Written by AutoGPTQ for layers that have none.
        "bias": torch.zeros(len(codes), dtype=torch.float16),
    }


def _words(codes, order=range(8)):
    """Eight codes of a row in a word; the one of a number in `order` stands at its place there, lowest bits first."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for place, number in enumerate(order):
        words |= codes[:, number::8] << 4 * place
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def scheme_of(kind, group_size):
    """compressed-tensors' own object for the weights."""
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="needs compressed-tensors")
    [group] = config_of(kind, group_size)["config_groups"].values()
    return quantization.QuantizationScheme(**group)


def _by_compressed_tensors(kind, codes, zero, scale, group_size):
    scheme = scheme_of(kind, group_size)
    from compressed_tensors.compressors import PackedQuantizationCompressor

    tensors = {
        "weight": weight_of(codes, zero, scale, group_size),
        "weight_scale": scale,
        "weight_zero_point": (zero - 8).to(torch.int8),
    }
    return PackedQuantizationCompressor.compress(tensors, scheme)
