"""Compare the vision tower with transformers' Llama 4 tower, and its parts with computations in the tests."""

import copy
import re

import pytest
import torch
from support.models import VISION, rounded_to_bfloat16
from support.towers import check_close, max_abs, randomize
from torch import nn
from transformers import Llama4VisionConfig, Llama4VisionModel

from llamoe.configuration.vision import LlamoeVisionConfig
from llamoe.modeling.layers.rotary import rotary_2d_cos_sin
from llamoe.modeling.vision import LlamoeVisionModel, pixel_shuffle

SIZES = VISION | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
TILES = 5


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def stock_tower(attn_implementation: str = "sdpa") -> Llama4VisionModel:
    return randomize(Llama4VisionModel(Llama4VisionConfig(**SIZES, attn_implementation=attn_implementation)))


def our_tower(stock: nn.Module | None = None, **changes) -> LlamoeVisionModel:
    changes.setdefault("attn_implementation", "sdpa")
    model = LlamoeVisionModel(LlamoeVisionConfig(**(SIZES | changes)))
    if stock is None:
        return randomize(model)
    model.load_state_dict(stock.state_dict(), strict=True)
    return model.eval()


def random_tiles(count: int = TILES, size: int = 56) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    ramp = torch.linspace(-1, 1, size)
    return torch.randn(count, 3, size, size, generator=generator) + 0.1 * ramp + 0.2 * ramp[:, None]


class TestEqualsStock:
    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_outputs_float32(self, implementation, record_parity):
        stock = stock_tower(implementation)
        ours = our_tower(stock, attn_implementation=implementation)
        pixels = random_tiles()
        wanted = {"output_hidden_states": True, "output_attentions": True}
        reference, result = stock(pixels, **wanted), ours(pixels, **wanted)

        assert result.last_hidden_state.shape == (TILES, ours.config.tokens_per_tile, 44)
        assert result.pooler_output is None
        difference = check_close(result.last_hidden_state, reference.last_hidden_state)
        assert len(result.hidden_states) == len(reference.hidden_states) == SIZES["num_hidden_layers"] + 1
        for ours_state, stock_state in zip(result.hidden_states, reference.hidden_states, strict=True):
            check_close(ours_state, stock_state)
        if implementation == "eager":
            assert len(result.attentions) == SIZES["num_hidden_layers"]
            for ours_weights, stock_weights in zip(result.attentions, reference.attentions, strict=True):
                check_close(ours_weights, stock_weights)
        record_parity("vision tower", "Llama4VisionModel", "float32", difference, implementation)

    def test_autocast(self):
        stock = stock_tower()
        ours = our_tower(stock)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reference = stock(random_tiles()).last_hidden_state
            result = ours(random_tiles()).last_hidden_state
        exact = stock(random_tiles()).last_hidden_state
        assert max_abs(result, exact) <= 2 * max_abs(reference, exact)


class TestCasts:
    """Casts leave rotary angles exact; stock keeps them in a complex buffer, which casts destroy."""

    def test_nothing_but_parameters_is_stored(self):
        model = our_tower()
        assert list(model.buffers()) == []
        tensors = [v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]
        assert tensors == []

    @pytest.mark.parametrize("through", [torch.bfloat16, torch.half], ids=str)
    def test_cast(self, through):
        pixels, stock = random_tiles().bfloat16(), rounded_to_bfloat16(stock_tower())
        model = copy.deepcopy(our_tower(stock).to(through)).to(torch.bfloat16)
        expected = stock(pixels.float()).last_hidden_state
        stock_error = max_abs(stock_tower().bfloat16()(pixels).last_hidden_state, expected)
        assert max_abs(model(pixels).last_hidden_state, expected) <= 2 * stock_error

    def test_default_dtype_does_not_round_the_angles(self):
        exact = rotary_2d_cos_sin(24, 88, 10000.0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            result = rotary_2d_cos_sin(24, 88, 10000.0)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(result, exact, strict=True))

    @pytest.mark.parametrize("storage", [torch.uint8, torch.float8_e4m3fn])
    def test_pixels_are_not_cast_to_a_quantized_weights_storage(self, storage):
        model = our_tower().to(torch.bfloat16)
        model.patch_embedding.linear = QuantizedLinear(model.patch_embedding.linear, storage)
        model(random_tiles())
        assert model.patch_embedding.linear.seen == torch.bfloat16


