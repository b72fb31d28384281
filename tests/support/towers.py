"""Small vision towers of open_clip, their files, and comparisons of features."""

import json
import math

import torch
from open_clip.transformer import QuickGELU, VisionTransformer
from safetensors.torch import save_file
from support.models import load_whole, max_abs
from torch import nn

import llamoe

# The width is no multiple of 64. With the ratio, open_clip bigG's, WIDTH * MLP_RATIO is no integer, and is rounded.
WIDTH, HEADS_HERE, LAYERS, PATCH, EMBED, GRID = 104, 4, 3, 6, 40, 7
MLP_RATIO = 4.9231
INNER = int(WIDTH * MLP_RATIO)
SIZE = GRID * PATCH


def randomize(model: nn.Module) -> nn.Module:
    """Draw weights with which no norm is the identity, and attention is far from uniform; return the model."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                is_norm = any(part in name for part in ("norm", "ln_")) and name.endswith("weight")
                parameter.copy_(float(is_norm) + 0.2 * noise)
            else:
                attention = any(part in name for part in ("q_proj", "k_proj", "in_proj"))
                ramp = torch.linspace(-0.1, 0.1, parameter.shape[0]).view(-1, *[1] * (parameter.dim() - 1))
                parameter.copy_(
                    (1.5 if attention else 1.0) * (noise + ramp) / math.sqrt(parameter[0].numel())
                )
    return model.eval()


def pictures(size: int = SIZE) -> torch.Tensor:
    """Return three pictures `[3, 3, size, size]` without symmetry."""
    generator = torch.Generator().manual_seed(5)
    ramp = torch.linspace(-1, 1, size)
    return torch.randn(3, 3, size, size, generator=generator) + 0.1 * ramp + 0.2 * ramp[:, None]


def check_close(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Check that features are equal but for the order of sums, and return the largest difference."""
    assert ours.shape == reference.shape
    difference, scale = max_abs(ours, reference), reference.abs().max().item()
    assert scale > 0.01, "the reference says nothing"
    # Measured: 1e-6 to 4e-6 at a scale of 4.
    assert difference <= 1e-5 * scale, f"{difference} at scale {scale}"
    return difference


def open_clip_tower(activation: type[nn.Module] = QuickGELU, **changes) -> VisionTransformer:
    """Build a small tower of open_clip."""
    arguments = dict(
        image_size=SIZE, patch_size=PATCH, width=WIDTH, layers=LAYERS, heads=HEADS_HERE, mlp_ratio=MLP_RATIO,
        output_dim=EMBED, act_layer=activation, output_tokens=True,
    )  # fmt: skip
    return VisionTransformer(**{**arguments, **changes})


def visual_state(tower: nn.Module, prefix: str = "visual.") -> dict[str, torch.Tensor]:
    """Return a copy of a tower's state dict, by the names in files of whole CLIP models."""
    return {f"{prefix}{name}": value.clone() for name, value in tower.state_dict().items()}


def open_clip_config(quick_gelu: bool = True, preprocess: dict | None = None, **vision) -> dict:
    """Return the content of open_clip_config.json for the small tower; `vision` replaces fields."""
    described = {
        "image_size": SIZE,
        "layers": LAYERS,
        "width": WIDTH,
        "head_width": WIDTH // HEADS_HERE,
        "mlp_ratio": MLP_RATIO,
        "patch_size": PATCH,
    }
    model = {
        "embed_dim": EMBED,
        "vision_cfg": {**described, **vision},
        "text_cfg": {"width": 32, "layers": 1},
    }
    if quick_gelu:
        # open_clip's own files have this key only if it is true.
        model["quick_gelu"] = True
    return {"model_cfg": model, "preprocess_cfg": preprocess or {}}


def write_open_clip(folder, state: dict[str, torch.Tensor], config: dict | None = None):
    """Write a folder as open_clip publishes it, and return it; without `config` write and return one file."""
    folder.mkdir(exist_ok=True)
    file = folder / ("open_clip_model.safetensors" if config else "weights.safetensors")
    save_file(state, file)
    if config is None:
        return file
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


def load_tower(folder) -> llamoe.LlamoeVisionModel:
    """Load a converted tower, and check that every key fits."""
    return load_whole(llamoe.LlamoeVisionModel, folder)


def clip_fields(activation: str = "quick_gelu", **changes) -> dict:
    """Return the fields of stock configurations of CLIP and MetaCLIP 2 for the small tower."""
    fields = dict(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS_HERE,
        image_size=SIZE, patch_size=PATCH, projection_dim=EMBED, hidden_act=activation,
    )  # fmt: skip
    return {**fields, **changes}
