"""The dtypes in which norms and rotary embeddings compute.

`test_parity.py` compares their formulas with transformers', and `tests/fuzz` with float64.
"""

import pytest
import torch
from support.models import max_abs, stock_dense_config

import llamoe
from llamoe.modeling.layers.feed_forward import activation
from llamoe.modeling.layers.normalization import L2Norm, RMSNorm
from llamoe.modeling.layers.rotary import RotaryEmbedding, of_channels, rotate

HALVES = [torch.bfloat16, torch.float16]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def angles(num_positions):
    """Return cos and sin of ten pairs of channels, each `[1, T, 10]`."""
    frequencies = RotaryEmbedding(llamoe.from_stock(stock_dense_config())).inv_freq
    products = torch.arange(num_positions, dtype=torch.float32)[None, :, None] * frequencies
    return products.cos(), products.sin()


def rotated(x_BHTD, cos, sin, interleave):
    return rotate(x_BHTD.transpose(1, 2), *of_channels(cos, sin, interleave), interleave).transpose(1, 2)


class TestNormalization:
    @torch.no_grad()
    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize("kind", ["rms", "l2"])
    def test_statistics_are_float32(self, kind, dtype):
        # Squares of 300 exceed float16's largest number; a sum of 4096 squares exceeds bfloat16's precision.
        x = (300 + randn(3, 4096)).to(dtype)
        norm = RMSNorm(4096).to(dtype) if kind == "rms" else L2Norm()
        exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
        assert norm(x).dtype == dtype
        assert torch.equal(norm(x), exact.to(dtype))

    @torch.no_grad()
    def test_rounded_before_it_is_scaled(self):
        # In the other order about every fourth value differs in its last bit.
        norm, x = RMSNorm(64), randn(50, 64, seed=1).bfloat16()
        norm.weight.copy_(1 + 0.1 * randn(64, seed=2))
        norm.to(torch.bfloat16)
        normalized = L2Norm(norm.eps)(x.float())
        assert torch.equal(norm(x), normalized.bfloat16() * norm.weight)
        assert not torch.equal(norm(x), (normalized * norm.weight.float()).bfloat16())

    def test_zeros_stay_zeros(self):
        with torch.no_grad():
            assert not RMSNorm(8)(torch.zeros(1, 8)).any()

    def test_transforms_see_the_plain_formula(self):
        norm, x = RMSNorm(8), randn(5, 8)
        weights = randn(3, 8, seed=1)
        with torch.no_grad():
            call = lambda weight: torch.func.functional_call(norm, {"weight": weight}, x)  # noqa: E731
            mapped = torch.func.vmap(call)(weights)
            assert max_abs(mapped, L2Norm(norm.eps)(x) * weights[:, None]) < 1e-6


class TestRotary:
    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize("interleave", [False, True])
    def test_rotated_in_float32_and_rex_rotated_in_the_dtype(self, dtype, interleave):
        x = randn(2, 3, 50, 20).to(dtype)
        cos_sin = angles(50)
        x_rotated = rotated(x, *cos_sin, interleave)
        assert x_rotated.dtype == dtype
        assert torch.equal(x_rotated, rotated(x.float(), *cos_sin, interleave).to(dtype))

    @pytest.mark.parametrize("interleave", [False, True])
    def test_float64_is_rotated_in_float64(self, interleave):
        """Only the angles are in float32."""
        x, (cos, sin) = randn(2, 6, 9, 20).double(), angles(9)
        x_rotated = rotated(x, cos, sin, interleave)
        assert x_rotated.dtype == torch.float64
        assert torch.equal(x_rotated, rotated(x, cos.double(), sin.double(), interleave))

    @pytest.mark.parametrize(
        "cast", [torch.nn.Module.bfloat16, torch.nn.Module.half, "to"], ids=["bfloat16", "half", "to"]
    )
    @pytest.mark.parametrize("rope_type", ["default", "dynamic", "yarn"])
    def test_frequencies_stay_float32(self, rope_type, cast):
        parameters = dict(rope_type=rope_type, rope_theta=10000.0)
        if rope_type != "default":
            parameters |= dict(factor=4.0)
        if rope_type == "yarn":
            parameters |= dict(original_max_position_embeddings=64)
        model = llamoe.LlamoeDenseModel(llamoe.from_stock(stock_dense_config(rope_parameters=parameters)))
        rotary, positions = model.rotary_emb, torch.tensor([[0, 1, 99_999]])
        before = rotary(torch.zeros(1), positions)
        model = model.to(torch.bfloat16) if cast == "to" else cast(model)
        assert model.layers[0].self_attn.q_proj.weight.dtype in HALVES
        assert rotary.inv_freq.dtype == rotary.original_inv_freq.dtype == torch.float32
        for mine, expected in zip(rotary(torch.zeros(1), positions), before, strict=True):
            assert mine.dtype == torch.float32 and mine.shape == (1, 3, 1, 20)
            assert torch.equal(mine, expected)

    def test_frequencies_are_no_part_of_a_checkpoint(self):
        model = llamoe.LlamoeDenseModel(llamoe.from_stock(stock_dense_config()))
        assert not [name for name in model.state_dict() if "freq" in name]


def test_unknown_activation():
    with pytest.raises(ValueError, match="hidden_act = 'swish2'.*silu"):
        activation("swish2")