class QuantizedLinear(nn.Module):
    def __init__(self, linear: nn.Linear, storage: torch.dtype):
        super().__init__()
        self.inner, self.seen = linear, None
        self.weight = nn.Parameter(torch.zeros(4).to(storage), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype
        return self.inner(x)


class TestPixelShuffle:
    @pytest.mark.parametrize(("side", "block"), [(4, 2), (6, 3), (6, 2), (8, 4), (3, 1)])
    def test_against_loops(self, side, block):
        patches = torch.randn(2, side * side, 5)
        result = pixel_shuffle(patches, 1 / block)
        new = side // block
        assert result.shape == (2, new * new, 5 * block * block)
        for i in range(new):
            for j in range(new):
                inside = [
                    patches[:, (i * block + di) * side + j * block + dj]
                    for di in range(block)
                    for dj in range(block)
                ]
                assert torch.equal(result[:, i * new + j], torch.cat(inside, dim=-1))

    @pytest.mark.parametrize(
        ("patches", "ratio", "said"),
        [(15, 0.5, "15 patches"), (25, 0.5, "side 5"), (16, 0.4, "ratio 0.4"), (9, 0.75, "ratio 0.75")],
    )
    def test_what_does_not_fold_is_refused(self, patches, ratio, said):
        with pytest.raises(ValueError, match=said):
            pixel_shuffle(torch.zeros(1, patches, 3), ratio)


class TestFeatureLayer:
    @pytest.mark.parametrize("layer", [-4, -3, -2, -1, 0, 1, 2, 3])
    def test_selects_from_hidden_states(self, layer):
        switches = {"use_adapter": False, "use_post_layernorm": False, "vision_feature_layer": layer}
        model = our_tower(**switches)
        calls = []
        for index, module in enumerate(model.model.layers):
            module.register_forward_hook(lambda *_, index=index: calls.append(index))
        result = model(random_tiles())
        needed = list(range(layer if layer >= 0 else layer + 4))
        assert calls == needed, "layers behind the selected one are not computed"
        recorded = model(random_tiles(), output_hidden_states=True)
        assert len(recorded.hidden_states) == 4
        assert torch.equal(result.last_hidden_state, recorded.hidden_states[layer][:, :-1])
        assert torch.equal(recorded.last_hidden_state, result.last_hidden_state)
        assert torch.equal(result.pooler_output, recorded.hidden_states[layer][:, -1])
        distinct = [max_abs(recorded.hidden_states[layer], state) > 0.1 for state in recorded.hidden_states]
        assert distinct.count(False) == 1


class TestSwitches:
    def test_final_activation(self):
        with_act, without = our_tower(), our_tower(projector_final_act=False)
        linear = without(random_tiles()).last_hidden_state
        check_close(nn.functional.gelu(linear), with_act(random_tiles()).last_hidden_state)

    @pytest.mark.parametrize(
        ("switches", "absent", "present"),
        [
            ({"attention_bias": False}, r".*self_attn.*bias", ".*fc1.bias"),
            ({"multi_modal_projector_bias": True}, "nothing", r"vision_adapter\.mlp\.fc[12]\.bias"),
            ({"use_pre_layernorm": False}, "layernorm_pre", "layernorm_post"),
            ({"use_post_layernorm": False}, "layernorm_post", "layernorm_pre"),
        ],
    )
    def test_biases_and_norms_can_be_left_out(self, switches, absent, present):
        names = our_tower(**switches).state_dict()
        assert not [name for name in names if re.match(absent, name)]
        assert [name for name in names if re.match(present, name)]

    def test_quick_gelu_leaves_the_adapter_alone(self):
        outputs = []
        for act in ("gelu", "quick_gelu"):
            model = our_tower(hidden_act=act)
            outputs.append(model.vision_adapter(torch.ones(1, 16, 120) * torch.linspace(-2, 2, 120)))
        assert torch.equal(*outputs)

    @pytest.mark.parametrize("field", ["projector_dropout", "attention_dropout"])
    def test_dropout_in_training_only(self, field):
        model, plain = our_tower(**{field: 0.5}, attn_implementation="eager"), our_tower()
        torch.manual_seed(0)
        reference = plain(random_tiles()).last_hidden_state
        check_close(model(random_tiles()).last_hidden_state, reference)
        assert max_abs(model.train()(random_tiles()).last_hidden_state, reference) > 1e-3

    def test_projection_beside_an_adapter_of_any_widths(self):
        widths = dict(projector_input_dim=36, projector_output_dim=28)
        model = our_tower(intermediate_size=200, projection_dim=24, **widths)
        assert model.vision_adapter.mlp.fc1.weight.shape == (36, 480)
        plain = our_tower(intermediate_size=200, use_adapter=False)
        plain.load_state_dict(model.state_dict(), strict=False)
        result = model(random_tiles())
        expected = plain(random_tiles()).pooler_output @ model.visual_projection.weight.T
        assert result.last_hidden_state.shape == (TILES, 4, 28)
        check_close(result.pooler_output, expected)

    def test_full_keeps_the_class_token_last(self):
        """Without an adapter, "full" adds the class token after the patches."""
        plain = our_tower(use_adapter=False, projection_dim=24)
        whole = our_tower(plain, use_adapter=False, projection_dim=24, vision_feature_select_strategy="full")
        states, expected = whole(random_tiles()).last_hidden_state, plain(random_tiles())
        assert states.shape == (TILES, 17, SIZES["hidden_size"])
        check_close(states[:, :-1], expected.last_hidden_state)
        check_close(states[:, -1] @ plain.visual_projection.weight.T, expected.pooler_output)


class TestModelContract:
    def test_fresh_weights(self):
        torch.manual_seed(0)
        changes = {"hidden_size": 240, "initializer_range": 0.05}
        model = LlamoeVisionModel(LlamoeVisionConfig(**(SIZES | changes)))
        assert model.class_embedding.std().item() == pytest.approx(240**-0.5, rel=0.2)
        assert model.positional_embedding_vlm.std().item() == pytest.approx(240**-0.5, rel=0.05)
        assert model.model.layers[0].mlp.fc1.weight.std().item() == pytest.approx(0.05, rel=0.05)
        assert torch.equal(model.layernorm_pre.weight, torch.ones(240))

    def test_keywords_of_the_text_do_not_reach_the_tower(self):
        # The lengths of packed sequences would change the attention between patches.
        model = our_tower(attn_implementation="eager")
        text = {"cu_seq_lens_q": torch.tensor([0, 3]), "is_causal": True, "position_ids": torch.arange(3)}
        result = model(random_tiles(), **text).last_hidden_state
        assert torch.equal(result, model(random_tiles()).last_hidden_state)


BAD_PIXELS = {
    "5-d": torch.zeros(2, 5, 3, 56, 56),
    "3-d": torch.zeros(3, 56, 56),
    "channels": torch.zeros(2, 4, 56, 56),
    "channels-last": torch.zeros(2, 56, 56, 3),
    "not-square": torch.zeros(2, 3, 56, 70),
    "small": torch.zeros(2, 3, 28, 28),
    "uint8": torch.zeros(2, 3, 56, 56, dtype=torch.uint8),
    "int64": torch.zeros(2, 3, 56, 56, dtype=torch.int64),
}


@pytest.mark.parametrize("kind", BAD_PIXELS)
def test_bad_pixels_are_refused_with_the_reason(kind):
    pixels = BAD_PIXELS[kind]
    wrong = str([*pixels.shape]) if pixels.is_floating_point() else str(pixels.dtype)
    with pytest.raises(ValueError, match=f"pixel_values.*{re.escape(wrong)}"):
        our_tower()(pixels)
