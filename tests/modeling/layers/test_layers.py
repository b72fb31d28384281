"""Norms, rotary embedding and feed-forward by themselves: examples worked out by hand, and what must never change."""

import math

import pytest
import torch
from support.models import max_abs, stock_dense_config, stock_text_config
from torch.nn import functional as F

import llamoe
from llamoe.modeling.layers.feed_forward import FeedForward, activation
from llamoe.modeling.layers.normalization import L2Norm, RMSNorm
from llamoe.modeling.layers.rotary import RotaryEmbedding, of_channels, rotate

HALVES = [torch.bfloat16, torch.float16]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def angles(positions, frequencies):
    """cos and sin, `[1, T, R]`."""
    products = torch.tensor(positions, dtype=torch.float32)[None, :, None] * torch.as_tensor(frequencies)
    return products.cos(), products.sin()


def rotated(x_BHTD, cos, sin, interleave):
    return rotate(x_BHTD.transpose(1, 2), *of_channels(cos, sin, interleave), interleave).transpose(1, 2)


def frequencies_of(name):
    """Ten pairs of channels as the two families have them."""
    config = llamoe.from_stock(stock_dense_config() if name == "dense" else stock_text_config())
    return RotaryEmbedding(config).inv_freq


def rounded(tensor):
    return [round(value, 3) for value in tensor.flatten().tolist()]


