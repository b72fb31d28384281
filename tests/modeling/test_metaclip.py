"""The vision tower with MetaCLIP's switches, against open_clip's own transformer.

In float32, and against transformers' CLIP, it is compared in the tests of conversions.
"""

import pytest
import torch
from open_clip.transformer import QuickGELU
from support.models import rounded_to_bfloat16
from support.towers import (
    EMBED,
    PATCH,
    WIDTH,
    check_close,
    load_tower,
    max_abs,
    open_clip_config,
    open_clip_tower,
    pictures,
    randomize,
    visual_state,
    write_open_clip,
)
from torch import nn

from llamoe import LlamoeVisionModel
from llamoe.conversion.convert_vision import convert_vision

# The other size is odd as in the models for 378 pixels (27 patches a side): no adapter could fold it.
EVEN = 8 * PATCH
IMAGES = len(pictures())
ACTIVATIONS = pytest.mark.parametrize(
    ("module", "activation"), [(nn.GELU, "gelu"), (QuickGELU, "quick_gelu")], ids=["gelu", "quick_gelu"]
)


@pytest.fixture
def converted(tmp_path_factory):
    """Gives our tower with the weights of one of open_clip's."""

    def convert(tower, activation="gelu", **vision):
        config = open_clip_config(activation == "quick_gelu", **vision)
        source, target = (tmp_path_factory.mktemp("clip") / name for name in ("source", "tower"))
        convert_vision(write_open_clip(source, visual_state(tower), config), target)
        return load_tower(target)

    return convert


@torch.no_grad()
@ACTIVATIONS
def test_bfloat16(module, activation, converted, record_parity):
    reference = rounded_to_bfloat16(randomize(open_clip_tower(module)))
    ours = converted(reference, activation).to(torch.bfloat16)
    pixels = pictures().bfloat16()
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


@ACTIVATIONS
def test_gradients(module, activation, converted):
    reference = randomize(open_clip_tower(module))
    ours = converted(reference, activation)
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
    for name, gradient in converted(reference, activation).named_parameters():
        # That of a key's bias is zero but for rounding: softmax does not see a vector added to every key.
        if not name.endswith("k_proj.bias"):
            check_close(ours.get_parameter(name).grad, gradient)


@torch.no_grad()
def test_full_keeps_the_class_token_last(converted):
    reference = randomize(open_clip_tower(nn.GELU))
    plain = converted(reference)
    plain.config.vision_feature_select_strategy = "full"
    ours = LlamoeVisionModel(plain.config).eval()
    ours.load_state_dict(plain.state_dict())
    pooled, tokens = reference(pictures())
    states = ours(pictures()).last_hidden_state
    assert states.shape == (IMAGES, 50, WIDTH)
    check_close(states[:, :-1], tokens)
    check_close(states[:, -1] @ reference.proj, pooled)


@torch.no_grad()
def test_with_an_adapter_in_front_of_a_language_model(converted):
    """The grid is even here; the encoder's results are the same and the new adapter folds them."""
    reference = randomize(open_clip_tower(nn.GELU, image_size=EVEN))
    plain = converted(reference, image_size=EVEN)
    config = type(plain.config).from_dict(
        plain.config.to_dict() | {"use_adapter": True, "projector_input_dim": 36, "projector_output_dim": 28}
    )
    ours = LlamoeVisionModel(config).eval()
    missing, unexpected = ours.load_state_dict(plain.state_dict(), strict=False)
    assert set(missing) == {"vision_adapter.mlp.fc1.weight", "vision_adapter.mlp.fc2.weight"}
    assert unexpected == []
    randomize(ours.vision_adapter)
    fc1, fc2 = ours.vision_adapter.mlp.fc1.weight, ours.vision_adapter.mlp.fc2.weight
    pooled, tokens = reference(pictures(EVEN))
    result = ours(pictures(EVEN))
    blocks = tokens.view(IMAGES, 4, 2, 4, 2, WIDTH).transpose(2, 3).reshape(IMAGES, 16, 4 * WIDTH)
    expected = nn.functional.gelu(nn.functional.gelu(blocks @ fc1.T) @ fc2.T)
    check_close(result.last_hidden_state, expected)
    check_close(result.pooler_output, pooled)
