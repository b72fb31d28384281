"""The vision tower with MetaCLIP's switches, against open_clip's own transformer.

In float32, and against transformers' CLIP, it is compared in the tests of conversions.
"""

import pytest
import torch
from open_clip.transformer import QuickGELU, VisionTransformer
from support.models import rounded_to_bfloat16
from support.towers import (
    EMBED,
    HEADS_HERE,
    INNER,
    LAYERS,
    PATCH,
    SIZE,
    WIDTH,
    check_close,
    max_abs,
    open_clip_tower,
    pictures,
    randomize,
)
from torch import nn

from llamoe.configuration.vision import LlamoeVisionConfig
from llamoe.modeling.vision import LlamoeVisionModel

# The other size is odd as in the models for 378 pixels (27 patches a side): no adapter could fold it.
EVEN = 8 * PATCH
IMAGES = len(pictures())


def our_tower(state: dict[str, torch.Tensor] | None = None, **changes) -> LlamoeVisionModel:
    fields = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS_HERE,
        "image_size": SIZE,
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


ACTIVATIONS = [
    pytest.param(nn.GELU, "gelu", id="gelu"),
    pytest.param(QuickGELU, "quick_gelu", id="quick_gelu"),
]


class TestOpenClip:
    @pytest.mark.parametrize(("module", "activation"), ACTIVATIONS)
    def test_bfloat16(self, module, activation, record_parity):
        reference = rounded_to_bfloat16(randomize(open_clip_tower(module)))
        ours = our_tower(from_open_clip(reference), hidden_act=activation).to(torch.bfloat16)
        pixels = pictures().bfloat16()
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
        reference = randomize(open_clip_tower(module))
        ours = our_tower(from_open_clip(reference), hidden_act=activation)
        token_weights, pooled_weights = torch.randn(IMAGES, 49, WIDTH), torch.randn(IMAGES, EMBED)
        their_pixels, our_pixels = pictures().requires_grad_(), pictures().requires_grad_()
        pooled, tokens = reference(their_pixels)
        ((tokens * token_weights).sum() + (pooled * pooled_weights).sum()).backward()
        result = ours(our_pixels)
        tokens, pooled = result.last_hidden_state, result.pooler_output
        ((tokens * token_weights).sum() + (pooled * pooled_weights).sum()).backward()
        check_close(our_pixels.grad, their_pixels.grad)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.copy_(parameter.grad)
        for name, gradient in from_open_clip(reference).items():
            if name.endswith("k_proj.bias"):
                continue  # zero but for rounding: softmax does not see a vector added to every key
            check_close(ours.get_parameter(name).grad, gradient)

    def test_full_keeps_the_class_token_last(self):
        reference = randomize(open_clip_tower(nn.GELU))
        state = from_open_clip(reference)
        ours = our_tower(state, vision_feature_select_strategy="full")
        with torch.no_grad():
            pooled, tokens = reference(pictures())
            states = ours(pictures()).last_hidden_state
        assert states.shape == (IMAGES, 50, WIDTH)
        check_close(states[:, :-1], tokens)
        check_close(states[:, -1] @ reference.proj, pooled)

    def test_with_an_adapter_in_front_of_a_language_model(self):
        # The grid is even here; the encoder's results are the same and the new adapter folds them.
        reference = randomize(open_clip_tower(nn.GELU, image_size=EVEN))
        adapter = {"projector_input_dim": 36, "projector_output_dim": 28}
        ours = our_tower(image_size=EVEN, use_adapter=True, **adapter)
        missing, unexpected = ours.load_state_dict(from_open_clip(reference), strict=False)
        assert set(missing) == {"vision_adapter.mlp.fc1.weight", "vision_adapter.mlp.fc2.weight"}
        assert unexpected == []
        randomize(ours.vision_adapter)
        fc1, fc2 = ours.vision_adapter.mlp.fc1.weight, ours.vision_adapter.mlp.fc2.weight
        with torch.no_grad():
            pooled, tokens = reference(pictures(EVEN))
            result = ours(pictures(EVEN))
            blocks = tokens.view(IMAGES, 4, 2, 4, 2, WIDTH).transpose(2, 3).reshape(IMAGES, 16, 4 * WIDTH)
            expected = nn.functional.gelu(nn.functional.gelu(blocks @ fc1.T) @ fc2.T)
        check_close(result.last_hidden_state, expected)
        check_close(result.pooler_output, pooled)