class TestNormalization:
    @torch.no_grad()
    def test_rms_norm_worked_out(self):
        # The mean of 4, 1, 9 and 0 is 3.5; divided by its root.
        assert rounded(RMSNorm(4)(torch.tensor([2.0, -1.0, 3.0, 0.0]))) == [1.069, -0.535, 1.604, 0.0]

    @torch.no_grad()
    def test_eps_stands_inside_the_root(self):
        x = torch.tensor([2.0, -1.0, 3.0, 0.0])
        assert rounded(RMSNorm(4, eps=0.5)(x)) == [1.0, -0.5, 1.5, 0.0]  # the root of 3.5 + 0.5 is 2
        assert rounded(L2Norm(eps=0.5)(x)) == [1.0, -0.5, 1.5, 0.0]

    @torch.no_grad()
    def test_scale(self):
        norm = RMSNorm(4, eps=0.5)
        norm.weight.copy_(torch.tensor([1.0, 2.0, -1.0, 7.0]))
        assert rounded(norm(torch.tensor([2.0, -1.0, 3.0, 0.0]))) == [1.0, -1.0, -1.5, 0.0]

    def test_l2_norm_gives_root_of_size(self):
        x = 100 * randn(3, 5, 20)
        lengths = L2Norm()(x).norm(dim=-1)
        assert max_abs(lengths, torch.full((3, 5), math.sqrt(20))) < 1e-5
        assert not list(L2Norm().parameters())

    @torch.no_grad()
    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize("kind", ["rms", "l2"])
    def test_statistics_are_float32(self, kind, dtype):
        # Squares of 300 pass float16's largest number, and 4096 of them bfloat16's precision.
        x = (300 + randn(3, 4096)).to(dtype)
        norm = RMSNorm(4096).to(dtype) if kind == "rms" else L2Norm()
        exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
        assert norm(x).dtype == dtype
        assert torch.equal(norm(x), exact.to(dtype))

    @torch.no_grad()
    def test_rounded_before_it_is_scaled(self):
        # Meta's order: the other one differs in the last bit of about every fourth value.
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
    @pytest.mark.parametrize("interleave", [False, True])
    def test_worked_out(self, interleave):
        x = torch.tensor([1.0, 0.5]).view(1, 1, 1, 2)
        assert rounded(rotated(x, *angles([1], [0.1]), interleave)) == [0.945, 0.597]

    @pytest.mark.parametrize(("interleave", "expected"), [(True, [0, 1, 0, 3]), (False, [-3, 0, 0, 2])])
    def test_which_channels_turn_together(self, interleave, expected):
        # A quarter turn of the first pair, none of the second.
        x = {True: [1.0, 0.0, 0.0, 3.0], False: [0.0, 0.0, 3.0, 2.0]}[interleave]
        turned = rotated(torch.tensor(x).view(1, 1, 1, 4), *angles([1], [math.pi / 2, 0.0]), interleave)
        assert max_abs(turned.flatten(), torch.tensor(expected)) < 1e-6

    def test_both_pairings_agree_after_the_permutation(self):
        # Channels (2j, 2j + 1) brought to (j, j + D / 2).
        x = randn(2, 3, 7, 20)
        cos, sin = angles(range(7), frequencies_of("dense"))
        permutation = torch.cat([torch.arange(0, 20, 2), torch.arange(1, 20, 2)])
        interleaved = rotated(x, cos, sin, interleave=True)
        halves = rotated(x[..., permutation], cos, sin, interleave=False)
        assert torch.equal(interleaved[..., permutation], halves)
        assert max_abs(interleaved, rotated(x, cos, sin, interleave=False)) > 0.1

    @pytest.mark.parametrize("interleave", [False, True])
    @pytest.mark.parametrize("name", ["dense", "text"])
    def test_scores_depend_on_distance_only(self, name, interleave):
        query, key = (randn(1, 1, 1, 20, seed=seed).expand(-1, -1, 4, -1) for seed in (0, 1))

        def scores(distance):
            starts = [0, 3, 40, 100]
            places = starts, [start + distance for start in starts]
            turned = [
                rotated(x, *angles(p, frequencies_of(name)), interleave)
                for x, p in zip((key, query), places, strict=True)
            ]
            return (turned[0] * turned[1]).sum(-1).flatten()

        for distance in (0, 1, 5, 30):
            # Angles near 130 are rounded to about 1e-5.
            assert max_abs(scores(distance), scores(distance)[:1].expand(4)) < 1e-4
        assert max_abs(scores(0)[0], (query[0, 0, 0] * key[0, 0, 0]).sum()) < 1e-5
        assert max_abs(scores(1), scores(5)) > 0.1

    def test_lengths_are_kept(self):
        x = randn(2, 3, 9, 20)
        turned = rotated(x, *angles(range(9), frequencies_of("text")), interleave=True)
        assert max_abs(turned.norm(dim=-1), x.norm(dim=-1)) < 1e-5

    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize("interleave", [False, True])
    def test_computed_in_float32_and_given_back_in_the_dtype(self, dtype, interleave):
        x = randn(2, 3, 50, 20).to(dtype)
        cos_sin = angles(range(50), frequencies_of("dense"))
        turned = rotated(x, *cos_sin, interleave)
        assert turned.dtype == dtype
        assert torch.equal(turned, rotated(x.float(), *cos_sin, interleave).to(dtype))

    @pytest.mark.parametrize("interleave", [False, True])
    def test_float64_is_rotated_in_itself(self, interleave):
        """Only the angles are of float32."""
        x, (cos, sin) = randn(2, 6, 9, 20).double(), angles(range(9), frequencies_of("dense"))
        turned = rotated(x, cos, sin, interleave)
        assert turned.dtype == torch.float64
        assert torch.equal(turned, rotated(x, cos.double(), sin.double(), interleave))

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


class TestFeedForward:
    @torch.no_grad()
    def test_worked_out(self):
        # silu(3.5) is 3.397; times 4.5.
        block = FeedForward(1, 1, "silu")
        for layer, weight in ((block.gate_proj, 3.5), (block.up_proj, 4.5), (block.down_proj, 1.0)):
            layer.weight.fill_(weight)
        assert round(block(torch.ones(1)).item(), 2) == 15.29

    @torch.no_grad()
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize(("name", "function"), [("silu", F.silu), ("gelu", F.gelu), ("relu", F.relu)])
    def test_formula(self, name, function, bias):
        block, x = FeedForward(5, 7, name, bias=bias), randn(2, 3, 5)
        assert {key.split(".")[1] for key in block.state_dict()} == {"weight", "bias" if bias else "weight"}

        def linear(layer, values):
            return values @ layer.weight.T + (layer.bias if bias else 0.0)

        by_hand = linear(block.down_proj, function(linear(block.gate_proj, x)) * linear(block.up_proj, x))
        assert max_abs(block(x), by_hand) < 1e-6

    def test_unknown_activation(self):
        with pytest.raises(ValueError, match="hidden_act = 'swish2'.*silu"):
            activation("swish2")
