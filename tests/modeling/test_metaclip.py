"""The vision tower with MetaCLIP's switches, against open_clip's own transformer and transformers' CLIP."""

import math

import pytest
import torch
from open_clip.transformer import QuickGELU, VisionTransformer
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from llamoe.configuration.vision import LlamoeVisionConfig
from llamoe.modeling.vision import LlamoeVisionModel

WIDTH, HEADS, LAYERS, PATCH, EMBED = 104, 4, 3, 6, 40
# bigG's ratio, and heads of 26 channels: no multiple of four, which only the rotary embedding needs.
MLP_RATIO = 4.9231
MLP_WIDTH = int(WIDTH * MLP_RATIO)
IMAGES = 4
# Odd as in the models for 378 pixels (27 patches a side): no adapter could fold it.
ODD, EVEN = 7 * PATCH, 8 * PATCH


def randomize(model: nn.Module) -> nn.Module:
    """Fill weights with noise and a slight ramp; norms away from one, attention far from uniform."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            rows = torch.linspace(-1, 1, parameter.shape[0]).view(-1, *[1] * (parameter.dim() - 1))
            if parameter.dim() == 1:
                norm = any(part in name for part in ("norm", "ln_", "layrnorm")) and name.endswith("weight")
                parameter.copy_(float(norm) + 0.2 * noise + 0.1 * rows)
            else:
                attention = any(part in name for part in ("q_proj", "k_proj", "in_proj"))
                fan_in = parameter.shape[1:].numel()
                parameter.copy_((1.5 if attention else 1.0) * (noise + 0.1 * rows) / math.sqrt(fan_in))
    return model.eval()


def round_to_bfloat16(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def images(size: int = ODD) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    ramp = torch.linspace(-1, 1, size)
    return torch.randn(IMAGES, 3, size, size, generator=generator) + 0.1 * ramp + 0.2 * ramp[:, None]


def max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
    return (a.float() - b.float()).abs().max().item()


def assert_equal_fp32(ours: torch.Tensor, reference: torch.Tensor) -> float:
    difference, scale = max_abs(ours, reference), reference.abs().max().item()
    assert scale > 0.01, "the reference says nothing"
    assert difference <= 1e-5 * scale, f"{difference} at scale {scale}"
    return difference


def open_clip_tower(activation: type[nn.Module] = nn.GELU, size: int = ODD) -> VisionTransformer:
    return randomize(
        VisionTransformer(
            image_size=size,
            patch_size=PATCH,
            width=WIDTH,
            layers=LAYERS,
            heads=HEADS,
            mlp_ratio=MLP_RATIO,
            output_dim=EMBED,
            act_layer=activation,
            output_tokens=True,
        )
    )


def clip_tower(activation: str = "gelu") -> CLIPVisionModelWithProjection:
    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=MLP_WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=ODD,
        patch_size=PATCH,
        projection_dim=EMBED,
        hidden_act=activation,
    )
    return randomize(CLIPVisionModelWithProjection(config))


def our_tower(state: dict[str, torch.Tensor] | None = None, **changes) -> LlamoeVisionModel:
    fields = {
        "hidden_size": WIDTH,
        "intermediate_size": MLP_WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "image_size": ODD,
        "patch_size": PATCH,
        "projection_dim": EMBED,
        "use_rope": False,
        "use_adapter": False,
    }
    model = LlamoeVisionModel(LlamoeVisionConfig(**(fields | changes))).eval()
    if state is not None:
        model.load_state_dict(state, strict=True)
    return model


def from_open_clip(tower: VisionTransformer) -> dict[str, torch.Tensor]:
    """Rename and re-arrange: class token last, convolution to linear, fused projections apart."""
    source = tower.state_dict()
    positions = source["positional_embedding"]
    state = {
        "class_embedding": source["class_embedding"],
        "positional_embedding_vlm": torch.cat([positions[1:], positions[:1]]),
        "patch_embedding.linear.weight": source["conv1.weight"].reshape(WIDTH, -1),
        "visual_projection.weight": source["proj"].T.contiguous(),
    }
    for kind in ("weight", "bias"):
        state[f"layernorm_pre.{kind}"] = source[f"ln_pre.{kind}"]
        state[f"layernorm_post.{kind}"] = source[f"ln_post.{kind}"]
        for n in range(LAYERS):
            theirs, ours = f"transformer.resblocks.{n}", f"model.layers.{n}"
            fused = source[f"{theirs}.attn.in_proj_{kind}"].chunk(3)
            for name, part in zip(("q_proj", "k_proj", "v_proj"), fused, strict=True):
                state[f"{ours}.self_attn.{name}.{kind}"] = part
            state[f"{ours}.self_attn.o_proj.{kind}"] = source[f"{theirs}.attn.out_proj.{kind}"]
            state[f"{ours}.input_layernorm.{kind}"] = source[f"{theirs}.ln_1.{kind}"]
            state[f"{ours}.post_attention_layernorm.{kind}"] = source[f"{theirs}.ln_2.{kind}"]
            state[f"{ours}.mlp.fc1.{kind}"] = source[f"{theirs}.mlp.c_fc.{kind}"]
            state[f"{ours}.mlp.fc2.{kind}"] = source[f"{theirs}.mlp.c_proj.{kind}"]
    return state


def from_clip(tower: CLIPVisionModelWithProjection) -> dict[str, torch.Tensor]:
    renamed = (
        ("vision_model.", ""),
        ("pre_layrnorm", "layernorm_pre"),
        ("post_layernorm", "layernorm_post"),
        ("encoder.layers", "model.layers"),
        ("layer_norm1", "input_layernorm"),
        ("layer_norm2", "post_attention_layernorm"),
        ("out_proj", "o_proj"),
        ("embeddings.class_embedding", "class_embedding"),
        ("embeddings.patch_embedding", "patch_embedding.linear"),
        ("embeddings.position_embedding.weight", "positional_embedding_vlm"),
    )
    state = {}
    for key, value in tower.state_dict().items():
        if key.endswith("position_ids"):
            continue
        for theirs, ours in renamed:
            key = key.replace(theirs, ours)
        if key == "positional_embedding_vlm":
            value = torch.cat([value[1:], value[:1]])
        state[key] = value.reshape(WIDTH, -1) if key == "patch_embedding.linear.weight" else value
    return state


ACTIVATIONS = [
    pytest.param(nn.GELU, "gelu", id="gelu"),
    pytest.param(QuickGELU, "quick_gelu", id="quick_gelu"),
]


class TestOpenClip:
    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize(("module", "activation"), ACTIVATIONS)
    def test_float32(self, module, activation, implementation, record_parity):
        reference = open_clip_tower(module)
        ours = our_tower(from_open_clip(reference), hidden_act=activation, attn_implementation=implementation)
        with torch.no_grad():
            pooled, tokens = reference(images())
            result = ours(images())
        assert result.last_hidden_state.shape == (IMAGES, 49, WIDTH)
        assert ours.config.tokens_per_tile == 49
        note = f"{activation}, {implementation}"
        difference = assert_equal_fp32(result.last_hidden_state, tokens)
        record_parity("MetaCLIP patch tokens", "open_clip VisionTransformer", "float32", difference, note)
        difference = assert_equal_fp32(result.pooler_output, pooled)
        record_parity("MetaCLIP image embedding", "open_clip VisionTransformer", "float32", difference, note)

    @pytest.mark.parametrize(("module", "activation"), ACTIVATIONS)
    def test_bfloat16(self, module, activation, record_parity):
        reference = round_to_bfloat16(open_clip_tower(module))
        ours = our_tower(from_open_clip(reference), hidden_act=activation).to(torch.bfloat16)
        pixels = images().bfloat16()
        with torch.no_grad():
            exact_pooled, exact_tokens = reference(pixels.float())
            result = ours(pixels)
            pooled, tokens = reference.bfloat16()(pixels)
        for name, mine, theirs, exact in (
            ("patch tokens", result.last_hidden_state, tokens, exact_tokens),
            ("image embedding", result.pooler_output, pooled, exact_pooled),
        ):
            error, reference_error = max_abs(mine, exact), max_abs(theirs, exact)
            assert mine.dtype == torch.bfloat16
            assert 0 < reference_error
            assert error <= 2 * reference_error, name
            against = "open_clip VisionTransformer in float32"
            record_parity(f"MetaCLIP {name}", against, "bfloat16", error, activation)
            record_parity(f"open_clip {name}", "itself in float32", "bfloat16", reference_error, activation)

    @pytest.mark.parametrize(("module", "activation"), ACTIVATIONS)
    def test_gradients(self, module, activation):
        reference = open_clip_tower(module)
        ours = our_tower(from_open_clip(reference), hidden_act=activation)
        token_weights, pooled_weights = torch.randn(IMAGES, 49, WIDTH), torch.randn(IMAGES, EMBED)
        their_pixels, our_pixels = images().requires_grad_(), images().requires_grad_()
        pooled, tokens = reference(their_pixels)
        ((tokens * token_weights).sum() + (pooled * pooled_weights).sum()).backward()
        result = ours(our_pixels)
        tokens, pooled = result.last_hidden_state, result.pooler_output
        ((tokens * token_weights).sum() + (pooled * pooled_weights).sum()).backward()
        assert_equal_fp32(our_pixels.grad, their_pixels.grad)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.copy_(parameter.grad)
        for name, gradient in from_open_clip(reference).items():
            if name.endswith("k_proj.bias"):
                continue  # zero but for rounding: softmax does not see a vector added to every key
            assert_equal_fp32(ours.get_parameter(name).grad, gradient)

    def test_full_keeps_the_class_token_last(self):
        reference = open_clip_tower()
        state = from_open_clip(reference)
        ours = our_tower(state, vision_feature_select_strategy="full")
        with torch.no_grad():
            pooled, tokens = reference(images())
            states = ours(images()).last_hidden_state
        assert states.shape == (IMAGES, 50, WIDTH)
        assert_equal_fp32(states[:, :-1], tokens)
        assert_equal_fp32(states[:, -1] @ reference.proj, pooled)

    def test_without_projection_the_pooled_output_is_the_class_token(self):
        reference = open_clip_tower()
        state = {k: v for k, v in from_open_clip(reference).items() if k != "visual_projection.weight"}
        ours = our_tower(state, projection_dim=None)
        with torch.no_grad():
            pooled, _ = reference(images())
            assert_equal_fp32(ours(images()).pooler_output @ reference.proj, pooled)

    def test_intermediate_layers(self):
        reference = open_clip_tower()
        ours = our_tower(from_open_clip(reference))
        with torch.no_grad():
            theirs = reference.forward_intermediates(images(), output_fmt="NLC", intermediates_only=True)
            states = ours(images(), output_hidden_states=True).hidden_states
        assert len(theirs["image_intermediates"]) == LAYERS == len(states) - 1
        for state, expected in zip(states[1:], theirs["image_intermediates"], strict=True):
            assert_equal_fp32(state[:, :-1], expected)

    def test_with_an_adapter_in_front_of_a_language_model(self):
        # The grid is even here; the encoder's results are the same and the new adapter folds them.
        reference = open_clip_tower(size=EVEN)
        adapter = {"projector_input_dim": 36, "projector_output_dim": 28}
        ours = our_tower(image_size=EVEN, use_adapter=True, **adapter)
        missing, unexpected = ours.load_state_dict(from_open_clip(reference), strict=False)
        assert set(missing) == {"vision_adapter.mlp.fc1.weight", "vision_adapter.mlp.fc2.weight"}
        assert unexpected == []
        randomize(ours.vision_adapter)
        fc1, fc2 = ours.vision_adapter.mlp.fc1.weight, ours.vision_adapter.mlp.fc2.weight
        with torch.no_grad():
            pooled, tokens = reference(images(EVEN))
            result = ours(images(EVEN))
            blocks = tokens.view(IMAGES, 4, 2, 4, 2, WIDTH).transpose(2, 3).reshape(IMAGES, 16, 4 * WIDTH)
            expected = nn.functional.gelu(nn.functional.gelu(blocks @ fc1.T) @ fc2.T)
        assert_equal_fp32(result.last_hidden_state, expected)
        assert_equal_fp32(result.pooler_output, pooled)

    def test_odd_grid_and_adapter_are_refused(self):
        with pytest.raises(ValueError, match="7 by 7"):
            our_tower(use_adapter=True)

    @pytest.mark.parametrize(
        "wrong",
        [{"hidden_act": "quick_gelu"}, {"use_rope": True}, {"norm_eps": 1e-2}, {"vision_feature_layer": -2}],
        ids=lambda wrong: next(iter(wrong)),
    )
    def test_a_wrong_switch_shows(self, wrong):
        # Thirteen heads of eight channels, since rotation wants heads of a multiple of four.
        shape = {"num_attention_heads": 13}
        state = from_open_clip(open_clip_tower())
        with torch.no_grad():
            right = our_tower(state, **shape)(images()).last_hidden_state
            assert max_abs(our_tower(state, **shape, **wrong)(images()).last_hidden_state, right) > 1e-2


class TestClip:
    @pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
    def test_float32(self, activation, record_parity):
        reference = clip_tower(activation)
        ours = our_tower(from_clip(reference), hidden_act=activation)
        with torch.no_grad():
            expected = reference(images(), output_hidden_states=True)
            result = ours(images(), output_hidden_states=True)
        difference = assert_equal_fp32(result.pooler_output, expected.image_embeds)
        for state, theirs in zip(result.hidden_states, expected.hidden_states, strict=True):
            assert_equal_fp32(torch.cat([state[:, -1:], state[:, :-1]], dim=1), theirs)
        against = "transformers CLIPVisionModelWithProjection"
        record_parity("MetaCLIP image embedding", against, "float32", difference, activation)

    @pytest.mark.parametrize("layer", [-2, -3])
    def test_llava_features(self, layer, record_parity):
        """LLaVA takes the patches of the last layer but one, without the norm behind the encoder."""
        reference = clip_tower("quick_gelu")
        state = {
            name: value
            for name, value in from_clip(reference).items()
            if not name.startswith(("layernorm_post", "visual_projection"))
        }
        ours = our_tower(
            state,
            hidden_act="quick_gelu",
            projection_dim=None,
            use_post_layernorm=False,
            vision_feature_layer=layer,
        )
        with torch.no_grad():
            expected = reference(images(), output_hidden_states=True).hidden_states[layer]
            result = ours(images())
        difference = assert_equal_fp32(result.last_hidden_state, expected[:, 1:])
        assert_equal_fp32(result.pooler_output, expected[:, 0])
        note = f"patches of layer {layer}, no norm"
        against = "transformers CLIPVisionModelWithProjection"
        record_parity("LLaVA features", against, "float32", difference, note)

    def test_attention_weights(self):
        reference = clip_tower()
        reference.set_attn_implementation("eager")
        ours = our_tower(from_clip(reference), attn_implementation="eager")
        with torch.no_grad():
            expected = reference(images(), output_attentions=True).attentions
            result = ours(images(), output_attentions=True).attentions
        order = [*range(1, 50), 0]
        for weights, theirs in zip(result, expected, strict=True):
            assert_equal_fp32(weights, theirs[:, :, order][..., order])
