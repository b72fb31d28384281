"""The vision tower alone: Llama 4's against stock and the reference, MetaCLIP's switches against the reference."""

import random
from typing import Any

import torch
import transformers

import llamoe

from ..draw import DTYPES, chance, draw_vision, draw_weights
from ..judge import Judge, JudgeIsWrong, Wrong
from ..subject import exact_weights
from ..tower_reference import Tower


def draw_switches(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that stock's tower does not have."""
    count = fields["num_hidden_layers"]
    switches: dict[str, Any] = {
        "hidden_act": rng.choice(["gelu", "quick_gelu", "gelu_pytorch_tanh"]),
        "norm_eps": rng.choice([1e-5, 1e-6, 1e-3]),
        "use_rope": chance(rng, 0.5),
        "use_pre_layernorm": chance(rng, 0.7),
        "use_post_layernorm": chance(rng, 0.7),
        "vision_feature_layer": rng.randint(-count - 1, count),
        "projection_dim": rng.choice([None, 5, 12]),
        "use_adapter": chance(rng, 0.5),
        "attention_bias": chance(rng, 0.5),
        "multi_modal_projector_bias": chance(rng, 0.5),
        "projector_final_act": chance(rng, 0.5),
        # Our class derives the adapter's width from the pixel shuffle, so this field may have any value.
        "intermediate_size": rng.choice([7, 16, fields["intermediate_size"]]),
        "projector_input_dim": rng.choice([9, 20]),
    }
    if not switches["use_adapter"]:
        switches["vision_feature_select_strategy"] = rng.choice(["default", "full"])
    if not switches["use_rope"]:
        switches["hidden_size"] = fields["num_attention_heads"] * rng.choice([1, 3, 6])
    return switches


def compare(
    judge: Judge, output: Any, tower: Tower, tiles: torch.Tensor, what: str, error: type[Exception] = Wrong
) -> None:
    features, pooled, states = tower(tiles)
    judge.check_values(output.last_hidden_state, features, lambda blur: tower(tiles, blur)[0], what, error)
    if error is JudgeIsWrong:
        return
    if (pooled is None) != (output.pooler_output is None):
        raise Wrong(f"{what}: a pooled output where there should be none, or none")
    if pooled is not None:
        judge.check_values(
            output.pooler_output, pooled, lambda blur: tower(tiles, blur)[1], f"{what}, pooled"
        )
    for depth, state in enumerate(output.hidden_states or ()):
        judge.check_values(
            state, states[depth], lambda blur, i=depth: tower(tiles, blur)[2][i], f"{what}, state {depth}"
        )


@torch.no_grad()
def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(seed)
    is_stock = chance(rng, 0.5)
    fields = draw_vision(rng)
    given = dict(fields)
    if not is_stock:
        fields |= draw_switches(rng, fields)
        given = fields | {"model_type": "llamoe_vision"}
    dtype = DTYPES[rng.choice(["float32"] * 4 + list(DTYPES))]
    config = llamoe.LlamoeVisionConfig(**given)
    config._attn_implementation = rng.choice(["sdpa", "eager"])
    notes |= {"attention": config._attn_implementation, "switches": not is_stock}
    model = draw_weights(llamoe.LlamoeVisionModel._from_config(config), seed).to(dtype)
    shape = (rng.choice([1, 2, 5]), fields["num_channels"], fields["image_size"], fields["image_size"])
    tiles = torch.randn(shape, generator=generator).to(rng.choice([dtype, torch.float32]))
    judge, tower = Judge(None, dtype, seed), Tower(exact_weights(model), fields)
    options = {"output_hidden_states": True} if chance(rng, 0.3) else {}
    output = model(tiles, **options)
    exact = tiles.to(dtype).double()
    compare(judge, output, tower, exact, "tower")
    if is_stock:
        stock_config = transformers.Llama4VisionConfig(
            **{k: v for k, v in fields.items() if k != "model_type"}
        )
        stock_config._attn_implementation = config._attn_implementation
        stock = transformers.Llama4VisionModel._from_config(stock_config, dtype=dtype).eval()
        stock.load_state_dict(model.state_dict())
        compare(judge, stock(tiles.to(dtype)), tower, exact, "stock's tower", JudgeIsWrong)
